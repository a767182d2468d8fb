"""What this machine has, and what would fail on it: ``python -m cwlib doctor``."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal
from uuid import uuid4

import psutil
import torch
from huggingface_hub import constants, get_token
from packaging.requirements import Requirement

from cwlib.catalogue import CATALOGUE, cache_dir, cached_folder, problems
from cwlib.network import SECONDS, answers


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    about, found : str
        What, and what there is.
    verdict : {"ok", "note", "fails"}
        "note": works with less; "fails": something that users do would end in an error.
    advice : str
        What would fail, and what to do.
    """

    about: str
    found: str
    verdict: Literal["ok", "note", "fails"] = "ok"
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Look at versions, devices, memory, cache and hub, in this order; each finding as soon as it is known."""
    for look in (_python, _packages, _devices, _memory, _cache, _checkpoints, _hub):
        yield from look()


def report(findings: Iterator[Finding], tell: Callable[[str], None] = print) -> bool:
    """Tell each finding as a line; whether nothing fails."""
    sound = True
    for finding in findings:
        sound = sound and finding.verdict != "fails"
        advice = f" - {finding.advice}" if finding.advice else ""
        tell(f"{finding.verdict:<6}{finding.about:<21}{finding.found}{advice}")
    return sound


def _python() -> Iterator[Finding]:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Finding("python", found, *(() if fits else ("fails", "cwlib needs 3.11 or 3.12")))


def _packages() -> Iterator[Finding]:
    for line in requires("cwlib") or ():
        wanted = Requirement(line)
        optional = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        try:
            found = version(wanted.name)
        except PackageNotFoundError:
            if wanted.name in _USES:
                yield Finding(wanted.name, "not installed", "note", f"without it there is no {_USES[wanted.name]}")
            elif not optional:
                yield Finding(wanted.name, "not installed", "fails", f"pip install '{wanted.name}{wanted.specifier}'")
            continue
        if wanted.specifier.contains(found, prereleases=True):
            yield Finding(wanted.name, found)
        else:
            advice = f"pip install '{wanted.name}{wanted.specifier}', the range that it is tested with"
            yield Finding(wanted.name, found, "note", advice)


_USES = {  # of packages that not all need
    "dask": "study --scheduler (pip install 'cwlib[distributed]')",
    "transformer-lens": "TransformerLens in bench (pip install 'cwlib[bench]')",
    "papermill": "make figures (pip install 'cwlib[notebooks]')",
}


def _devices() -> Iterator[Finding]:
    yield Finding("cpu", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    if not torch.cuda.is_available():
        yield Finding("cuda", "none", "note", "models run on the CPU; device='cuda' would be refused")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        try:
            ones = torch.ones(64, 64, dtype=torch.float64, device=f"cuda:{index}")
            works = float((ones @ ones)[0, 0]) == 64.0
        except RuntimeError as error:
            yield Finding(f"cuda:{index}", found, "fails", f"a product of two matrices failed: {error}")
            continue
        yield Finding(f"cuda:{index}", found, *(() if works else ("fails", "a product of two matrices is wrong")))


def _memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available
    # single precision, and about half as much again for activations and cores
    large = [name for name, item in CATALOGUE.items() if 6 * item.parameters > free]
    found = f"{free / 2**30:.1f} GiB available"
    if large:
        advice = f"{', '.join(large)} may not fit: open_checkpoint(..., offload=True) leaves weights on the disk"
        yield Finding("memory", found, "note", advice)
    else:
        yield Finding("memory", found)


def _cache() -> Iterator[Finding]:
    folder = cache_dir()
    probe = folder / f".doctor-{uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"cwlib")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        advice = f"cannot be written to ({error}): set CWLIB_CACHE to another folder"
        yield Finding("cache", str(folder), "fails", advice)
        return
    free = shutil.disk_usage(folder).free
    # a float32 file of every checkpoint, beside the download it is made of
    missing = [item for name, item in CATALOGUE.items() if not cached_folder(name).exists()]
    needed = sum(4 * item.parameters + item.download_bytes for item in missing)
    found = f"{folder}, {free / 2**30:.1f} GiB free"
    if needed > free:
        advice = f"the {len(missing)} checkpoints not cached yet take {needed / 2**30:.1f} GiB"
        yield Finding("cache", found, "note", advice)
    else:
        yield Finding("cache", found)


def _checkpoints() -> Iterator[Finding]:
    for name in CATALOGUE:
        folder = cached_folder(name)
        if not folder.exists():
            yield Finding(name, "not cached", "note", "fetched when it is first opened, which needs the package index")
        elif faults := problems(folder):
            advice = f"python -m cwlib checkpoints fetch {name} repairs it"
            yield Finding(name, f"damaged: {'; '.join(faults)}", "fails", advice)
        else:
            yield Finding(name, "cached")


def _hub() -> Iterator[Finding]:
    where = f"cache {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", f"switched off (HF_HUB_OFFLINE), {where}", "note", "hub ids open from the cache only")
        return
    start = time.monotonic()
    if not answers():
        advice = "hub ids that are not in the cache fail; names, folders and .gguf files work"
        yield Finding("hub", f"not reached in {SECONDS:.0f} s, {where}", "note", advice)
        return
    token = "a token is set" if get_token() else "no token (gated models need `hf auth login`)"
    yield Finding("hub", f"answers in {time.monotonic() - start:.1f} s, {token}, {where}")
