"""Tiny architectures and random weights, for tests and the smoke profile."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

_SHARED = {
    "vocab_size": 300,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"intermediate_size": 96}),
    "mpnet": ("mpnet", {"intermediate_size": 96, "pad_token_id": 1, "max_position_embeddings": 514}),
    "gpt2": ("gpt2", {"n_inner": 96}),
    "llama": ("llama", {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 12}),
    "qwen2": ("qwen2", {"intermediate_size": 96, "num_key_value_heads": 2}),
    "gemma3": (
        "gemma3_text",
        {
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
        },
    ),
}


class ByteTokenizer:
    """The tokenizer of the tiny models: one token per UTF-8 byte, after three ids kept for special tokens."""

    offset = 3

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [byte + self.offset for byte in text.encode("utf-8")]}

    def decode(self, ids: list[int]) -> str:
        """The text of some ids; ids that are no byte are dropped."""
        return bytes(i - self.offset for i in ids if 0 <= i - self.offset < 256).decode("utf-8", "replace")


def tiny_config(family: str, overrides: dict[str, Any]) -> PreTrainedConfig:
    """The configuration of `tiny_checkpoint`.

    Raises
    ------
    ValueError
        If the family is unknown, or its configuration lacks a field of `overrides`.
    """
    if family not in _OWN:
        raise ValueError(f"family: expected one of {', '.join(_OWN)}, got {family!r}")
    model_type, own = _OWN[family]
    known = AutoConfig.for_model(model_type)
    if unknown := [key for key in overrides if not hasattr(known, key)]:
        raise ValueError(f"overrides: {type(known).__name__} has no field {', '.join(unknown)}")
    return AutoConfig.for_model(model_type, **{**_SHARED, **own, **overrides})


def random_model(config: PreTrainedConfig, seed: int, rescale: bool) -> PreTrainedModel:
    """A float32 model on the CPU with random weights; torch's global generators are left alone.

    The weights are transformers' own initialisation; with `rescale`, linear and embedding weights are
    N(0, 1 / fan_in) instead, and their biases N(0, 0.1²).
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed CUDA too
        model = AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
        for module in model.modules() if rescale else ():
            if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                fan_in = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
                module.weight.normal_(0.0, fan_in**-0.5)
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_(0.0, 0.1)
    return model
