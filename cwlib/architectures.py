"""The attention layers of a model, with their value and output maps.

Where a family keeps them is an entry in `cwlib.families`. Weights are read raw, as stored; norms before the attention
are part of the field, not of the maps.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import transformers
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from cwlib.checks import TOLERANCE
from cwlib.cores import HeadTransports
from cwlib.families import LINEAR, NOT_LINEAR, Family, family_of, skipped_layers, supported_types
from cwlib.kernels import row_sums


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
        Position among the attention layers of its stack.
    path : str
        Name of the module in the model.
    module, projection : nn.Module
        The attention module, which sees the field and returns the attention weights, and its output projection, which
        returns the module's own attention output.
    sinks : bool
        Whether its softmax includes a learned logit that belongs to no token.
    in_memory : bool
        Whether the weights are; otherwise `maps` reads them from their file at each use.
    read : callable
        Makes the maps, without any cores.
    """

    index: int
    path: str
    module: nn.Module
    projection: nn.Module
    sinks: bool
    in_memory: bool
    read: Callable[[], Maps]

    @property
    def stack(self) -> str:
        """What the paths of the layers of one stack and kind have in common, as "decoder.layers.*.self_attn"."""
        return stack_of(self.path)

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


def stack_of(path: str) -> str:
    """The path of an attention module without the number of its layer."""
    return re.sub(r"\b\d+\b", "*", path)


def _require_linear(module: nn.Module, path: str) -> None:
    """Refuse what is not a plain linear map with floating-point weights."""
    plain = isinstance(module, Conv1D) or type(module).__name__ in LINEAR or type(module).forward is nn.Linear.forward
    if not plain:
        raise ValueError(
            f"model: expected {path} to be a plain linear layer, got {type(module).__name__}; merge adapters "
            "(merge_and_unload) or load the model unquantised first"
        )
    _require_floats(module.weight, path)


def _require_floats(weight: Tensor, path: str) -> None:
    if weight.dtype not in TOLERANCE:
        raise ValueError(
            f"model: expected floating-point weights in {path}, got {weight.dtype}; load the model dequantised"
        )


def _linear(module: nn.Module, path: str, stored: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor | None]:
    """Weight as (out_features, in_features), and bias, of a projection; from ``stored`` if the model is a shell."""
    if stored is not None:
        weight = stored[f"{path}.weight"]
        bias = None if module.bias is None else stored[f"{path}.bias"]
        _require_floats(weight, path)
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


def _known(names: tuple[str, ...], *places: object) -> int | None:
    """The first of these attributes that a place has, the module before its configuration."""
    return next((getattr(p, name) for p in places for name in names if isinstance(getattr(p, name, None), int)), None)


def _find_layer(
    model: nn.Module, index: int, path: str, module: nn.Module, family: Family, stored: Mapping[str, Tensor] | None
) -> AttentionLayer:
    def resolve(relative: str) -> tuple[nn.Module, str]:
        name = posixpath.normpath(posixpath.join(path.replace(".", "/"), relative)).replace("/", ".")
        try:
            return model.get_submodule(name), name
        except AttributeError as error:
            raise ValueError(
                f"model: expected {type(module).__name__} {path} to have {relative} beside or below it, got none: this "
                f"family is laid out otherwise in transformers {transformers.__version__}; upgrade transformers"
            ) from error

    value, output = resolve(family.value), resolve(family.output)
    for projection in (value, output):
        _require_linear(*projection)
    config = getattr(module, "config", None) or model.config.get_text_config()
    for name, reason in NOT_LINEAR.items():
        setting = getattr(config, name, None)
        if setting is not None and setting is not False:
            raise ValueError(f"model: expected {path} without {name}, got {setting}: {reason}")
    heads = _known(("num_attention_heads", "num_heads", "n_heads"), module, config)
    # the module alone says how many value heads it has: Whisper's configuration gives its encoder's heads for that
    kv_heads = _known(("num_key_value_heads", "num_kv_heads", "kv_heads"), module)
    kv_heads = kv_heads or heads // getattr(module, "num_key_value_groups", 1)
    (value_rows, value_columns), (d_model, width) = _shape(value[0]), _shape(output[0])
    d_head = width // heads
    stacked = kv_heads
    if family.fused:  # the queries of cross-attention have a map of their own
        stacked = 2 * kv_heads + (0 if getattr(module, "is_cross_attention", False) else heads)
    if (value_rows, value_columns) != (stacked * d_head, d_model) or width % heads:
        raise ValueError(
            f"model: expected {path} to hold {kv_heads} value heads and {heads} query heads of width {d_head}, got a "
            f"{'fused ' if family.fused else ''}value map of shape {(value_rows, value_columns)} and an output map of "
            f"shape {(d_model, width)}"
        )

    def value_heads(rows: Tensor) -> Tensor:
        if family.fused == "grouped":
            return rows.unflatten(0, (kv_heads, -1, d_head))[:, -1]
        return rows[-kv_heads * d_head :].unflatten(0, (kv_heads, d_head))

    def read() -> Maps:
        (weight, bias), (out, out_bias) = _linear(*value, stored), _linear(*output, stored)
        try:
            transports = HeadTransports(
                value_heads(weight), out.unflatten(1, (heads, d_head)).permute(1, 0, 2), groups=heads // kv_heads
            )
        except ValueError as error:
            raise ValueError(f"model: {path}: {error}; if its file is damaged, copy or download it again") from error
        return Maps(transports, None if bias is None else _per_head(value_heads(bias), transports), out_bias)

    in_memory = not (value[0].weight.is_meta or output[0].weight.is_meta)
    return AttentionLayer(index, path, module, output[0], family.sinks, in_memory, read)


def _shape(projection: nn.Module) -> tuple[int, int]:
    rows, columns = projection.weight.shape
    return (columns, rows) if isinstance(projection, Conv1D) else (rows, columns)


def _per_head(bias: Tensor, transports: HeadTransports) -> Float[Tensor, "head d_model"]:
    """O_h b_V^h, float64."""
    bias = transports.per_head(bias.to(torch.float64))
    # upcast a part of the rows at a time
    parts = [torch.einsum("hda,ha->hd", rows.to(torch.float64), bias) for rows in transports.output.split(64, 1)]
    return torch.cat(parts, 1)


def attention_layers(model: nn.Module, stored: Mapping[str, Tensor] | None = None) -> tuple[AttentionLayer, ...]:
    """The attention layers of a model in order, with their value and output maps as views of its weights.

    Parameters
    ----------
    model : nn.Module
        A transformers model of a supported family.
    stored : mapping of str to Tensor, optional
        Where the parameters of a model without weights (on the meta device) are, by name; asked layer by layer.

    Returns
    -------
    tuple of AttentionLayer
        One per module, in the order of the model; a module that several layers share (ALBERT) is there once.

    Raises
    ------
    ValueError
        If the model holds no attention module of a known family, or a projection is not a plain linear map; the
        message lists what is supported.
    """
    found, counts = [], Counter()
    for path, module in model.named_modules():
        family = family_of(module)
        if family is not None:
            layer = _find_layer(model, counts[stack_of(path)], path, module, family, stored)
            counts[layer.stack] += 1
            found.append(layer)
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        reasons = "; ".join(dict.fromkeys(reason for _, reason in skipped_layers(model)))
        raise ValueError(
            f"model: unsupported type {kind!r}{f' ({reasons})' if reasons else ''}; expected one of "
            f"{', '.join(supported_types())}. For another model pass its attention, value and output tensors to "
            "cwlib.ConnectionWalk"
        )
    return tuple(found)
