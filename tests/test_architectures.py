"""Value and output maps are found where each family keeps them, as views, and anything else is refused."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from models import (
    EVERY,
    FULL,
    HEADS,
    HIDDEN,
    HYBRIDS,
    IDS,
    OLDER,
    STACKS,
    VARIANTS,
    causal,
    example,
    numbers,
    raw_maps,
    stack_of,
    variant_id,
)
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    PreTrainedModel,
)

import cwlib
from cwlib.architectures import attention_layers
from cwlib.checkpoints import tiny_checkpoint
from cwlib.checks import relative_residual
from cwlib.families import skipped_layers, supported_types
from cwlib.tiny import tiny_config

TEXT = "a walk of forty bytes, no more no less."
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}
# transformers itself refuses these in other dtypes than float32
FLOAT32_ONLY = "reorder_and_upcast_attn"


def quietly(checkpoint: cwlib.Checkpoint, given: Sequence[int] | dict) -> list[cwlib.LayerWalk]:
    """The layers, without the warning about hybrids."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(cwlib.layers(checkpoint, given))


def edit_biases(model: PreTrainedModel, edit: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Rewrite every bias of a linear layer in place; return how many there are."""
    biases = [p for name, p in model.named_parameters() if name.endswith(".bias") and "norm" not in name.lower()]
    with torch.no_grad():
        for bias in biases:
            bias.copy_(edit(bias))
    return len(biases)


@pytest.mark.parametrize(("family", "overrides"), EVERY, ids=variant_id)
def test_maps_and_biases_are_those_of_the_state_dict(family: str, overrides: dict) -> None:
    model = tiny_checkpoint(family, dtype="float64", **overrides).model
    found = attention_layers(model)
    expected = {s.name(s.path, n): (s, n) for s in STACKS[family] for n in numbers(family, s)}
    assert {layer.path for layer in found} == expected.keys()
    for layer in found:
        stack, number = expected[layer.path]
        values, outputs, biases, o_bias = raw_maps(model, stack, number)
        transports = layer.transports
        assert (transports.heads, transports.d_model) == (HEADS, HIDDEN)
        for head in range(HEADS):
            mine = transports.output[head].numpy() @ transports.value[head // transports.groups].numpy()
            np.testing.assert_allclose(mine, outputs[head] @ values[head], rtol=0, atol=1e-14)
        attention = torch.rand(HEADS, 3, 5, dtype=torch.float64)
        constant = np.tile(o_bias, (3, 1))
        for head in range(HEADS):
            constant += np.outer(attention[head].sum(1).numpy(), outputs[head] @ biases[head])
        found_constant = layer.maps.constant(attention)
        if found_constant is None:
            assert not np.any(constant)
        else:
            np.testing.assert_allclose(found_constant.numpy(), constant, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", FULL)
def test_maps_are_views_of_the_weights_and_shared_values_are_not_copied(family: str) -> None:
    model = tiny_checkpoint(family).model
    for layer in attention_layers(model):
        stack = stack_of(family, layer.path)
        number = numbers(family, stack)[layer.index]
        value, output = (model.get_submodule(stack.name(p, number)).weight for p in (stack.value, stack.output))
        for view, weight in ((layer.transports.value, value), (layer.transports.output, output)):
            assert view.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        distinct = {matrix.tobytes() for matrix in raw_maps(model, stack, number)[0]}
        assert layer.transports.value.shape[0] == len(distinct)
        with torch.no_grad():
            value.zero_()
        assert not layer.transports.value.any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict], Path]:
    """A folder in the hub's layout with a tiny model of some family, whose biases are large; made once."""
    made: dict[str, Path] = {}

    def get(family: str, overrides: dict) -> Path:
        key = f"{family} {overrides}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            model = tiny_checkpoint(family, seed=1, **overrides).model
            edit_biases(model, lambda bias: torch.randn(bias.shape).to(bias))
            model.save_pretrained(made[key])
        return made[key]

    return get


@pytest.mark.parametrize("family", STACKS)
def test_maps_straight_from_the_files_are_those_of_the_opened_model(family: str, folder: Callable) -> None:
    if family in ("nomic_bert", "jina_embeddings_v3"):  # in files query, key and value are one matrix
        with pytest.raises(
            cwlib.CheckpointError, match=r"lack layers\.0\.self_attn\.v_proj\.weight: .*open_checkpoint"
        ):
            list(cwlib.weight_layers(folder(family, {})))
        return
    opened = attention_layers(cwlib.open_checkpoint(folder(family, {}), device="cpu").model)
    for layer, expected in zip(cwlib.weight_layers(folder(family, {})), opened, strict=True):
        assert (layer.path, layer.index) == (expected.path, expected.index)
        assert torch.equal(layer.transports.value, expected.transports.value)
        assert torch.equal(layer.transports.output, expected.transports.output)


@pytest.mark.claim("T2")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("family", "overrides"), VARIANTS, ids=variant_id)
def test_the_walk_reproduces_the_module_in_every_dtype(
    family: str, overrides: dict, dtype: str, folder: Callable
) -> None:
    """Opened from a folder: T2 on every layer; rows sum to one over exactly the tokens that the mask leaves."""
    if FLOAT32_ONLY in overrides:
        overrides = {}
    checkpoint = cwlib.open_checkpoint(folder(family, overrides), device="cpu", dtype=dtype)
    captured = quietly(checkpoint, example(family))
    assert len(captured) == sum(len(numbers(family, stack)) for stack in STACKS[family])
    for layer in captured:
        assert layer.residual() <= TOLERANCE[dtype]
        stack = stack_of(family, layer.path)
        assert layer.kind == stack.kind
        walk = layer.walk
        i, j = torch.meshgrid(torch.arange(walk.n_dst), torch.arange(walk.n_src), indexing="ij")
        seen = (causal if overrides.get("is_decoder") else stack.mask)(layer.index, i, j)
        assert not walk.attention[:, ~seen].any()
        assert torch.equal(walk.support, seen)
        mass = walk.attention.double().sum(-1) + (0 if walk.absorption is None else walk.absorption)
        assert (mass - 1).abs().max() <= 1e-2
        assert (walk.absorption is None) == (family != "gpt_oss")


@pytest.mark.claim("T2")
@pytest.mark.parametrize("family", FULL)
def test_biases_are_a_visible_part_and_without_them_the_walk_is_linear(family: str) -> None:
    checkpoint = tiny_checkpoint(family, seed=2)
    constants = {}
    for edit in (lambda bias: torch.randn(bias.shape).to(bias), torch.zeros_like):
        edit_biases(checkpoint.model, edit)
        for layer in quietly(checkpoint, example(family)):
            if edit is torch.zeros_like:
                assert layer.walk.constant is None or not layer.walk.constant.any()
                assert relative_residual(layer.walk @ layer.field, layer.output) <= 1e-5
                assert (layer.walk.constant is None) == (layer.path not in constants)
            elif layer.walk.constant is not None:  # so that leaving it out could not pass
                constants[layer.path] = layer.walk.constant
                assert layer.walk.constant.norm() > 0.1 * layer.output.double().norm()


# what none of the families has of itself; a stack may have other head counts than its configuration says of another
UNUSUAL: tuple[tuple[str, dict], ...] = (
    ("albert", {"num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}),
    ("deberta-v2", {"pos_att_type": ["p2c"], "max_relative_positions": 6}),
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 14}),
    ("llama", {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    ("gemma3", {"use_bidirectional_attention": True}),
    ("falcon-new", {"alibi": True, "bias": True}),
    ("t5", {"num_heads": 3, "feed_forward_proj": "gated-gelu"}),
    ("bart", {"num_attention_heads": 2, "num_hidden_layers": 1}),
    ("whisper", {"num_attention_heads": 2, "num_hidden_layers": 1}),
)


@pytest.mark.claim("T2")
@pytest.mark.parametrize(("family", "overrides"), UNUSUAL, ids=variant_id)
def test_unusual_configurations_are_read(family: str, overrides: dict, folder: Callable) -> None:
    checkpoint = cwlib.open_checkpoint(folder(family, overrides), device="cpu", dtype="float64")
    given = IDS[:8] if "rope_parameters" in overrides else example(family)
    captured = list(cwlib.layers(checkpoint, given))
    assert len(captured) == {"albert": 8, "t5": 8, "bart": 7, "whisper": 7}.get(family, len(captured)) >= 3
    for layer in captured:
        assert layer.residual() <= 1e-14
        assert (layer.walk.attention.sum(-1) - 1).abs().max() <= 1e-6  # several families round the softmax to float32
    maps = {layer.path: layer.transports for layer in cwlib.weight_layers(folder(family, overrides))}
    for layer in captured:
        assert torch.equal(maps[layer.path].value.double(), layer.walk.value)


@pytest.mark.parametrize(
    ("family", "setting"),
    [("olmo", {"clip_qkv": 0.5}), ("olmoe", {"clip_qkv": 0.0}), ("roformer", {"rotary_value": True})],
)
def test_values_that_are_changed_after_their_projection_are_refused(family: str, setting: dict) -> None:
    [(name, value)] = setting.items()
    with pytest.raises(
        ValueError, match=rf"expected .*\.0\..* without {name}, got {value}: values are (clipped|rotated)"
    ):
        attention_layers(tiny_checkpoint(family, **setting).model)


HEADS_ON_TOP = (AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoModelForCausalLM)
WITHOUT_A_HEAD = {"vit", "clip-text", "clip-vision", "clip"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [family for family in FULL if family not in WITHOUT_A_HEAD])
def test_a_head_tied_to_the_embeddings_or_not_is_left(family: str, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(family, {"tie_word_embeddings": tied})
    kind = next(kind for kind in HEADS_ON_TOP if type(config) in kind._model_mapping)
    model = kind.from_config(config)
    same = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert same == (tied or family == "t5")  # which is always tied
    model.save_pretrained(tmp_path)
    checkpoint = cwlib.open_checkpoint(tmp_path, device="cpu")
    captured = quietly(checkpoint, example(family))
    assert len(captured) == sum(len(numbers(family, stack)) for stack in STACKS[family])
    assert all(layer.residual() <= 1e-5 for layer in captured)
    inside = {layer.path: layer.transports for layer in attention_layers(model.base_model)}
    for layer in cwlib.weight_layers(tmp_path):
        assert torch.equal(layer.transports.value, inside[layer.path].value)


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


def fnet() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    return AutoModel.from_config(AutoConfig.for_model("fnet", **sizes))


@pytest.mark.parametrize(("build", "kind"), [(fnet, "fnet"), (Bare, "homemade")])
def test_an_unsupported_model_is_named_with_the_supported_ones(build: Callable[[], nn.Module], kind: str) -> None:
    with pytest.raises(ValueError, match=f"unsupported type '{kind}'") as raised:
        attention_layers(build())
    assert all(name in str(raised.value) for name in supported_types())


def test_supported_types_are_the_model_types_of_the_families() -> None:
    types = {tiny_config(family, {}).model_type for family in STACKS}
    assert types <= set(supported_types())
    others = {"gemma3"} | ({"dinov2", "dinov2_with_registers"} if OLDER else set())
    assert set(supported_types()) - types == others  # the multimodal wrapper of the same attention


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 20,
}
REFUSED = {
    "deepseek_v3": (
        {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "first_k_dense_replace": 1},
        "latent attention",
    ),
    "qwen3_next": ({"num_experts": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2}, "gated attention"),
    "mamba": ({"state_size": 4}, "state-space"),
    "rwkv": ({"attention_hidden_size": 32}, "linear attention"),
    "deberta": ({}, "first DeBERTa"),
    "longformer": ({"attention_window": 4}, "LongformerSelfAttention, a class that this release does not know"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_walk_is_refused_with_the_reason(kind: str) -> None:
    fields, reason = REFUSED[kind]
    known = AutoConfig.for_model(kind)
    sizes = {key: size for key, size in SMALL.items() if hasattr(known, key)}
    model = AutoModel.from_config(AutoConfig.for_model(kind, **sizes | fields))
    assert any(reason in found for _, found in skipped_layers(model))
    with pytest.raises(ValueError, match=f"unsupported type '{kind}' .*{reason}.*; expected one of bert"):
        attention_layers(model)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_names_the_layers_that_are_left_out_once(family: str) -> None:
    checkpoint = tiny_checkpoint(family)
    name, reason = ("conv", "a gated convolution") if family == "lfm2" else ("mamba", "a state-space layer")
    assert [path for path, _ in skipped_layers(checkpoint.model)] == [f"layers.{n}.{name}" for n in (0, 2)]
    with pytest.warns(UserWarning, match=rf"2 layers are left out, first layers\.0\.{name}: {reason}"):
        found = list(cwlib.layers(checkpoint, IDS))
    assert [(layer.index, layer.path) for layer in found] == [(0, "layers.1.self_attn")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(cwlib.layers(checkpoint, IDS))


@pytest.mark.parametrize("family", set(STACKS) - set(HYBRIDS))
def test_other_families_leave_nothing_out(family: str) -> None:
    assert skipped_layers(tiny_checkpoint(family).model) == ()


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


def test_a_family_that_another_transformers_lays_out_otherwise_is_refused() -> None:
    model = tiny_checkpoint("llama").model
    del model.layers[1].self_attn.v_proj
    with pytest.raises(ValueError, match=r"LlamaAttention layers\.1\.self_attn to have v_proj .*upgrade transformers"):
        attention_layers(model)


def test_maps_that_do_not_fit_the_head_counts_are_refused() -> None:
    model = tiny_checkpoint("llama").model
    model.layers[0].self_attn.v_proj = nn.Linear(HIDDEN, 20)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn to hold 2 value heads .* shape \(20, 48\)"):
        attention_layers(model)
