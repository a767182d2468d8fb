"""Load weights through transformers, strictly: every parameter comes from the file, and no pickle is run."""

from __future__ import annotations

import contextlib
import errno
import io
import re
import tempfile
import threading
import weakref
from collections.abc import Iterator
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from transformers import AutoConfig, AutoModel, AutoTokenizer, GgufConfig, PreTrainedModel
from transformers.utils import logging

from cwlib.catalogue import CheckpointError

_LOCAL = {"trust_remote_code": False, "local_files_only": True}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and warnings of transformers and accelerate, and put their settings back afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    accelerate = getLogger("accelerate")
    level = accelerate.level
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accelerate.setLevel("ERROR")
    try:
        yield
    finally:
        accelerate.setLevel(level)
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


_EAGER_USERS: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, str]] = weakref.WeakKeyDictionary()
_EAGER_LOCK = threading.Lock()


def use_attention(model: PreTrainedModel, implementation: str) -> None:
    """Switch the attention path of a model and its parts, as "eager" or "sdpa"."""
    with quiet():
        model.set_attn_implementation(implementation)
    # Falcon and others declare that they cannot switch, but look here at every pass; T5's stacks look at copies
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = implementation


@contextlib.contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch a model to its eager attention path, the one that returns attention, for the outermost user only."""
    with _EAGER_LOCK:
        users, found = _EAGER_USERS.get(model, (0, model.config._attn_implementation))
        _EAGER_USERS[model] = (users + 1, found)
        if users == 0 and found != "eager":
            use_attention(model, "eager")
    try:
        yield
    finally:
        with _EAGER_LOCK:
            users, found = _EAGER_USERS.pop(model)
            if users > 1:
                _EAGER_USERS[model] = (users - 1, found)
            elif found != "eager":
                use_attention(model, found)


def load_config(folder: Path) -> Any:
    """The model configuration in a folder; `CheckpointError` if transformers cannot read it."""
    with _explained(f"config.json in {folder} could not be read"):
        return AutoConfig.from_pretrained(folder, **_LOCAL)


def empty_model(folder: Path) -> PreTrainedModel:
    """The base model of a folder's configuration without weights, on the meta device; `CheckpointError` if unknown."""
    with _explained(f"the model of {folder} could not be laid out"):
        return laid_out(AutoConfig.from_pretrained(folder, **_LOCAL))


def laid_out(config: Any) -> PreTrainedModel:
    """The base model of a configuration, which it may change, without weights on the meta device."""
    with quiet(), torch.device("meta"):
        return AutoModel.from_config(config, attn_implementation="eager").eval()


def spread(model: PreTrainedModel, max_memory: dict[int | str, int]) -> PreTrainedModel:
    """Deal out the layers of a model that is on the CPU over the devices that have room; the rest stays there."""
    whole = sorted(model._no_split_modules or ())
    room = get_balanced_memory(model, max_memory | {"cpu": 2**62}, no_split_module_classes=whole)
    device_map = infer_auto_device_map(model, room, no_split_module_classes=whole)
    with quiet():
        return dispatch_model(model, device_map, skip_keys=model._skip_keys_device_placement, force_hooks=True)


def load_model(
    folder: Path,
    dtype: torch.dtype,
    safetensors: bool,
    device_map: str | dict[str, str] | None = None,
    max_memory: dict[int | str, int] | None = None,
) -> PreTrainedModel:
    """The base model in a folder of the hub's layout, with eager attention, in evaluation mode.

    It is on the CPU, or where accelerate puts it by ``device_map`` and ``max_memory`` (bytes per device); what goes to
    "disk" stays in its safetensors file. transformers reads a .bin file (`safetensors` False) with torch's
    `weights_only`, which runs no pickled code.

    Raises
    ------
    CheckpointError
        If transformers cannot load it, or the weights do not fill the model.
    """
    placed = {}
    if device_map is not None:
        # only weights that must be rearranged are written there; the folder goes with the model
        scratch = tempfile.TemporaryDirectory(prefix="cwlib-offload-")
        placed = {"device_map": device_map, "max_memory": max_memory, "offload_folder": scratch.name}
    with _explained(f"{folder} could not be loaded"):
        model, info = AutoModel.from_pretrained(
            folder,
            attn_implementation="eager",
            dtype=dtype,
            use_safetensors=safetensors,
            ignore_mismatched_sizes=True,  # refused below, with the names
            output_loading_info=True,
            **placed,
            **_LOCAL,
        )
    _refuse_partial_load(model, info, str(folder))
    if device_map is not None:
        weakref.finalize(model, scratch.cleanup)
        on_disk = "disk" in getattr(model, "hf_device_map", {}).values()
        if on_disk and any(key.startswith("pooler.") for key in info["missing_keys"]):
            model.pooler = None  # there is nothing on the disk to bring in
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder, or None if it has none; `CheckpointError` if transformers cannot read it."""
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        return None
    with _explained(f"the tokenizer in {folder} could not be loaded (tokenizer=... replaces it)"):
        return AutoTokenizer.from_pretrained(folder, **_LOCAL)


def convert(path: Path, target: Path, progress: bool = True) -> None:
    """Write a .gguf file's base model, dequantised to float32, and its tokenizer in the hub's layout.

    Raises
    ------
    CheckpointError
        If transformers cannot convert it, or the weights do not fill the model.
    OSError
        If the disk is full.
    """
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    # the reader shows a progress bar of its own, whatever transformers' setting
    silence = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
    with silence, _explained(f"{path.name} could not be converted"):
        model, info = AutoModel.from_pretrained(
            **source,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            output_loading_info=True,
            **_LOCAL,
        )
        _refuse_partial_load(model, info, path.name)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(**source, **_LOCAL).save_pretrained(target)


@contextlib.contextmanager
def _explained(failure: str) -> Iterator[None]:
    # transformers may draw numbers for what a file lacks (a pooler): the global generator stays out of it
    with quiet(), torch.random.fork_rng(devices=[]):
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:  # transformers' errors have no common base
            if "No space left" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise CheckpointError(f"{failure}: {type(error).__name__}: {_without_advice(str(error))}") from error


def _without_advice(text: str) -> str:
    """An error of transformers or torch, without what it says to do about code that a checkpoint brings along."""
    for option in ("trust_remote_code", "weights_only"):
        if option in text:
            sentences = [part for part in re.split(r"(?<=[.!?])\s+|\n+", text) if option not in part]
            text = " ".join([*sentences, "Code that comes with a checkpoint is never run here."])
    return text


def _refuse_partial_load(model: PreTrainedModel, info: dict[str, Any], source: str) -> None:
    # A pooler may be missing, since attention does not use it; heads that the base model lacks may be left.
    harmless = ("pooler.", "position_ids", "token_type_ids", "inv_freq")
    prefix = f"{model.base_model_prefix}."
    parts = {child for child, _ in model.named_children()}
    faults = {
        "missing": info["missing_keys"],
        "left over": [k for k in info["unexpected_keys"] if k.removeprefix(prefix).split(".")[0] in parts],
        "of another shape": [key for key, *_ in info["mismatched_keys"]],
    }
    faults = {fault: sorted(k for k in keys if not any(h in k for h in harmless)) for fault, keys in faults.items()}
    if lines := [f"{len(keys)} {fault} (first: {keys[0]})" for fault, keys in faults.items() if keys]:
        raise CheckpointError(
            f"the weights of {source} do not fill a {type(model).__name__}: {'; '.join(lines)}. "
            "Part of the model would be random: check that config.json and the weights belong together"
        )
