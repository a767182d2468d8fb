"""Whether the hub can be reached, found out once for all, and what to do where it cannot or will not."""

from __future__ import annotations

import errno
import time
from threading import Thread

from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import get_session

SECONDS = 5.0  #: that the hub has to answer
PAUSE = 60.0  #: seconds after which a hub that did not answer is asked again

_ELSEWHERE = (
    "fetch it where there is a network (`hf download NAME --revision COMMIT`, the commit if cwlib/hub.json lists one), "
    "and let HF_HOME name that cache folder here"
)
_asked = {"silent until": -1.0}  # on the monotonic clock


def why_unreachable() -> str:
    """Why what is not in the hub's cache cannot be had now, with advice; empty if the hub answers.

    A hub that does not answer is not asked again for `PAUSE` seconds: one model after the other would wait for it, and
    the hub's client for minutes each time.
    """
    missing = f"it is not, or not whole, in the hub's cache ({constants.HF_HUB_CACHE})"
    if constants.is_offline_mode():
        return f"{missing}, and the hub is switched off: unset HF_HUB_OFFLINE, or {_ELSEWHERE}"
    if time.monotonic() >= _asked["silent until"]:
        _asked["silent until"] = -1.0 if answers() else time.monotonic() + PAUSE
    if _asked["silent until"] < 0:
        return ""
    return (
        f"{missing}, and the hub cannot be reached ({constants.ENDPOINT} does not answer within {SECONDS:.0f} s): "
        f"check the network, a proxy, and HF_ENDPOINT, or {_ELSEWHERE}"
    )


def answers() -> bool:
    """Whether the hub answers a request within `SECONDS`, whatever it says."""
    answered: list[bool] = []

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=SECONDS)
            answered.append(True)
        except Exception:  # the errors of the HTTP client in use
            return

    # looking up a name has a time limit of its own, in another thread it does not hold us up
    thread = Thread(target=ask, name="cwlib-hub", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return bool(answered)


def refusal(repo: str, error: Exception) -> str:
    """What an error of the hub's client means to somebody who wants a model, and what to do."""
    if isinstance(error, GatedRepoError):
        return (
            f"its authors grant access on request: ask on its page, {constants.ENDPOINT}/{repo}, then run "
            "`hf auth login` with a token of that account, and the same again"
        )
    if isinstance(error, RevisionNotFoundError):
        return "the hub does not have this commit of it"
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such model, or it is private (then run `hf auth login`)"
    if getattr(error, "errno", None) == errno.ENOSPC:
        return f"the disk of {constants.HF_HUB_CACHE} is full: free some space, or let HF_HOME name a folder elsewhere"
    return "it could not be downloaded; finished files are kept, run the same again"
