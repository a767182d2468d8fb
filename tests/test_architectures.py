"""Value and output maps are found where each family keeps them, as views, and anything else is refused."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from transformers import ElectraConfig, ElectraModel, PreTrainedModel, T5Config, T5Model

import cwlib
from cwlib.architectures import attention_layers, supported_types
from cwlib.checkpoints import tiny_checkpoint
from cwlib.checks import relative_residual

FAMILIES = ("bert", "mpnet", "gpt2", "llama", "qwen2", "gemma3")
# every way in which heads, widths and biases can be laid out; hidden size 48, 4 query heads
VARIANTS: tuple[tuple[str, dict], ...] = (
    ("bert", {}),
    ("mpnet", {}),
    ("gpt2", {}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("llama", {"attention_bias": False}),
    ("llama", {"attention_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 20}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 6, "attention_bias": True}),
    ("qwen2", {}),
    ("gemma3", {"attention_bias": False}),
    ("gemma3", {"attention_bias": True, "num_key_value_heads": 2}),
)
HEADS, HIDDEN = 4, 48
TEXT = "a walk of forty bytes, no more no less."

# names of the value and output projections in the state dict; the oracle shares nothing with cwlib
STATE = {
    "bert": ("encoder.layer.{}.attention.self.value", "encoder.layer.{}.attention.output.dense"),
    "mpnet": ("encoder.layer.{}.attention.attn.v", "encoder.layer.{}.attention.attn.o"),
    "gpt2": ("h.{}.attn.c_attn", "h.{}.attn.c_proj"),
    "llama": ("layers.{}.self_attn.v_proj", "layers.{}.self_attn.o_proj"),
    "qwen2": ("layers.{}.self_attn.v_proj", "layers.{}.self_attn.o_proj"),
    "gemma3": ("layers.{}.self_attn.v_proj", "layers.{}.self_attn.o_proj"),
}


def variant_id(value: object) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "plain"
    return None


def raw_maps(model: PreTrainedModel, family: str, layer: int) -> tuple[list, list, list, np.ndarray]:
    """V_h, O_h and b_V^h of every query head, and b_O, float64, cut out of the state dict."""
    state = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    value, output = (name.format(layer) for name in STATE[family])
    v, o = state[f"{value}.weight"], state[f"{output}.weight"]
    v_bias, o_bias = state.get(f"{value}.bias"), state.get(f"{output}.bias")
    if family == "gpt2":  # (in, out) layout, with query, key and value side by side
        v, o, v_bias = v[:, 2 * HIDDEN :].T, o.T, v_bias[2 * HIDDEN :]
    v_bias = np.zeros(len(v)) if v_bias is None else v_bias
    o_bias = np.zeros(HIDDEN) if o_bias is None else o_bias
    width = o.shape[1] // HEADS
    sharing = HEADS // (len(v) // width)  # query heads per value head: 0, 0, 1, 1 for two value heads
    values, outputs, biases = [], [], []
    for head in range(HEADS):
        rows = slice(head // sharing * width, (head // sharing + 1) * width)
        values.append(v[rows])
        biases.append(v_bias[rows])
        outputs.append(o[:, head * width : (head + 1) * width])
    return values, outputs, biases, o_bias


def edit_biases(model: PreTrainedModel, edit: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Rewrite every bias of a linear layer in place; return how many there are."""
    biases = [p for name, p in model.named_parameters() if name.endswith(".bias") and "norm" not in name.lower()]
    with torch.no_grad():
        for bias in biases:
            bias.copy_(edit(bias))
    return len(biases)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=variant_id)
def test_maps_and_biases_are_those_of_the_state_dict(family: str, overrides: dict) -> None:
    model = tiny_checkpoint(family, dtype="float64", **overrides).model
    found = attention_layers(model)
    assert [layer.index for layer in found] == list(range(model.config.num_hidden_layers))
    for layer in found:
        values, outputs, biases, o_bias = raw_maps(model, family, layer.index)
        transports = layer.transports
        assert (transports.heads, transports.d_model) == (HEADS, HIDDEN)
        for head in range(HEADS):
            mine = transports.output[head].numpy() @ transports.value[head // transports.groups].numpy()
            np.testing.assert_allclose(mine, outputs[head] @ values[head], rtol=0, atol=1e-14)
        attention = torch.rand(HEADS, 3, 5, dtype=torch.float64)
        expected = np.tile(o_bias, (3, 1))
        for head in range(HEADS):
            expected += np.outer(attention[head].sum(1).numpy(), outputs[head] @ biases[head])
        constant = layer.maps.constant(attention)
        if constant is None:
            assert not np.any(expected)
        else:
            np.testing.assert_allclose(constant.numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=variant_id)
def test_maps_are_views_of_the_weights_and_shared_values_are_not_copied(family: str, overrides: dict) -> None:
    model = tiny_checkpoint(family, **overrides).model
    for layer in attention_layers(model):
        value, output = (model.get_submodule(name.format(layer.index)).weight for name in STATE[family])
        for view, weight in ((layer.transports.value, value), (layer.transports.output, output)):
            assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        kv_heads = getattr(model.config, "num_key_value_heads", None) or HEADS
        assert layer.transports.value.shape[0] == kv_heads
        assert layer.transports.groups == HEADS // kv_heads
        with torch.no_grad():
            value.zero_()
        assert not layer.transports.value.any()


@pytest.mark.claim("T2")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=variant_id)
def test_the_walk_reproduces_the_module_in_every_dtype(family: str, overrides: dict, dtype: str) -> None:
    if dtype == "float64" and overrides.get("reorder_and_upcast_attn"):
        overrides = {}  # transformers itself refuses this option in float64
    checkpoint = tiny_checkpoint(family, seed=1, dtype=dtype, **overrides)
    biased = edit_biases(checkpoint.model, lambda bias: torch.randn(bias.shape).to(bias))
    bound = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 4e-2}[dtype]
    residuals = []
    for layer in cwlib.layers(checkpoint, TEXT):
        residuals.append(layer.residual())
        if biased:  # they are a visible part of the output, so that leaving them out could not pass
            assert layer.walk.constant.norm() > 0.1 * layer.output.double().norm()
    assert len(residuals) == checkpoint.model.config.num_hidden_layers
    assert max(residuals) <= bound


@pytest.mark.claim("T2")
@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=variant_id)
def test_without_biases_the_walk_is_linear(family: str, overrides: dict) -> None:
    checkpoint = tiny_checkpoint(family, seed=2, **overrides)
    edit_biases(checkpoint.model, torch.zeros_like)
    for layer in cwlib.layers(checkpoint, TEXT):
        assert layer.walk.constant is None or not layer.walk.constant.any()
        assert relative_residual(layer.walk @ layer.field, layer.output) <= 1e-5


def test_t2_sees_each_kind_of_mistake() -> None:
    checkpoint = tiny_checkpoint("llama", attention_bias=True)
    layer = next(iter(cwlib.layers(checkpoint, "a text that is long enough")))
    walk = layer.walk
    value, output, constant = walk.value, walk.output, walk.constant
    key = checkpoint.model.layers[0].self_attn.k_proj.weight.view(value.shape)
    interleaved = value.repeat(2, 1, 1)  # query head h given value head h % 2 instead of h // 2
    mistakes = {
        "key for value": cwlib.ConnectionWalk(walk.attention, key, output, constant, groups=2),
        "value heads swapped": cwlib.ConnectionWalk(walk.attention, value.flip(0), output, constant, groups=2),
        "wrong sharing of value heads": cwlib.ConnectionWalk(walk.attention, interleaved, output, constant),
        "heads out of order": cwlib.ConnectionWalk(walk.attention, value, output.flip(0), constant, groups=2),
        "no biases": cwlib.ConnectionWalk(walk.attention, value, output, groups=2),
        "another layer's maps": cwlib.ConnectionWalk.from_transports(
            walk.attention, attention_layers(checkpoint.model)[1].transports, constant
        ),
    }
    assert relative_residual(walk.apply(layer.field), layer.output) <= 1e-5
    for name, mistake in mistakes.items():
        assert relative_residual(mistake.apply(layer.field), layer.output) > 0.1, name


# --- refusals -----------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """A module that is no transformers model, with a config that has a type."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.config = type("Config", (), {"model_type": "homemade"})()


def electra() -> nn.Module:
    sizes = {"hidden_size": 16, "embedding_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    return ElectraModel(ElectraConfig(vocab_size=20, num_hidden_layers=1, **sizes))


def t5() -> nn.Module:
    return T5Model(T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


@pytest.mark.parametrize(("build", "kind"), [(electra, "electra"), (t5, "t5"), (Bare, "homemade")])
def test_an_unsupported_model_is_named_with_the_supported_ones(build: Callable[[], nn.Module], kind: str) -> None:
    with pytest.raises(ValueError, match=f"unsupported type '{kind}'") as raised:
        attention_layers(build())
    assert all(name in str(raised.value) for name in supported_types())


def test_supported_types_are_the_model_types_of_the_families() -> None:
    types = {tiny_checkpoint(family).model.config.model_type for family in FAMILIES}
    assert types <= set(supported_types())
    assert set(supported_types()) - types == {"gemma3"}  # the multimodal wrapper of the same attention


def test_cross_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"h\.0\.crossattention is cross-attention"):
        attention_layers(tiny_checkpoint("gpt2", add_cross_attention=True).model)


class Doubling(nn.Linear):
    """Looks like a linear layer, but its weight is not the map that it applies (as in quantised layers)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def wrapped(old: nn.Linear) -> nn.Module:
    return nn.Sequential(old)


def doubling(old: nn.Linear) -> nn.Module:
    new = Doubling(old.in_features, old.out_features, bias=False)
    new.weight = old.weight
    return new


@pytest.mark.parametrize("replace", [wrapped, doubling])
@pytest.mark.parametrize("name", ["v_proj", "o_proj"])
def test_a_projection_that_is_not_plainly_linear_is_refused(name: str, replace: Callable) -> None:
    model = tiny_checkpoint("llama").model
    attention = model.layers[1].self_attn
    setattr(attention, name, replace(getattr(attention, name)))
    with pytest.raises(ValueError, match=rf"layers\.1\.self_attn\.{name} to be a plain linear layer"):
        attention_layers(model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_quantised_weights_are_refused(dtype: torch.dtype) -> None:
    model = tiny_checkpoint("qwen2").model
    weight = model.layers[0].self_attn.v_proj.weight
    weight.data = weight.data.to(dtype)
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn\.v_proj, got {dtype}"):
        attention_layers(model)


def test_maps_that_do_not_fit_the_head_counts_are_refused() -> None:
    model = tiny_checkpoint("llama").model
    model.layers[0].self_attn.v_proj = nn.Linear(HIDDEN, 20)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn to hold 2 value heads .* shape \(20, 48\)"):
        attention_layers(model)
