"""Open a checkpoint: a name of the catalogue, a folder, a .gguf file, a hub id or a live model.

Every way leads to the same object: the base model (without a head) with eager attention, in evaluation
mode, its tokenizer, and the SHA-256 of the weights it came from. Random models come as such objects too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from cwlib.catalogue import CheckpointError, cache_dir
from cwlib.checkpoint import Checkpoint as Checkpoint
from cwlib.loading import empty_model, laid_out, load_config, load_model, load_tokenizer, spread, use_attention
from cwlib.placement import TOKENS, Placement, Shape, free_memory, place_model
from cwlib.placement import require_device as require_device
from cwlib.sources import Source, locate
from cwlib.tiny import ByteTokenizer, random_model, tiny_config

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def open_checkpoint(
    source: str | os.PathLike | PreTrainedModel,
    device: str = "auto",
    dtype: str = "float32",
    tokenizer: Any = None,
    offload: bool | Literal["auto"] = False,
    tokens: int = TOKENS,
) -> Checkpoint:
    """Open a checkpoint for measuring.

    Parameters
    ----------
    source
        One of

        - a catalogue name, such as "minilm-l6": fetched on first use;
        - a folder in the hub's layout. A plain word is a catalogue name even where a folder is called so:
          write "./minilm-l6" for the folder;
        - a ``.gguf`` file: converted into the cache on first use;
        - a hub id "org/name": the hub's cache first, then the network;
        - a live `PreTrainedModel`: used where it is, in its own dtype, without a copy. It is switched to
          evaluation mode and eager attention, and keeps its requires_grad.
    device
        "auto" (CUDA if there is any, else the CPU) or a torch device. Without a number CUDA means all devices there
        are: accelerate deals out the layers of a model that is too large for the first.
    dtype
        "float32", "float64", "bfloat16" or "float16".
    tokenizer
        Replaces the checkpoint's own; a live model has none otherwise.
    offload
        For a model larger than memory: its weights stay in their safetensors files, and accelerate brings in those of
        a module for the time of its forward pass (on CUDA it fills the devices, then memory, and leaves the rest).
        "auto": only if the model and what measuring it takes do not fit (`cwlib.placement`).
    tokens
        Of the longest text for which "auto", or several devices, are to leave room.

    Raises
    ------
    ValueError
        If an argument is none of the above.
    CheckpointError
        If the checkpoint cannot be fetched, is damaged, or does not fill the model.
    """
    if offload not in (True, False, "auto"):
        raise ValueError(f"offload: expected True, False or 'auto', got {offload!r}")
    if isinstance(source, PreTrainedModel):
        if offload is True:
            raise ValueError("offload: a live model is in memory already; open its folder instead")
        return _live(source, device, dtype, tokenizer)
    place, torch_dtype = require_device(device), _dtype(dtype)
    found = locate(source)
    load_config(found.folder)  # whose faults would else be told as the tokenizer's
    tokenizer = load_tokenizer(found.folder) if tokenizer is None else tokenizer
    if offload is True and not found.safetensors:
        raise ValueError(f"offload: expected safetensors files, got {found.weights[0]}; convert it first")
    model = _load(found, place, torch_dtype, offload, tokens).requires_grad_(False)
    _compute_experts(model, torch_dtype)
    facts = found.sha256, found.precision, str(place), dtype, found.revision
    return Checkpoint(found.name, model, tokenizer, *facts)


def _load(found: Source, place: torch.device, dtype: torch.dtype, offload: bool | str, tokens: int) -> PreTrainedModel:
    where = Placement("memory")
    if offload or (place.type == "cuda" and place.index is None and torch.cuda.device_count() > 1):
        shape = Shape.of_model(empty_model(found.folder))
        where = place_model(shape, place, tokens, _name(dtype), offload is True)
        if where.kind == "files" and not (offload and found.safetensors):
            where = Placement("memory")
    if where.kind != "memory":
        device_map = "auto" if place.type == "cuda" else {"": "disk"}
        return load_model(found.folder, dtype, found.safetensors, device_map, where.max_memory)
    if place.type == "cuda" and sum(path.stat().st_size for path in found.weights) > _room_beside():
        return load_model(found.folder, dtype, found.safetensors, {"": str(place)})  # without a stop in memory
    return load_model(found.folder, dtype, found.safetensors).to(place)


def outline(source: str | os.PathLike) -> Checkpoint:
    """A checkpoint whose model has no weights (they are on the meta device): its identity, kind and tokenizer.

    Parameters
    ----------
    source
        A catalogue name, folder, .gguf file or hub id, as for `open_checkpoint`; errors as there.
    """
    found = locate(source)
    facts, model = (found.sha256, found.precision, "meta", "float32", found.revision), empty_model(found.folder)
    return Checkpoint(found.name, model, load_tokenizer(found.folder), *facts)


def initialise(
    source: str | os.PathLike | PreTrainedModel | Checkpoint,
    seed: int,
    dtype: str = "float32",
    device: str = "auto",
    offload: bool | Literal["auto"] = False,
    tokens: int = TOKENS,
) -> Checkpoint:
    """The same architecture and tokenizer with freshly initialised weights: a null model.

    The weights are the architecture's own initialisation. They are drawn in float32 on the CPU, so that a
    seed means the same weights in every dtype; torch's global generators are left alone.

    Parameters
    ----------
    source
        What `open_checkpoint` takes, or a `Checkpoint`; only its configuration and tokenizer are used.
    seed
        Of the weights; the name says it, as in "minilm-l6@init0".
    dtype, device, offload, tokens
        As in `open_checkpoint`. Weights that stay on the disk are written to the cache folder, and the system keeps as
        much of them in memory as there is room for; they go with the model.

    Raises
    ------
    ValueError, CheckpointError
        As `open_checkpoint`; and if the disk has no room for the weights.
    """
    place, torch_dtype = require_device(device), _dtype(dtype)
    if isinstance(source, PreTrainedModel):
        source = open_checkpoint(source)
    if isinstance(source, Checkpoint):
        name, config, tokenizer, revision = source.name, source.model.config, source.tokenizer, source.revision
    else:
        found = locate(source)
        name, config, tokenizer = found.name, load_config(found.folder), load_tokenizer(found.folder)
        revision = found.revision
    where, in_files = Placement("memory"), False
    if offload:
        shape = Shape.of_model(laid_out(copy.deepcopy(config)))
        where = place_model(shape, place, tokens, dtype, offload is True)
        in_files = where.kind == "files" or (place.type == "cuda" and shape.weights() > _room_beside())
    with _scratch(shape.weights()) if in_files else nullcontext() as folder:
        model = random_model(config, seed, rescale=False, folder=folder)
    recipe = f"initialise {seed}"
    checkpoint = _random_checkpoint(f"{name}@init{seed}", model, tokenizer, recipe, torch_dtype, place, where)
    return replace(checkpoint, revision=revision)


def tiny_checkpoint(family: str, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Checkpoint:
    """A tiny random model on the CPU, for tests and the smoke profile; nothing is downloaded.

    Linear and embedding weights are N(0, 1 / fan_in) and biases N(0, 0.1²): with transformers' own, smaller,
    initialisation attention would be nearly uniform, and most tests vacuous.

    Parameters
    ----------
    family
        A name out of `cwlib.tiny.TINY`; hidden size 48, 4 heads, two to four layers.
    seed
        Of the weights.
    dtype
        As in `open_checkpoint`.
    **overrides
        Fields of the model's configuration, such as ``num_hidden_layers=2``.

    Raises
    ------
    ValueError
        If the family, the dtype or the name of an override is unknown.
    """
    torch_dtype, config = _dtype(dtype), tiny_config(family, overrides)
    name = f"tiny-{family}" + "".join(f"-{key}={value}" for key, value in overrides.items()) + f"@{seed}"
    model = random_model(config, seed, rescale=True)
    return _random_checkpoint(name, model, ByteTokenizer(), f"tiny {seed}", torch_dtype, torch.device("cpu"))


def _live(model: PreTrainedModel, device: str, dtype: str, tokenizer: Any) -> Checkpoint:
    base = model.base_model
    own = str(base.dtype).removeprefix("torch.")
    if dtype not in ("float32", own):
        raise ValueError(f"dtype: a live model stays in its own dtype, {own}; convert it before, got {dtype!r}")
    if device not in ("auto", str(base.device), base.device.type):
        raise ValueError(f"device: a live model stays on its device, {base.device}; move it before, got {device!r}")
    base.eval()
    use_attention(base, "eager")
    _compute_experts(base, base.dtype)
    name = Path(base.config.name_or_path).name or type(base).__name__
    return Checkpoint(name, base, tokenizer, "", own, str(base.device), own)


def _compute_experts(model: PreTrainedModel, dtype: torch.dtype) -> None:
    if dtype == torch.float64:  # which torch's grouped product, the default, does not take
        model.set_experts_implementation("eager")


def _room_beside() -> int:
    return free_memory(torch.device("cpu"))["cpu"]


@contextmanager
def _scratch(needed: int) -> Iterator[Path]:
    """A folder on the disk of the cache that is gone when the weights in it are mapped."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(cache_dir()).free) < needed:
        raise CheckpointError(
            f"random weights take {needed / 1e9:.1f} GB in {cache_dir()}, but {free / 1e9:.1f} GB are free: free some "
            "space, or point CWLIB_CACHE at a larger disk"
        )
    with tempfile.TemporaryDirectory(prefix="init-", dir=cache_dir()) as folder:
        yield Path(folder)


def _random_checkpoint(
    name: str,
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: str,
    dtype: torch.dtype,
    device: torch.device,
    where: Placement = Placement("memory"),  # noqa: B008 - it is frozen
) -> Checkpoint:
    ignored = ("transformers_version", "dtype", "_name_or_path", "architectures")
    config = {key: value for key, value in model.config.to_dict().items() if key not in ignored}
    text = json.dumps([recipe, config], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    for parameter in model.parameters():  # and no buffer: rotary frequencies stay float32, as in from_pretrained
        parameter.data = parameter.data.to(dtype)
    if where.max_memory is not None:
        model = spread(model, where.max_memory)
    else:
        model = model if where.kind == "files" else model.to(device)
    _compute_experts(model.eval().requires_grad_(False), dtype)
    return Checkpoint(name, model, tokenizer, digest, "float32", str(device), _name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]
