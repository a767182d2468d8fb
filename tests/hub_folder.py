"""A model hub's cache on the disk, filled with tiny models, and a network that is off."""

import hashlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from cwlib.checkpoints import tiny_checkpoint
from cwlib.corpus import Passage
from cwlib.loading import quiet

TEXTS = (
    Passage("first", "two short sentences", "A short text, of two lines. It is here, and ends."),
    Passage("second", "numbers", "Another one: 1, 2, 3; then 4 and 5!! And so on, to 9 and 10."),
)


def commit_of(name: str) -> str:
    """A commit hash for a model that nobody committed."""
    return hashlib.sha256(name.encode()).hexdigest()[:40]


def bytes_as_tokens() -> Tokenizer:
    """A byte-level tokenizer without merges, as those of the decoders are but for the merges."""
    vocabulary = {letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()), 3)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    return tokenizer


def put(hub: Path, name: str, family: str, commit: str | None = None, main: bool = True, **overrides: int) -> Path:
    """A tiny model in the layout of the hub's cache: refs/main names the snapshot; returns the snapshot's folder."""
    commit = commit or commit_of(name)
    home = hub / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    with quiet():
        tiny_checkpoint(family, seed=len(name), **overrides).model.save_pretrained(snapshot)
        PreTrainedTokenizerFast(tokenizer_object=bytes_as_tokens(), unk_token="!").save_pretrained(snapshot)
    if main:
        (home / "refs").mkdir(exist_ok=True)
        (home / "refs" / "main").write_text(commit)
    return snapshot


@contextmanager
def no_network() -> Iterator[list[object]]:
    """Refuse every connection and look-up of a name outside this machine; yields those that were tried."""
    tried: list[object] = []

    def refuse(_socket: object, address: object, *_: object) -> None:
        tried.append(address)
        raise OSError(101, "Network is unreachable")

    def unknown(host: object, *_: object, **__: object) -> None:
        tried.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(socket.socket, "connect_ex", refuse)
        patch.setattr(socket, "getaddrinfo", unknown)
        yield tried
