"""Tiny architectures and random weights, for tests and the smoke profile."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

LARGE = 2**20  #: bytes from which a weight is worth a file of its own

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
_WIDE = {"intermediate_size": 96}
_GROUPED = _WIDE | {"num_key_value_heads": 2}
_POSITIONS = {"pad_token_id": 1, "max_position_embeddings": 514}  # those families that count from padding_idx + 1
_EXPERTS = _GROUPED | {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_IMAGE = {"image_size": 16, "patch_size": 4}
_TOWERS = {
    "text_config": _SHARED | _WIDE,
    "vision_config": {k: _SHARED[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    | _WIDE
    | _IMAGE,
}
_HYBRID = _GROUPED | {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1}
_TWO_STACKS = {
    "num_hidden_layers": 2,  # of the encoder
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "decoder_start_token_id": 1,
}
_HEADS = _GROUPED | {"head_dim": 16}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_AUDIO = {
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


def _alike(names: str, fields: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {name: (name, fields) for name in names.split()}


# name -> model_type and fields, so that what is particular to a family is there: windows, biases, caps, fused maps
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", _WIDE),
    "roberta": ("roberta", _WIDE | _POSITIONS),
    "xlm-roberta": ("xlm-roberta", _WIDE | _POSITIONS),
    "electra": ("electra", _WIDE | {"embedding_size": 24}),
    "distilbert": ("distilbert", {"hidden_dim": 96}),
    "albert": ("albert", _WIDE | {"embedding_size": 24}),
    "mpnet": ("mpnet", _WIDE | _POSITIONS),
    "modernbert": (
        "modernbert",
        _WIDE | {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "deberta-v2": (
        "deberta-v2",
        _WIDE
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "position_biased_input": False,
        },
    ),
    "vit": ("vit", _WIDE | _IMAGE),
    "clip-text": ("clip_text_model", _WIDE),
    "clip-vision": ("clip_vision_model", _WIDE | _IMAGE),
    "clip": ("clip", _TOWERS),
    "gpt2": ("gpt2", {"n_inner": 96}),
    "gpt_neo": (
        "gpt_neo",
        _WIDE | {"attention_types": [[["global", "local"], 2]], "window_size": 8, "num_hidden_layers": 4},
    ),
    "gpt_neox": ("gpt_neox", _WIDE),
    "gptj": ("gptj", {"n_inner": 96, "rotary_dim": 4}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 48}),
    "bloom": ("bloom", {}),
    "falcon": ("falcon", {"ffn_hidden_size": 96, "multi_query": True}),
    "falcon-new": ("falcon", {"ffn_hidden_size": 96, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("falcon", {"ffn_hidden_size": 96, "multi_query": False, "alibi": True, "bias": True}),
    "llama": ("llama", _GROUPED | {"head_dim": 12}),
    "mistral": ("mistral", _GROUPED | {"sliding_window": 8}),
    "qwen2": ("qwen2", _GROUPED),
    "qwen3": ("qwen3", _GROUPED | {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        _GROUPED | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "attn_logit_softcapping": 1.0},
    ),
    "gemma3": (
        "gemma3_text",
        _WIDE
        | {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
        },
    ),
    "phi": ("phi", _GROUPED | {"qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", _GROUPED | {"sliding_window": 8}),
    "olmo2": ("olmo2", _GROUPED),
    "stablelm": ("stablelm", _GROUPED | {"use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "granite": ("granite", _GROUPED | {"attention_bias": True, "attention_multiplier": 0.3}),
    "mixtral": ("mixtral", _GROUPED | {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | {"shared_expert_intermediate_size": 24}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"head_dim": 16}),
    "gpt_oss": (
        "gpt_oss",
        _GROUPED
        | {
            "head_dim": 12,
            "sliding_window": 8,
            "num_local_experts": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "t5": ("t5", {"num_hidden_layers": 2, "num_decoder_layers": 3, "d_kv": 16, "d_ff": 96}),
    "bart": ("bart", _TWO_STACKS),
    "whisper": (
        "whisper",
        _TWO_STACKS | {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 64},
    ),
    "jamba": (
        "jamba",
        _GROUPED | {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    ),
    "bamba": ("bamba", _HYBRID | {"attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        _HYBRID | {"shared_intermediate_size": 96, "layer_types": ["mamba", "attention", "mamba"]},
    ),
    # relatives, laid out as one of the above
    **_alike("camembert data2vec-text roberta-prelayernorm xlm-roberta-xl", _WIDE | _POSITIONS),
    **_alike("ernie megatron-bert nomic_bert jina_embeddings_v3 persimmon biogpt", _WIDE),
    **_alike("rembert", _WIDE | {"input_embedding_size": 24, "output_embedding_size": 24}),
    **_alike("roformer", _WIDE | {"embedding_size": 24}),
    **_alike("esm", _WIDE | {"position_embedding_type": "rotary", "mask_token_id": 3}),
    **_alike("big_bird", _WIDE | {"attention_type": "original_full"}),
    **_alike("eurobert gemma cohere olmo smollm3 glm glm4 nemotron ernie4_5 seed_oss apertus ministral3", _HEADS),
    **_alike("cohere2 olmo3 exaone4", _HEADS | {"sliding_window": 8, "layer_types": _TYPES}),
    **_alike("starcoder2", _GROUPED | {"sliding_window": 8}),
    **_alike("olmoe granitemoe phimoe", _EXPERTS | {"num_local_experts": 4}),
    **_alike("llama4_text", _HEADS | {"num_local_experts": 4, "intermediate_size_mlp": 96}),
    **_alike("gpt_bigcode", {"n_inner": 96}),
    **_alike("modernbert-decoder", _WIDE | {"local_attention": 16, "layer_types": _TYPES}),
    **_alike("lfm2", _GROUPED | {"layer_types": ["conv", "full_attention", "conv"]}),
    **_alike("deit dinov2 dinov3_vit", _WIDE | _IMAGE),
    **_alike("dinov2_with_registers", _WIDE | _IMAGE | {"num_register_tokens": 3}),
    **_alike("wav2vec2 hubert", _WIDE | _AUDIO),
    **_alike("mbart pegasus marian m2m_100 blenderbot blenderbot-small plbart", _TWO_STACKS),
    **_alike("mt5 umt5 switch_transformers", {"num_hidden_layers": 2, "num_decoder_layers": 3, "d_kv": 16, "d_ff": 96}),
    **_alike("t5gemma", {"encoder": _SHARED | _HEADS | {"num_hidden_layers": 2}, "decoder": _SHARED | _HEADS}),
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
    if family not in TINY:
        raise ValueError(f"family: expected one of {', '.join(TINY)}, got {family!r}")
    model_type, own = TINY[family]
    known = AutoConfig.for_model(model_type)
    if unknown := [key for key in overrides if not hasattr(known, key)]:
        raise ValueError(f"overrides: {type(known).__name__} has no field {', '.join(unknown)}")
    return AutoConfig.for_model(model_type, **{**_SHARED, **own, **overrides})


class _InFiles(TorchFunctionMode):
    """Large tensors that are made lie in files of a folder: the system may write them out and take their memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.empty:
            return function(*args, **kwargs)
        like = function(*args, **{**kwargs, "device": "meta"})
        if like.nbytes < LARGE or kwargs.get("device") not in (None, "cpu", torch.device("cpu")):
            return function(*args, **kwargs)
        path = self.folder / f"{uuid4().hex}.weights"
        try:
            return torch.from_file(str(path), shared=True, size=like.numel(), dtype=like.dtype).view(like.shape)
        finally:
            path.unlink(missing_ok=True)  # what is mapped stays until the tensor goes


def random_model(config: PreTrainedConfig, seed: int, rescale: bool, folder: Path | None = None) -> PreTrainedModel:
    """A float32 model on the CPU with random weights; torch's global generators are left alone.

    The weights are transformers' own initialisation; with `rescale`, linear and embedding weights are
    N(0, 1 / fan_in) instead, and their biases N(0, 0.1²). With a `folder` they are the same, but take
    disk there instead of memory.
    """
    storage = nullcontext() if folder is None else _InFiles(folder)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), storage:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed CUDA too
        model = AutoModel.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32)
        for module in model.modules() if rescale else ():
            if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                fan_in = module.weight.shape[0 if isinstance(module, Conv1D) else 1]
                module.weight.normal_(0.0, fan_in**-0.5)
                if getattr(module, "bias", None) is not None:
                    module.bias.normal_(0.0, 0.1)
    return model
