"""Where each model family keeps the value and output maps of its attention.

A family is one entry in `FAMILIES`, keyed by the class of its attention module: the entry names the projections, and
everything else (head counts, biases, transposed or fused weights) follows from the modules themselves. Weights are read
raw, as stored; norms before the attention are part of the field, not of the maps.
"""

import posixpath
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from cwlib.checks import TOLERANCE
from cwlib.cores import HeadTransports


@dataclass(frozen=True)
class Family:
    """Paths of the projections, relative to the attention module ('/' steps down, '..' up).

    ``fused`` projections stack query, key and value along the output features; the value is the last third.
    """

    model_types: tuple[str, ...]
    value: str
    output: str
    fused: bool = False


FAMILIES: dict[str, Family] = {
    "BertSelfAttention": Family(("bert",), "value", "../output/dense"),
    "MPNetSelfAttention": Family(("mpnet",), "v", "o"),
    "GPT2Attention": Family(("gpt2",), "c_attn", "c_proj", fused=True),
    "LlamaAttention": Family(("llama",), "v_proj", "o_proj"),
    "Qwen2Attention": Family(("qwen2",), "v_proj", "o_proj"),
    "Gemma3Attention": Family(("gemma3_text", "gemma3"), "v_proj", "o_proj"),
}


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention module of a model, with its factored maps.

    Attributes
    ----------
    index : int
        Position among the model's attention layers.
    path : str
        Name of the module in the model.
    module, projection : nn.Module
        The attention module, which sees the field and returns the attention weights, and its output projection, which
        returns the module's own attention output.
    transports : HeadTransports
        V_h and O_h as views of the model's weights.
    value_bias : Float[Tensor, "head d_model"] or None
        O_h b_V^h per head, float64: what a unit of attention adds.
    output_bias : Float[Tensor, "d_model"] or None
        b_O.
    """

    index: int
    path: str
    module: nn.Module
    projection: nn.Module
    transports: HeadTransports
    value_bias: Float[Tensor, "head d_model"] | None
    output_bias: Float[Tensor, " d_model"] | None

    def constant(self, attention: Float[Tensor, "head dst src"]) -> Float[Tensor, "dst d_model"] | None:
        r"""The section added by the biases, :math:`\sum_h (A^h 1)_i\, O_h b_V^h + b_O`, float64 (T1, T2).

        Its rows are all equal in exact arithmetic, where A 1 = 1. They are formed with the row sums that the model
        really used, because several models round the softmax to float32 even when they run in float64.
        """
        if self.value_bias is None and self.output_bias is None:
            return None
        section = torch.zeros(attention.shape[1], self.transports.d_model, dtype=torch.float64, device=attention.device)
        if self.value_bias is not None:
            section = section + attention.to(torch.float64).sum(-1).T @ self.value_bias
        return section if self.output_bias is None else section + self.output_bias.to(torch.float64)


def supported_types() -> tuple[str, ...]:
    """The ``model_type`` names of the families whose attention is known."""
    return tuple(name for family in FAMILIES.values() for name in family.model_types)


def _linear(module: nn.Module, path: str) -> tuple[Tensor, Tensor | None]:
    """Weight as (out_features, in_features), and bias, of a projection; refuses what is not a plain linear map."""
    if isinstance(module, Conv1D):
        weight = module.weight.T  # Conv1D stores (in_features, out_features)
    elif type(module).forward is nn.Linear.forward:
        weight = module.weight
    else:
        raise ValueError(
            f"model: expected {path} to be a plain linear layer, got {type(module).__name__}; merge adapters "
            "(merge_and_unload) or load the model unquantised first"
        )
    if weight.dtype not in TOLERANCE:
        raise ValueError(
            f"model: expected floating-point weights in {path}, got {weight.dtype}; load the model dequantised"
        )
    bias = module.bias
    return weight.detach(), None if bias is None else bias.detach()


def _read_layer(model: nn.Module, index: int, path: str, module: nn.Module, family: Family) -> AttentionLayer:
    def resolve(relative: str) -> tuple[str, nn.Module]:
        name = posixpath.normpath(posixpath.join(path.replace(".", "/"), relative)).replace("/", ".")
        return name, model.get_submodule(name)

    if getattr(module, "is_cross_attention", False):
        raise ValueError(
            f"model: {path} is cross-attention, which this release does not read; use the self-attention stack"
        )
    value_path, value_module = resolve(family.value)
    output_path, projection = resolve(family.output)
    value, value_bias = _linear(value_module, value_path)
    output, output_bias = _linear(projection, output_path)
    if family.fused:
        value = value.chunk(3)[2]
        value_bias = None if value_bias is None else value_bias.chunk(3)[2]

    config = getattr(module, "config", None) or model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    d_head, d_model = output.shape[1] // heads, output.shape[0]
    if value.shape != (kv_heads * d_head, d_model) or output.shape[1] != heads * d_head:
        raise ValueError(
            f"model: expected {path} to hold {kv_heads} value heads and {heads} query heads of width {d_head}, got "
            f"a value map of shape {tuple(value.shape)} and an output map of shape {tuple(output.shape)}"
        )
    transports = HeadTransports(
        value.view(kv_heads, d_head, d_model),
        output.view(d_model, heads, d_head).permute(1, 0, 2),
        groups=heads // kv_heads,
    )
    per_head = None
    if value_bias is not None:
        bias = transports.per_head(value_bias.to(torch.float64).view(kv_heads, d_head))
        per_head = torch.einsum(
            "hda,ha->hd", output.to(torch.float64).view(d_model, heads, d_head).permute(1, 0, 2), bias
        )
    return AttentionLayer(index, path, module, projection, transports, per_head, output_bias)


def attention_layers(model: nn.Module) -> tuple[AttentionLayer, ...]:
    """The attention layers of a model in order, with their value and output maps as views of its weights.

    Parameters
    ----------
    model : nn.Module
        A transformers model of a supported family.

    Raises
    ------
    ValueError
        If the model holds no attention module of a known family, or a projection is not a plain linear map; the
        message lists what is supported.
    """
    found = []
    for path, module in model.named_modules():
        # Dispatch on the class (or a base class), never on shapes: a square matrix does not tell its role.
        known = [FAMILIES[c.__name__] for c in type(module).__mro__ if c.__name__ in FAMILIES]
        if known:
            found.append((path, module, known[0]))
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        raise ValueError(
            f"model: unsupported type {kind!r}; expected one of {', '.join(supported_types())}. For another model "
            "pass its attention, value and output tensors to cwlib.ConnectionWalk"
        )
    return tuple(_read_layer(model, i, path, module, family) for i, (path, module, family) in enumerate(found))
