"""What is measured: a model in memory, its tokenizer, and what identifies both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from cwlib.loading import quiet

_CAUSAL = ("bloom", "clip_text_model")  # causal by their masks: their attention modules do not say so, or deny it


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
        Where and in which type the model is loaded. Layers on several GPUs all count as "cuda".
    revision
        The commit, of a checkpoint from the hub.
    """

    name: str
    model: PreTrainedModel = field(repr=False)
    tokenizer: Any = field(repr=False)
    sha256: str
    precision: str
    device: str
    dtype: str
    revision: str = ""

    @property
    def kind(self) -> str:
        """One of "decoder", where attention is causal, "encoder" and "encoder-decoder"."""
        return kind_of(self.model)

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


def kind_of(model: PreTrainedModel) -> str:
    """One of "decoder", where attention is causal, "encoder" and "encoder-decoder"."""
    if getattr(model.config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if model.config.model_type in _CAUSAL:
        return "decoder"
    flags = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    if not flags:  # attention that does not say: MPNet, and decoders with code older than the flag
        names = model.config.architectures or ()
        flags = [name.endswith(("CausalLM", "LMHeadModel")) for name in names]
        flags.append(getattr(model.config, "is_decoder", False))
    return "decoder" if any(flags) else "encoder"
