"""What a model is given: one text, its token ids, or the inputs of one example by name."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cwlib.checkpoints import Checkpoint

# a mask, and what has one position for each of its entries
_MASKED = {
    "attention_mask": "input_ids",
    "decoder_attention_mask": "decoder_input_ids",
    "encoder_attention_mask": "encoder_hidden_states",
}


def token_ids(checkpoint: Checkpoint, text: str | Sequence[int] | Tensor, name: str = "text") -> Tensor:
    """Token ids of one text as a (1, n) tensor on the checkpoint's device.

    Parameters
    ----------
    checkpoint : Checkpoint
        Supplies the tokenizer and the limits.
    text : str, sequence of int, or integer Tensor
        A text, encoded with the tokenizer's special tokens; or the ids of one sequence, shape (n,) or (1, n).
    name : str
        What errors call it.

    Raises
    ------
    ValueError
        If the text is empty, ids are out of the vocabulary or not of one sequence, or the sequence is longer than the
        model's context.
    """
    if isinstance(text, str):
        ids = torch.tensor(checkpoint.encode(text))
    else:
        try:
            ids = torch.as_tensor(text)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"{name}: expected a string or a sequence of token ids, got {type(text).__name__}"
            ) from error
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(
            f"{name}: expected one sequence of shape (n,) or (1, n), got {tuple(ids.shape)}; call layers once per "
            "sequence"
        )
    if len(ids) == 0:
        raise ValueError(f"{name}: expected at least one token, got none; pass a non-empty text")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{name}: expected integer token ids, got {ids.dtype}")
    ids = ids.to(torch.long)
    vocabulary = _vocabulary(checkpoint.model)
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(
            f"{name}: expected token ids in 0..{vocabulary - 1}, got {int(ids.min())}..{int(ids.max())}; "
            "were they made by another tokenizer?"
        )
    limit = checkpoint.context_length
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"{name}: expected at most {limit} tokens, the context of {checkpoint.name}, got {len(ids)}; shorten it"
        )
    return ids[None].to(checkpoint.device)


def model_inputs(checkpoint: Checkpoint, text: str | Sequence[int] | Tensor | Mapping[str, Any]) -> dict[str, Tensor]:
    """The arguments of the model's forward pass, each for one example, on the checkpoint's device.

    Parameters
    ----------
    checkpoint : Checkpoint
        From `cwlib.open_checkpoint`.
    text : str, sequence of int, integer Tensor, or mapping of str to these
        As for `cwlib.layers`.

    Raises
    ------
    ValueError
        As `token_ids`; and if a mapping names no input of the model, holds more than one example, or lacks what the
        model needs.
    """
    known = inspect.signature(checkpoint.model.forward).parameters
    two_stacks = bool(getattr(checkpoint.model.config, "is_encoder_decoder", False))
    if not hasattr(text, "keys"):
        if two_stacks or "input_ids" not in known:
            need = [n for n in ("input_ids", "input_features", "pixel_values", "decoder_input_ids") if n in known]
            example = ", ".join(f"{name!r}: ..." for name in need)
            raise ValueError(
                f"text: expected a mapping for {checkpoint.name}, such as {{{example}}}, "
                f"got {type(text).__name__}; cwlib does not choose what a decoder is given"
            )
        text = {"input_ids": token_ids(checkpoint, text)}
    names = list(text.keys())  # of any kind of mapping
    if not names or (two_stacks and "decoder_input_ids" not in names):
        missing = "decoder_input_ids" if two_stacks else "inputs"
        raise ValueError(f"text: expected {missing} in the mapping, got {names}")
    found = {}
    for name in names:
        if name not in known or "past" in name:
            raise ValueError(f"text: {type(checkpoint.model).__name__} takes no input {name!r}")
        if name in ("input_ids", "decoder_input_ids"):
            found[name] = token_ids(checkpoint, text[name], name)
        else:
            found[name] = _tensor(name, text[name], checkpoint)
    for mask, masked in _MASKED.items():
        if mask in found:
            _check_mask(mask, found[mask], found.get(masked), "pixel_values" in found)
    if "input_ids" in found and "attention_mask" in known:
        found.setdefault("attention_mask", torch.ones_like(found["input_ids"]))
    return found


def kept_tokens(inputs: Mapping[str, Tensor], decoder: bool, cross: bool) -> tuple[Tensor | None, Tensor | None]:
    """Which destinations and sources of an attention layer are no padding, or None where there is none.

    Parameters
    ----------
    inputs : mapping of str to Tensor
        From `model_inputs`.
    decoder, cross : bool
        Whether the layer is in the decoder of an encoder-decoder, and whether it attends to another sequence.
    """
    own = "decoder_attention_mask" if decoder else "attention_mask"
    other = "attention_mask" if decoder else "encoder_attention_mask"
    masks = [inputs.get(name) for name in (own, other if cross else own)]
    kept = [None if mask is None or bool(mask.all()) else mask[0].bool() for mask in masks]
    return kept[0], kept[1]


def _vocabulary(model: nn.Module) -> int:
    try:
        return model.get_input_embeddings().num_embeddings
    except NotImplementedError:  # two towers
        return model.config.get_text_config().vocab_size


def _tensor(name: str, value: Any, checkpoint: Checkpoint) -> Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}") from error
    tensor = tensor[None] if tensor.ndim == 1 else tensor
    if tensor.ndim == 0 or tensor.shape[0] != 1:
        raise ValueError(
            f"{name}: expected one example, shape (1, ...), got {tuple(tensor.shape)}; call layers once per example"
        )
    dtype = checkpoint.model.dtype if tensor.is_floating_point() and "mask" not in name else tensor.dtype
    return tensor.to(checkpoint.device, dtype)


def _check_mask(name: str, mask: Tensor, masked: Tensor | None, image: bool) -> None:
    if mask.ndim != 2 or ((mask != 0) & (mask != 1)).any() or not mask.any():
        raise ValueError(f"{name}: expected one 0 or 1 per token and some 1, got {mask.dtype} of {tuple(mask.shape)}")
    if masked is not None and mask.shape[1] != masked.shape[1]:
        raise ValueError(f"{name}: expected {masked.shape[1]} entries, one per position, got {mask.shape[1]}")
    if not mask.all() and (masked is None or image):
        raise ValueError(f"{name}: expected padding of tokens only, got it beside images or features; leave it out")
