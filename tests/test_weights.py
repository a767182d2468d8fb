"""Maps that are read from files, layer by layer, are those of the model; and what does not fit is refused."""

import json
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from models import HEADS, STACKS, VARIANTS, raw_maps, variant_id
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedModel,
)

import cwlib
from cwlib.architectures import attention_layers
from cwlib.catalogue import CheckpointError
from cwlib.checkpoints import open_checkpoint, tiny_checkpoint
from cwlib.metrics import METRICS, measure
from cwlib.weights import StoredWeights, WeightLayer, weight_layers

FAMILIES = ("bert", "mpnet", "gpt2", "llama", "qwen2", "gemma3", "gpt_neox", "phi3", "falcon-new", "qwen3")
IDS = [7, 40, 3, 99, 120, 40, 8, 250, 61]
SHARD = "60KB"
# dtype, with a head on top, in several files
LAYOUTS = (("float32", False, False), ("float32", True, False), ("bfloat16", False, True), ("float16", True, True))
OF_WEIGHTS = [metric.name for metric in METRICS.values() if metric.weights_only]


def save(
    folder: Path, family: str, dtype: str = "float32", head: bool = False, shards: bool = False, **overrides: object
) -> PreTrainedModel:
    """Write a tiny model in the hub's layout; return its base model."""
    base = model = tiny_checkpoint(family, seed=5, dtype=dtype, **overrides).model
    if head:
        kind = AutoModelForMaskedLM if family in ("bert", "mpnet") else AutoModelForCausalLM
        model = kind.from_config(base.config).to(base.dtype)
        model.base_model.load_state_dict(base.state_dict(), strict=False)  # under this head there is no pooler
    model.save_pretrained(folder, max_shard_size=SHARD if shards else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == shards
    return base


def shard_of(folder: Path, name: str) -> Path:
    """The file of a parameter in a folder with several."""
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are read, in order."""
    names: list[str] = []
    original = StoredWeights.__getitem__

    def record(self: StoredWeights, name: str) -> torch.Tensor:
        names.append(name)
        return original(self, name)

    monkeypatch.setattr(StoredWeights, "__getitem__", record)
    return names


# --- the same maps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "head", "shards"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_maps_are_those_of_the_opened_model(family: str, dtype: str, head: bool, shards: bool, tmp_path: Path) -> None:
    save(tmp_path / "model", family, dtype, head, shards)
    expected = attention_layers(open_checkpoint(tmp_path / "model", device="cpu", dtype=dtype).model)
    found = list(weight_layers(tmp_path / "model"))
    assert [(layer.index, layer.path) for layer in found] == [(layer.index, layer.path) for layer in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert isinstance(mine, WeightLayer)
        assert mine.transports.groups == theirs.transports.groups
        for left, right in (
            (mine.transports.value, theirs.transports.value),
            (mine.transports.output, theirs.transports.output),
        ):
            assert str(left.dtype) == f"torch.{dtype}" and left.dtype == right.dtype
            assert torch.equal(left, right)


@pytest.mark.parametrize(("family", "overrides"), [v for v in VARIANTS if v[0] in FAMILIES], ids=variant_id)
def test_maps_are_those_of_the_state_dict(family: str, overrides: dict, tmp_path: Path) -> None:
    model = save(tmp_path / "model", family, head=True, shards=True, **overrides)
    found = list(cwlib.weight_layers(str(tmp_path / "model")))
    assert len(found) == model.config.num_hidden_layers
    for layer in found:
        values, outputs, _, _ = raw_maps(model, STACKS[family][0], layer.index)
        transports = layer.transports
        for head in range(HEADS):
            assert np.array_equal(transports.value[head // transports.groups].double().numpy(), values[head])
            assert np.array_equal(transports.output[head].double().numpy(), outputs[head])


def test_a_model_whose_files_use_other_names_is_read(tmp_path: Path) -> None:
    """As Gemma 3 with vision, which transformers renames while it loads."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=tiny_checkpoint("gemma3").model.config.to_dict(),
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    expected = attention_layers(open_checkpoint(tmp_path / "model", device="cpu").model)
    found = list(weight_layers(tmp_path / "model"))
    assert [layer.path for layer in found] == [f"language_model.layers.{n}.self_attn" for n in range(4)]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.transports.value, theirs.transports.value)
        assert torch.equal(mine.transports.output, theirs.transports.output)


@pytest.mark.parametrize("family", FAMILIES)
def test_metrics_of_weights_are_those_of_a_captured_layer(family: str, tmp_path: Path) -> None:
    save(tmp_path / "model", family)
    captured = cwlib.layers(open_checkpoint(tmp_path / "model", device="cpu"), IDS)
    for layer, whole in zip(weight_layers(tmp_path / "model"), captured, strict=True):
        found, expected = measure(layer.transports, OF_WEIGHTS), measure(whole, OF_WEIGHTS)
        assert list(found) == OF_WEIGHTS
        for name in OF_WEIGHTS:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-9, err_msg=name)
        numbers = measure(layer.transports)
        assert set(numbers) == {name for name in OF_WEIGHTS if not METRICS[name].at}
        assert all(numbers[name] == found[name] for name in numbers)


@pytest.mark.parametrize("name", ["depth_step", "edge_isometry", "t2_residual", "nonsense"])
def test_metrics_of_anything_else_are_refused(name: str) -> None:
    transports = attention_layers(tiny_checkpoint("llama").model)[0].transports
    message = rf"metrics: expected those of weights, .*head_isometry.*, got '{name}'; pass a walk"
    with pytest.raises(ValueError, match=message):
        measure(transports, ["symmetry", name])


# --- one layer at a time ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")  # type checks look at an item of the mapping
@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("bert", ["encoder.layer.{}.attention.self.value", "encoder.layer.{}.attention.output.dense"]),
        ("gpt2", ["h.{}.attn.c_attn", "h.{}.attn.c_proj"]),
    ],
)
def test_only_the_maps_of_the_layer_that_is_asked_for_are_read(
    family: str, names: list[str], read: list[str], tmp_path: Path
) -> None:
    save(tmp_path / "model", family, head=True, shards=True)
    stream = weight_layers(tmp_path / "model")
    assert read == []
    for index in range(3):
        assert next(stream).index == index
        expected = {f"{name.format(index)}.{kind}" for name in names for kind in ("weight", "bias")}
        assert set(read) == expected
        read.clear()


def test_a_layer_that_is_let_go_of_is_freed(tmp_path: Path) -> None:
    save(tmp_path / "model", "llama", num_hidden_layers=6)
    maps: list[weakref.ref] = []
    for layer in weight_layers(tmp_path / "model"):
        maps += [weakref.ref(layer.transports), weakref.ref(layer.transports.value)]
        assert sum(ref() is not None for ref in maps) == 2, "by reference counts alone"
    assert len(maps) == 12


def test_a_file_that_is_damaged_meanwhile_is_noticed_with_its_layer(tmp_path: Path) -> None:
    save(tmp_path / "model", "llama", shards=True)
    files = [
        {shard_of(tmp_path / "model", f"layers.{n}.self_attn.{name}_proj.weight") for name in "vo"} for n in range(3)
    ]
    (last,) = files[2] - files[1] - files[0]
    stream = weight_layers(tmp_path / "model")
    assert next(stream).index == 0
    last.write_bytes(last.read_bytes()[:-100])
    assert next(stream).index == 1
    with pytest.raises(CheckpointError, match=rf"{last.name} is damaged .*: copy or download it again"):
        next(stream)


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    save(tmp_path / "model", "mpnet")
    before = torch.get_rng_state()
    list(weight_layers(tmp_path / "model"))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.empty(1).device.type == "cpu", "the model is laid out on the meta device, and nothing else is"


# --- refusals -----------------------------------------------------------------------------------------------------


def test_what_is_no_safetensors_file_is_refused_at_the_call(tmp_path: Path) -> None:
    save(tmp_path / "model", "bert")
    weights = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "model" / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ValueError, match=r"source: expected safetensors files, got .*\.bin; cwlib\.open_checkpoint"):
        weight_layers(tmp_path / "model")


@pytest.mark.parametrize("name", ["v_proj.weight", "v_proj.bias", "o_proj.weight", "o_proj.bias"])
def test_a_missing_map_is_named(name: str, tmp_path: Path) -> None:
    save(tmp_path / "model", "llama", attention_bias=True)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    del weights[f"layers.1.self_attn.{name}"]
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    stream = weight_layers(tmp_path / "model")
    assert next(stream).index == 0
    with pytest.raises(CheckpointError, match=rf"weights in .*model lack layers\.1\.self_attn\.{name}: check that"):
        next(stream)


def test_fewer_layers_than_the_config_says(tmp_path: Path) -> None:
    save(tmp_path / "model", "gpt2")
    edit_config(tmp_path / "model", n_layer=4)
    with pytest.raises(CheckpointError, match=r"lack h\.3\.attn\.c_attn\.weight: check that config\.json"):
        list(weight_layers(tmp_path / "model"))


@pytest.mark.parametrize("shards", [False, True])
def test_a_truncated_file_is_refused_at_the_call(shards: bool, tmp_path: Path) -> None:
    save(tmp_path / "model", "qwen2", shards=shards)
    path = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"{path.name} is damaged"):
        weight_layers(tmp_path / "model")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"lacks|no weights"):
        weight_layers(tmp_path / "model")


def test_an_unsupported_model_is_refused_at_the_call(tmp_path: Path) -> None:
    config = AutoConfig.for_model("convbert", num_hidden_layers=1, hidden_size=48, num_attention_heads=4)
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model: .*convbert"):
        weight_layers(tmp_path / "model")
    edit_config(tmp_path / "model", model_type="nonsense")
    with pytest.raises(CheckpointError, match=r"the model of .* could not be laid out"):
        weight_layers(tmp_path / "model")
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        weight_layers(tmp_path / "model")
    with pytest.raises(ValueError, match="source: there is no folder"):
        weight_layers(tmp_path / "nowhere")


def requantise(folder: Path, change: dict[str, torch.Tensor]) -> None:
    """Replace a projection's weight in every layer by others, as quantisation does, and say so in the configuration."""
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("v_proj.weight")]:
        module, shape = name.removesuffix(".weight"), weights.pop(name).shape
        weights |= {f"{module}.{key}": tensor.expand(shape).clone() for key, tensor in change.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})


PACKED, SCALE = torch.ones((), dtype=torch.int32), torch.ones(())


@pytest.mark.parametrize(
    "change",
    [{"qweight": PACKED, "scales": SCALE}, {"weight": SCALE.to(torch.float8_e4m3fn), "weight_scale_inv": SCALE}],
    ids=["packed", "scaled"],
)
def test_quantised_attention_is_refused_at_the_call(change: dict, tmp_path: Path) -> None:
    save(tmp_path / "model", "llama")
    requantise(tmp_path / "model", change)
    with pytest.raises(
        ValueError, match=r"source: expected plain weights, got quantised .*v_proj.*a \.gguf file of it"
    ):
        weight_layers(tmp_path / "model")


def test_integers_are_not_read_as_weights(tmp_path: Path) -> None:
    save(tmp_path / "model", "llama")
    requantise(tmp_path / "model", {"weight": PACKED.to(torch.int8)})
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.v_proj, got torch\.int8; load the model dequantised"):
        list(weight_layers(tmp_path / "model"))


def test_attention_beside_quantised_experts_is_read(tmp_path: Path) -> None:
    model = save(tmp_path / "model", "gpt_oss")
    edit_config(tmp_path / "model", quantization_config={"quant_method": "mxfp4"})
    found = list(weight_layers(tmp_path / "model"))
    assert [layer.path for layer in found] == [layer.path for layer in attention_layers(model)]


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 96}, {"head_dim": 24}, {"num_key_value_heads": 4}, {"num_attention_heads": 8}],
    ids=str,
)
def test_a_config_of_another_shape_is_refused(changes: dict[str, int], tmp_path: Path) -> None:
    save(tmp_path / "model", "llama")
    edit_config(tmp_path / "model", **changes)
    with pytest.raises((ValueError, CheckpointError), match=r"layers\.0\.self_attn"):
        list(weight_layers(tmp_path / "model"))
