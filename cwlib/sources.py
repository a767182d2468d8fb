"""Resolve what a user calls a checkpoint to a folder in the hub's layout, and to the hash of its weights."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from cwlib.catalogue import (
    CATALOGUE,
    CheckpointError,
    HubUnreachable,
    cached_folder,
    problems,
    read_provenance,
    sha256_of,
)
from cwlib.fetch import DTYPE_NAMES, convert_gguf, fetch
from cwlib.hub import HUB
from cwlib.network import refusal, why_unreachable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FORMATS = ("*.safetensors", "*.bin")  # of weights, the preferred one first


@dataclass(frozen=True)
class Source:
    """A folder with a checkpoint: its name, the weight files and the precision they are stored in."""

    name: str
    folder: Path
    weights: tuple[Path, ...]
    precision: str
    recorded: str = ""
    revision: str = ""  # the commit, of a snapshot from the hub

    @property
    def safetensors(self) -> bool:
        """Whether the weights are safetensors, not a .bin file."""
        return self.weights[0].suffix == ".safetensors"

    @cached_property
    def sha256(self) -> str:
        """Of the weights: as recorded when they were converted, or read through now, when it is asked for."""
        if self.recorded:
            return self.recorded
        digests = [sha256_of(path) for path in self.weights]
        # one file: its own hash, as the hub shows it; shards: the hash of their hashes
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def locate(source: str | os.PathLike) -> Source:
    """Find, and if need be fetch or convert, the checkpoint that `open_checkpoint` was asked for.

    Raises
    ------
    ValueError
        If the argument is no name, path or hub id.
    CheckpointError
        If the checkpoint cannot be had, or is damaged.
    """
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"source: expected a name, path, hub id or PreTrainedModel, got {type(source).__name__}")
    text = os.fspath(source)
    path = Path(text).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ValueError(f"source: there is no file {path}")
        return _converted(path.stem, convert_gguf(path))
    if isinstance(source, str) and text in CATALOGUE:
        return _catalogued(text)
    is_path = not isinstance(source, str) or "/" in text or os.sep in text or text.startswith((".", "~"))
    if is_path and path.is_dir():
        return _in_folder(path.resolve().name, path)
    if isinstance(source, str) and _HUB_ID.fullmatch(text):
        return _in_folder(text, _hub_folder(text))
    if is_path:
        raise ValueError(f"source: there is no folder {path}")
    close = difflib.get_close_matches(text, CATALOGUE, n=1, cutoff=0.4)
    raise ValueError(
        f"source: unknown name {text!r}{f', did you mean {close[0]!r}?' if close else '.'} Expected one of "
        f"{', '.join(CATALOGUE)}; a folder, as a path (./{text}); a .gguf file; or a hub id, org/name"
    )


def here(source: str) -> Source | None:
    """A folder, or a hub id that is in the hub's cache; None for anything else. No network is used."""
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_folder(path.resolve().name, path)
    if not _HUB_ID.fullmatch(source):
        return None
    pinned = HUB[source].revision if source in HUB else None
    folder = _cached(source, pinned) or _cached(source, None)
    return folder and _in_folder(source, folder)


def _catalogued(name: str) -> Source:
    folder, item = cached_folder(name), CATALOGUE[name]
    if not folder.exists():
        about = f"{item.download_bytes / 1e6:.0f} MB, {item.origin}, {item.licence}"
        print(f"cwlib: fetching {name} ({about}) into {folder}", file=sys.stderr)
        fetch(name)
    return _converted(name, folder)


def _converted(name: str, folder: Path) -> Source:
    if faults := problems(folder):
        raise CheckpointError(
            f"the cached {name} is damaged ({'; '.join(faults)}): repair it with "
            f"`python -m cwlib checkpoints fetch {name}`"
        )
    record = read_provenance(folder)
    return Source(name, folder, tuple(_weight_files(folder)), record["precision"], record["sha256"])


def _in_folder(name: str, folder: Path) -> Source:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json: expected a folder in the hub's layout")
    weights = _weight_files(folder)
    if not weights:
        raise CheckpointError(f"{folder} has a config.json but no weights: expected model.safetensors")
    if weights[0].suffix == ".safetensors":
        stored = _stored_precision(weights)
    else:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        stored = config.get("dtype") or config.get("torch_dtype") or "unstated"
    return Source(name, folder, tuple(weights), stored, revision=_revision(folder))


def _revision(folder: Path) -> str:
    place = folder.resolve()  # the hub's client calls a snapshot by its commit
    return place.name if place.parent.name == "snapshots" and _COMMIT.fullmatch(place.name) else ""


def _weight_files(folder: Path) -> list[Path]:
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{single}.index.json"
        if (folder / single).is_file():
            return [folder / single]
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(f"{index} cannot be read ({error!r}): copy or download it again") from error
            if missing := [shard for shard in shards if not (folder / shard).is_file()]:
                raise CheckpointError(f"{folder} lacks {', '.join(missing)}: copy or download it again")
            return [folder / shard for shard in shards]
    return []


def _stored_precision(weights: list[Path]) -> str:
    counts: Counter[str] = Counter()
    for path in weights:
        try:
            with safe_open(path, framework="pt") as tensors:
                counts.update(tensors.get_slice(key).get_dtype() for key in tensors.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged ({error}): copy or download it again") from error
    [(stored, _)] = counts.most_common(1) or [("unstated", 0)]
    return DTYPE_NAMES.get(stored, stored)


def _hub_folder(repo: str) -> Path:
    """The snapshot of a model: the commit that is pinned, from the cache or else the hub.

    Without a network another commit, if the cache has one, is better than nothing; its name is kept with the results.
    """
    pinned = HUB[repo].revision if repo in HUB else None
    if folder := _cached(repo, pinned):
        return folder
    if why := why_unreachable():
        if pinned and (folder := _cached(repo, None)):
            _tell(f"{repo}: commit {pinned[:12]}, which is meant, is not in the hub's cache; taking {folder.name[:12]}")
            return folder
        raise HubUnreachable(f"{repo}: {why}. Without the hub there are {', '.join(CATALOGUE)}, folders and .gguf")
    for weights in _FORMATS:
        try:
            if folder := _snapshot(repo, pinned, weights, False):
                return folder
        except Exception as error:  # the hub client's errors have no common base
            raise CheckpointError(f"{repo}: {refusal(repo, error)}. The hub's client said: {error}") from error
    raise CheckpointError(f"{repo}: the hub has no config.json with .safetensors or .bin weights at its top level")


@cache
def _tell(message: str) -> None:  # once
    print(f"cwlib: {message}", file=sys.stderr)


def _cached(repo: str, revision: str | None) -> Path | None:
    for weights in _FORMATS:
        # whatever is wrong with what the cache has of it: it is not there, or not whole
        with contextlib.suppress(Exception):
            if folder := _snapshot(repo, revision, weights, True):
                return folder
    return None


def _snapshot(repo: str, revision: str | None, weights: str, cached: bool) -> Path | None:
    wanted = ["*.json", "*.txt", "*.model", weights]
    unwanted = ["*/*", "consolidated*"]  # other formats of the same weights
    options = {"allow_patterns": wanted, "ignore_patterns": unwanted, "local_files_only": cached}
    folder = Path(snapshot_download(repo, revision=revision, **options))
    return folder if (folder / "config.json").is_file() and _weight_files(folder) else None
