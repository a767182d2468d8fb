r"""What a study will take: memory, time, download and disk of every checkpoint, said before it starts.

Memory is that of `cwlib.placement`. Time counts floating-point operations, with the powers of T9, at the rate that this
machine reaches in matrix products; both are estimates, time within a factor of a few.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from huggingface_hub import constants

from cwlib.catalogue import CATALOGUE, cached_folder
from cwlib.cells import GAUSSIAN_SEEDS, INIT_SEEDS, NULL_PASSAGES, approximate_tokens, tiny_family
from cwlib.checkpoint import kind_of
from cwlib.checkpoints import tiny_checkpoint
from cwlib.corpus import Passage
from cwlib.hub import HUB
from cwlib.loading import empty_model
from cwlib.placement import Shape, free_memory, place_model, require_device
from cwlib.sources import here
from cwlib.timing import gemm_rate

EFFICIENCY = 0.5  #: of small matrix products and eigenvalues, beside one large product
OVERHEAD = 0.02  #: seconds per layer and cell that do not depend on sizes
DISK_RATE = 1e9  #: bytes per second that are read from a disk, assumed


@dataclass(frozen=True)
class Rates:
    """Floating-point operations per second of large matrix products on a device."""

    double: float
    single: float

    @classmethod
    def measured(cls, device: str) -> Rates:
        """On this machine now, in a second or two."""
        place = str(require_device(device))
        size = 1024 if place == "cpu" else 4096
        return cls(gemm_rate(place, size, torch.float64), gemm_rate(place, size, torch.float32))


REFERENCE = Rates(1e12, 1e13)  #: of README's table: a teraflop in double precision


@dataclass(frozen=True)
class Estimate:
    """What measuring one checkpoint takes.

    Attributes
    ----------
    memory
        Bytes at most, on the device or on all of them together.
    seconds
        Of computing every cell once.
    """

    memory: int
    seconds: float


def estimate(
    shape: Shape, decoder: bool, tokens: int, passages: int, rates: Rates, offloaded: bool = False
) -> Estimate:
    """What measuring a model of a shape in single precision takes.

    Parameters
    ----------
    shape : Shape
        Of the model.
    decoder : bool
        Whether attention is causal.
    tokens, passages : int
        Of each text, and how many texts there are.
    rates : Rates
        Of the device.
    offloaded : bool
        Whether weights stay in their files: then they are read, and cores computed, for every text anew.
    """
    nulls = min(passages, NULL_PASSAGES)
    # gaussian, shuffled, sinkless on the trained weights; init on weights of its own
    texts = passages + nulls * (len(GAUSSIAN_SEEDS) + len(INIT_SEEDS) + 1 + decoder)
    weights = 1 + len(GAUSSIAN_SEEDS) + len(INIT_SEEDS)
    once = weights * _values(shape) + 2 * _rarely(shape, tokens)
    double = once + (texts if offloaded else weights) * _cores(shape) + texts * _edges(shape, tokens, decoder)
    single = 2 * texts * tokens * (shape.parameters - shape.vocabulary * shape.d_model)
    seconds = (double / rates.double + single / rates.single) / EFFICIENCY + OVERHEAD * shape.layers * texts
    if offloaded:
        seconds += texts * shape.weights("bfloat16") / DISK_RATE
    own = shape.embedding() if offloaded else shape.weights()
    return Estimate(own + shape.kept(tokens) + shape.passing(tokens), seconds)


def _cores(shape: Shape) -> int:
    """Operations for the cores of all layers, and the forms that are made of them (T9)."""
    heads, kv, a, d = shape.heads, shape.kv_heads, shape.d_head, shape.d_model
    grams = 8 * (heads * a) ** 2 * d + 2 * (kv * a) ** 2 * d
    forms = 2 * heads**2 * kv * a**3 + 2 * heads**3 * a**3 + 4 * heads**4 * a**2
    return shape.layers * (grams + forms)


def _values(shape: Shape) -> int:
    """Operations for the metrics of weights: singular values of heads, and of their sum."""
    heads, width, a, d = shape.heads, shape.kv_heads * shape.d_head, shape.d_head, shape.d_model
    return shape.layers * (heads * (4 * a**2 * d + 20 * a**3) + 8 * width**2 * d + 20 * min(width, d) ** 3)


def _edges(shape: Shape, tokens: int, decoder: bool) -> int:
    """Operations of one text in all layers: edges in O(n^2 H^4), images of the field, spectra of token walks."""
    heads, d, n = shape.heads, shape.d_model, tokens
    pairs = heads * (heads + 1) // 2
    edges = n**2 * pairs**2 if decoder else 2 * n**2 * pairs**2 + 2 * n**2 * heads**4
    maps = 8 * n * d * shape.d_head * (heads + shape.kv_heads)
    return shape.layers * (edges + 2 * n * heads**4 + 12 * n**2 * heads**2 + maps + 4 * n * heads**2 * d + 40 * n**3)


def _rarely(shape: Shape, tokens: int) -> int:
    """Operations of one text for spectral densities and the cosines of all pairs of layers."""
    heads, kv, a, d, layers = shape.heads, shape.kv_heads, shape.d_head, shape.d_model, shape.layers
    walks = 30 * 2 * 2 * (2 * tokens * d * a * (heads + kv) + 2 * heads * tokens**2 * a)
    earlier = layers * (4 * heads * kv * a**2 * d + 2 * heads**2 * tokens**2) // 2
    return layers * (walks + earlier)


def overview(names: Iterable[str], texts: Sequence[Passage], device: str = "auto", rates: Rates | None = None) -> str:
    """A table of what each checkpoint will take here, and what this machine has; nothing is downloaded for it.

    Parameters
    ----------
    names : iterable of str
        Checkpoints, as for `cwlib.open_checkpoint`; of those that nothing is known about yet it says so.
    texts : sequence of Passage
        The corpus.
    device : str
        As in `cwlib.open_checkpoint`.
    rates : Rates, optional
        Of the device; measured by default.
    """
    place = require_device(device)
    rates = Rates.measured(device) if rates is None else rates
    lengths = [approximate_tokens(passage.text) for passage in texts]
    tokens, free = max(lengths), free_memory(place)
    lines, downloads, seconds, unreadable = [], dict[Path, int](), 0.0, []
    for name in names:
        try:
            facts = _facts(name)
        except Exception as error:  # of its files, whatever it is: the others go on
            lines.append({"checkpoint": name, "weights": "cannot be read"})
            unreadable.append(f"\n{name}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}")
            continue
        if facts is None:
            lines.append({"checkpoint": name, "weights": "not here yet, and not in the list of the hub"})
            continue
        where = place_model(facts.shape, place, tokens)
        found = estimate(facts.shape, facts.decoder, tokens, len(texts), rates, where.kind == "files")
        room = free["cpu"] if "cpu" in free else sum(free.values())
        seconds += found.seconds
        if facts.download:
            folder = cached_folder(name).parent if name in CATALOGUE else Path(constants.HF_HUB_CACHE)
            downloads[folder] = downloads.get(folder, 0) + facts.download
        lines.append(
            {
                "checkpoint": name,
                "weights": f"{where}{'' if found.memory <= room else ', which may not suffice'}",
                "memory": _size(found.memory),
                "time": _duration(found.seconds),
                "download": _size(facts.download) if facts.download else "here",
                "commit": facts.revision[:12],
                "access": "gated" if facts.gated else "",
            }
        )
    table = pd.DataFrame(lines).fillna("").to_string(index=False)
    pages = [f"{constants.ENDPOINT}/{line['checkpoint']}" for line in lines if line.get("access")]
    ask = f"\ngated: ask for access at {' and '.join(pages)}, then `hf auth login`." if pages else ""
    gpus = [f"{torch.cuda.get_device_name(i)}: {_size(room)} free" for i, room in free.items() if i != "cpu"]
    memory = f"memory: {_size(free_memory(torch.device('cpu'))['cpu'])} free"
    return (
        f"{table}{''.join(unreadable)}{ask}\n"
        f"{len(texts)} texts of up to about {tokens} tokens. {'; '.join([*gpus, memory])}; "
        f"{rates.double / 1e9:,.0f} GFLOP/s in double precision, {rates.single / 1e9:,.0f} in single.\n"
        f"In all about {_duration(seconds)} of computing from nothing; cells that are finished are not computed again."
        + "".join(f"\n{_room(folder, size)}" for folder, size in downloads.items())
    )


def _room(folder: Path, size: int) -> str:
    """Whether a download fits where it goes."""
    disk = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    variable = "HF_HOME" if folder == Path(constants.HF_HUB_CACHE) else "CWLIB_CACHE"
    too_little = "" if size <= disk else f", which is too little: let {variable} name another folder"
    return f"{_size(size)} to download into {folder}, where {_size(disk)} are free{too_little}."


@dataclass(frozen=True)
class _Facts:
    shape: Shape
    decoder: bool
    download: int
    revision: str
    gated: bool = False


def _facts(name: str) -> _Facts | None:
    """What is known about a checkpoint without a network: its files if they are here, else the lists."""
    if family := tiny_family(name):
        model = tiny_checkpoint(family).model
        return _Facts(Shape.of_model(model), kind_of(model) == "decoder", 0, "")
    if name in CATALOGUE:
        item = CATALOGUE[name]
        download = 0 if cached_folder(name).exists() else item.download_bytes
        return _Facts(Shape.of(item), item.kind == "decoder", download, "")
    if found := here(name):
        model = empty_model(found.folder)
        return _Facts(Shape.of_model(model), kind_of(model) == "decoder", 0, found.revision)
    if name not in HUB:
        return None
    item = HUB[name]
    return _Facts(Shape.of(item), item.kind == "decoder", item.download_bytes, item.revision or "", item.gated)


def markdown(tokens: int = 300, passages: int = 16, rates: Rates = REFERENCE) -> str:
    """The hub's list as a table in Markdown, as README quotes it: what each model is, and what it takes."""
    head = ["model", "kind", "parameters", "layers", "heads", "download", "memory", "offloaded", "time", "licence"]
    lines = [head, ["---"] * len(head)]
    for item in HUB.values():
        facts = Shape.of(item), item.kind == "decoder", tokens, passages, rates
        whole, offloaded = estimate(*facts), estimate(*facts, offloaded=True)
        heads = f"{item.heads}" if item.kv_heads == item.heads else f"{item.heads} ({item.kv_heads} value heads)"
        licence = f"{item.licence}, gated" if item.gated else item.licence
        words = [f"`{item.name}`", item.kind, f"{item.parameters / 1e6:,.0f}M", str(item.layers), heads]
        sizes = [_size(n) for n in (item.download_bytes, whole.memory, offloaded.memory)]
        lines.append([*words, *sizes, _duration(whole.seconds), licence])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _size(size: int | float) -> str:
    return f"{size / 1e9:.1f} GB"


def _duration(seconds: int | float) -> str:
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
