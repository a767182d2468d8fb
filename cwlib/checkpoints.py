"""Open a checkpoint: a name of the catalogue, a folder, a .gguf file, a hub id or a live model.

Every way leads to the same object: the base model (without a head) with eager attention, in evaluation
mode, its tokenizer, and the SHA-256 of the weights it came from. Random models come as such objects too.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cwlib.loading import load_config, load_model, load_tokenizer, quiet, use_attention
from cwlib.sources import locate
from cwlib.tiny import ByteTokenizer, random_model, tiny_config

_CAUSAL = ("bloom", "clip_text_model")  # causal by their masks: their attention modules do not say so, or deny it
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A loaded model with what identifies it.

    Attributes
    ----------
    name
        Catalogue name, folder or file name, or hub id.
    model
        The base model, in evaluation mode, with eager attention.
    tokenizer
        Callable as ``tokenizer(text)["input_ids"]``, or None.
    sha256
        Of the source weights (.gguf or .safetensors); empty for a live model.
    precision
        As the weights are stored: "float32", "Q4_1", "Q4_K_M" ...
    device, dtype
        Where and in which type the model is loaded.
    """

    name: str
    model: PreTrainedModel = field(repr=False)
    tokenizer: Any = field(repr=False)
    sha256: str
    precision: str
    device: str
    dtype: str

    @property
    def kind(self) -> str:
        """One of "decoder", where attention is causal, "encoder" and "encoder-decoder"."""
        if getattr(self.model.config, "is_encoder_decoder", False):
            return "encoder-decoder"
        if self.model.config.model_type in _CAUSAL:
            return "decoder"
        flags = [module.is_causal for module in self.model.modules() if hasattr(module, "is_causal")]
        if not flags:  # attention that does not say: MPNet, and decoders with code older than the flag
            names = self.model.config.architectures or ()
            flags = [name.endswith(("CausalLM", "LMHeadModel")) for name in names]
            flags.append(getattr(self.model.config, "is_decoder", False))
        return "decoder" if any(flags) else "encoder"

    @property
    def parameters(self) -> int:
        """Number of parameters of the base model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def context_length(self) -> int | None:
        """Longest input in tokens; None when the model sets no limit."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is None:
            return None
        for name, module in self.model.named_modules():
            # MPNet and RoBERTa count positions from padding_idx + 1
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                return limit - module.padding_idx - 1
        return limit

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds by default.

        Raises
        ------
        ValueError
            If there is no tokenizer, the text is blank, or it is longer than the context.
        """
        if self.tokenizer is None:
            raise ValueError(f"text: {self.name} has no tokenizer; pass token ids, or open it with tokenizer=...")
        if not text.strip():
            raise ValueError(f"text: expected some words, got {text!r}")
        with quiet():  # too long a text gets our error, not a warning beforehand
            ids = list(self.tokenizer(text)["input_ids"])
        if self.context_length is not None and len(ids) > self.context_length:
            raise ValueError(
                f"text: {len(ids)} tokens, but {self.name} takes at most {self.context_length}: shorten it"
            )
        return ids


def open_checkpoint(
    source: str | os.PathLike | PreTrainedModel,
    device: str = "auto",
    dtype: str = "float32",
    tokenizer: Any = None,
    offload: bool = False,
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
        "auto" (CUDA if there is any, else the CPU) or a torch device.
    dtype
        "float32", "float64", "bfloat16" or "float16".
    tokenizer
        Replaces the checkpoint's own; a live model has none otherwise.
    offload
        For a model larger than memory: its weights stay in their safetensors files, and accelerate brings in those of
        a module for the time of its forward pass (on CUDA it fills the devices, then memory, and leaves the rest).

    Raises
    ------
    ValueError
        If an argument is none of the above.
    CheckpointError
        If the checkpoint cannot be fetched, is damaged, or does not fill the model.
    """
    if isinstance(source, PreTrainedModel):
        if offload:
            raise ValueError("offload: a live model is in memory already; open its folder instead")
        return _live(source, device, dtype, tokenizer)
    place, torch_dtype = require_device(device), _dtype(dtype)
    found = locate(source)
    tokenizer = load_tokenizer(found.folder) if tokenizer is None else tokenizer
    if offload:
        if not found.safetensors:
            raise ValueError(f"offload: expected safetensors files, got {found.weights[0]}; convert it first")
        device_map = "auto" if place.type == "cuda" else {"": "disk"}
        model = load_model(found.folder, torch_dtype, True, device_map)
    else:
        model = load_model(found.folder, torch_dtype, found.safetensors).to(place)
    _compute_experts(model.requires_grad_(False), torch_dtype)
    return Checkpoint(found.name, model, tokenizer, found.sha256, found.precision, str(place), dtype)


def initialise(
    source: str | os.PathLike | PreTrainedModel | Checkpoint,
    seed: int,
    dtype: str = "float32",
    device: str = "auto",
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
    dtype, device
        As in `open_checkpoint`.

    Raises
    ------
    ValueError, CheckpointError
        As `open_checkpoint`.
    """
    place, torch_dtype = require_device(device), _dtype(dtype)
    if isinstance(source, PreTrainedModel):
        source = open_checkpoint(source)
    if isinstance(source, Checkpoint):
        name, config, tokenizer = source.name, source.model.config, source.tokenizer
    else:
        found = locate(source)
        name, config, tokenizer = found.name, load_config(found.folder), load_tokenizer(found.folder)
    model = random_model(config, seed, rescale=False)
    return _random_checkpoint(f"{name}@init{seed}", model, tokenizer, f"initialise {seed}", torch_dtype, place)


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


def _random_checkpoint(
    name: str, model: PreTrainedModel, tokenizer: Any, recipe: str, dtype: torch.dtype, device: torch.device
) -> Checkpoint:
    ignored = ("transformers_version", "dtype", "_name_or_path", "architectures")
    config = {key: value for key, value in model.config.to_dict().items() if key not in ignored}
    text = json.dumps([recipe, config], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    for parameter in model.parameters():  # and no buffer: rotary frequencies stay float32, as in from_pretrained
        parameter.data = parameter.data.to(dtype)
    model = model.to(device).eval().requires_grad_(False)
    _compute_experts(model, dtype)
    return Checkpoint(name, model, tokenizer, digest, "float32", str(device), str(dtype).removeprefix("torch."))


def require_device(device: str) -> torch.device:
    """The device of a name; ValueError if torch does not know it, or there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected 'auto' or a torch device, got {device!r}") from error
    if place.type == "meta":
        raise ValueError("device: expected one that holds numbers, got 'meta'")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} was asked for, but torch finds no CUDA device; use 'auto' or 'cpu'")
    return place


def _dtype(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]
