"""Where each model family keeps the value and output maps of its attention.

A family is one entry in `FAMILIES`, keyed by the class of its attention module: the entry names the projections, and
everything else (head counts, biases, transposed or fused weights) follows from the modules themselves. Weights are read
raw, as stored; norms before the attention are part of the field, not of the maps.
"""

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from cwlib.checks import TOLERANCE
from cwlib.cores import HeadTransports
from cwlib.kernels import row_sums


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
class Maps:
    """The maps of one attention layer.

    Attributes
    ----------
    transports : HeadTransports
        V_h and O_h, as views of the model's weights where these are in memory.
    value_bias : Float[Tensor, "head d_model"] or None
        O_h b_V^h per head, float64: what a unit of attention adds.
    output_bias : Float[Tensor, "d_model"] or None
        b_O.
    """

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
            section = section + row_sums(attention).T @ self.value_bias
        return section if self.output_bias is None else section + self.output_bias.to(torch.float64)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One attention module of a model, and where its maps are.

    Attributes
    ----------
    index : int
        Position among the model's attention layers.
    path : str
        Name of the module in the model.
    module, projection : nn.Module
        The attention module, which sees the field and returns the attention weights, and its output projection, which
        returns the module's own attention output.
    in_memory : bool
        Whether the weights are; otherwise `maps` reads them from their file at each use.
    read : callable
        Makes the maps, without any cores.
    """

    index: int
    path: str
    module: nn.Module
    projection: nn.Module
    in_memory: bool
    read: Callable[[], Maps]

    @cached_property
    def _kept(self) -> Maps:
        return self.read()

    @property
    def maps(self) -> Maps:
        """The layer's maps: views of weights in memory, kept with the cores computed of them, or else read anew."""
        return self._kept if self.in_memory else self.read()

    @property
    def transports(self) -> HeadTransports:
        """The factored transports of `maps`."""
        return self.maps.transports


def supported_types() -> tuple[str, ...]:
    """The ``model_type`` names of the families whose attention is known."""
    return tuple(name for family in FAMILIES.values() for name in family.model_types)


def _require_linear(module: nn.Module, path: str) -> None:
    """Refuse what is not a plain linear map with floating-point weights."""
    if not isinstance(module, Conv1D) and type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"model: expected {path} to be a plain linear layer, got {type(module).__name__}; merge adapters "
            "(merge_and_unload) or load the model unquantised first"
        )
    if module.weight.dtype not in TOLERANCE:
        raise ValueError(
            f"model: expected floating-point weights in {path}, got {module.weight.dtype}; load the model dequantised"
        )


def _linear(module: nn.Module, path: str, stored: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """Weight as (out_features, in_features), and bias, of a projection; from ``stored`` if the model is a shell."""
    if stored is not None:
        weight = stored[f"{path}.weight"]
        bias = None if module.bias is None else stored[f"{path}.bias"]
        for name, mine, own in (("weight", weight, module.weight), ("bias", bias, module.bias)):
            if own is not None and mine.shape != own.shape:
                raise ValueError(
                    f"model: expected {path}.{name} of shape {tuple(own.shape)} by its configuration, got "
                    f"{tuple(mine.shape)}; check that config.json and the weights belong together"
                )
    elif module.weight.is_meta:
        with align_module_device(module):  # accelerate brings offloaded weights in for as long as this lasts
            weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    else:
        weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
    return (weight.T if isinstance(module, Conv1D) else weight), bias  # Conv1D stores (in_features, out_features)


def _find_layer(
    model: nn.Module, index: int, path: str, module: nn.Module, family: Family, stored: Mapping[str, Tensor] | None
) -> AttentionLayer:
    def resolve(relative: str) -> tuple[nn.Module, str]:
        name = posixpath.normpath(posixpath.join(path.replace(".", "/"), relative)).replace("/", ".")
        return model.get_submodule(name), name

    if getattr(module, "is_cross_attention", False):
        raise ValueError(
            f"model: {path} is cross-attention, which this release does not read; use the self-attention stack"
        )
    value, output = resolve(family.value), resolve(family.output)
    for projection in (value, output):
        _require_linear(*projection)
    config = getattr(module, "config", None) or model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    (value_rows, value_columns), (d_model, width) = _shape(value[0]), _shape(output[0])
    d_head = width // heads
    if (value_rows, value_columns) != ((3 if family.fused else 1) * kv_heads * d_head, d_model) or width % heads:
        raise ValueError(
            f"model: expected {path} to hold {kv_heads} value heads and {heads} query heads of width {d_head}, got a "
            f"{'fused ' if family.fused else ''}value map of shape {(value_rows, value_columns)} and an output map of "
            f"shape {(d_model, width)}"
        )

    def read() -> Maps:
        return _read(*_linear(*value, stored), *_linear(*output, stored), heads, kv_heads, family.fused)

    in_memory = not (value[0].weight.is_meta or output[0].weight.is_meta)
    return AttentionLayer(index, path, module, output[0], in_memory, read)


def _shape(projection: nn.Module) -> tuple[int, int]:
    rows, columns = projection.weight.shape
    return (columns, rows) if isinstance(projection, Conv1D) else (rows, columns)


def _read(
    value: Tensor,
    value_bias: Tensor | None,
    output: Tensor,
    output_bias: Tensor | None,
    heads: int,
    kv_heads: int,
    fused: bool,
) -> Maps:
    if fused:
        value = value.chunk(3)[2]
        value_bias = None if value_bias is None else value_bias.chunk(3)[2]
    d_head = output.shape[1] // heads
    transports = HeadTransports(
        value.unflatten(0, (kv_heads, d_head)),
        output.unflatten(1, (heads, d_head)).permute(1, 0, 2),
        groups=heads // kv_heads,
    )
    per_head = None
    if value_bias is not None:
        bias = transports.per_head(value_bias.to(torch.float64).view(kv_heads, d_head))
        # upcast a part of the rows at a time
        parts = [torch.einsum("hda,ha->hd", rows.to(torch.float64), bias) for rows in transports.output.split(64, 1)]
        per_head = torch.cat(parts, 1)
    return Maps(transports, per_head, output_bias)


def attention_layers(model: nn.Module, stored: Mapping[str, Tensor] | None = None) -> tuple[AttentionLayer, ...]:
    """The attention layers of a model in order, with their value and output maps as views of its weights.

    Parameters
    ----------
    model : nn.Module
        A transformers model of a supported family.
    stored : mapping of str to Tensor, optional
        Where the parameters of a model without weights (on the meta device) are, by name; asked layer by layer.

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
    return tuple(_find_layer(model, i, path, module, family, stored) for i, (path, module, family) in enumerate(found))
