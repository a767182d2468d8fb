"""Rounded copies of checkpoints: every number against a naive reading of the formats, and what must stay as it is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cwlib.checkpoints import Checkpoint, tiny_checkpoint
from cwlib.quantise import SCHEMES, quantised

F16, F32 = np.float16, np.float32


def q4_1(block: np.ndarray) -> np.ndarray:
    """Sixteen levels from the least to the largest entry."""
    d = (block.max() - block.min()) / F32(15)
    levels = [min(15, int((x - block.min()) / d + F32(0.5))) if d else 0 for x in block]
    return np.array([F32(F16(d)) * F32(q) + F32(F16(block.min())) for q in levels])


def q5_0(block: np.ndarray) -> np.ndarray:
    """The levels -16 .. 15, of which -16 is the entry that is largest in magnitude."""
    d = max(block, key=abs) / F32(-16)
    levels = [min(31, int(x / d + F32(16.5))) - 16 if d else 0 for x in block]
    return np.array([F32(F16(d)) * F32(q) for q in levels])


def q8_0(block: np.ndarray) -> np.ndarray:
    """The levels -127 .. 127."""
    d = max(abs(block)) / F32(127)
    levels = [int(np.copysign(np.floor(abs(x / d) + 0.5), x)) if d else 0 for x in block]
    return np.array([F32(F16(d)) * F32(q) for q in levels])


FORMATS = {"q4_1": q4_1, "q5_0": q5_0, "q8_0": q8_0}


def naive(rows: np.ndarray, scheme: str) -> np.ndarray:
    """Every row on its own, in blocks of 32 entries."""
    return np.array([np.concatenate([FORMATS[scheme](b) for b in row.reshape(-1, 32)]) for row in rows])


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in checkpoint.model.state_dict().items()}


def assert_rounded(before: Tensor, after: Tensor, scheme: str) -> None:
    """A quotient that lies half way between two levels may go either way in its last digit."""
    expected, step = naive(before.numpy(), scheme), np.ptp(before.numpy()) / 15
    apart = np.abs(after.numpy() - expected)
    assert (apart > 1e-6).mean() < 1e-3 and apart.max() <= step
    assert not torch.equal(before, after)


@pytest.fixture(scope="module")
def bert() -> Checkpoint:
    return tiny_checkpoint("bert", hidden_size=64)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear_maps_and_word_embeddings_are_rounded_and_nothing_else(scheme: str, bert: Checkpoint) -> None:
    before, after = weights(bert), weights(quantised(bert, scheme))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    linear = {f"encoder.layer.{n}.{part}.weight" for n in range(3) for part in (
        "attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
        "intermediate.dense", "output.dense",
    )}  # fmt: skip
    assert changed == linear | {"pooler.dense.weight", "embeddings.word_embeddings.weight"}
    for name in changed:
        assert_rounded(before[name], after[name], "q8_0" if "word_embeddings" in name else scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_checkpoint_itself_is_not_changed(scheme: str) -> None:
    checkpoint = tiny_checkpoint("llama", hidden_size=64, head_dim=16)
    before, model = weights(checkpoint), checkpoint.model
    rounded = quantised(checkpoint, scheme)
    assert checkpoint.model is model and rounded.model is not model
    for name, value in weights(checkpoint).items():
        assert torch.equal(value, before[name]), name
    assert rounded.name == f"{checkpoint.name}@{scheme}" and rounded.precision == scheme.upper()
    assert checkpoint.precision == "float32"
    same = ("tokenizer", "sha256", "device", "dtype", "kind", "parameters")
    assert [getattr(rounded, name) for name in same] == [getattr(checkpoint, name) for name in same]
    assert not rounded.model.training


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gpt2_is_rounded_along_the_inputs_of_its_maps(scheme: str) -> None:
    """Conv1D holds (input, output); a row of a linear map is what one output reads."""
    checkpoint = tiny_checkpoint("gpt2", hidden_size=64)
    before, after = weights(checkpoint), weights(quantised(checkpoint, scheme))
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        whole = f"h.1.{name}.weight"
        assert_rounded(before[whole].T, after[whole].T, scheme)
    for name in ("wpe.weight", "h.1.attn.c_attn.bias", "h.1.ln_1.weight", "ln_f.bias"):
        assert torch.equal(before[name], after[name]), name
    assert_rounded(before["wte.weight"], after["wte.weight"], "q8_0")


def test_rows_that_are_no_whole_number_of_blocks_stay() -> None:
    checkpoint = tiny_checkpoint("bert")  # hidden size 48: of its maps only those back from 96 have whole blocks
    before, after = weights(checkpoint), weights(quantised(checkpoint, "q4_1"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"encoder.layer.{n}.output.dense.weight" for n in range(3)}
    for name in changed:
        assert_rounded(before[name], after[name], "q4_1")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_weight_moves_by_at_most_a_step_of_its_block(scheme: str, bert: Checkpoint) -> None:
    name = "encoder.layer.0.attention.self.value.weight"
    before, after = (weights(c)[name].reshape(-1, 32) for c in (bert, quantised(bert, scheme)))
    width = before.amax(1) - before.amin(1) if scheme == "q4_1" else before.abs().amax(1)
    # half a step; at the far end of q5_0, which has no level +16, a whole one
    most = width / 15 / 2 if scheme == "q4_1" else width / 16
    ends = 3e-3 * before.abs().amax(1)  # scale and least entry are kept in float16
    assert ((after - before).abs().amax(1) <= most + ends).all()
    levels = {"q4_1": 16, "q5_0": 32}[scheme]
    assert max(len(block.unique()) for block in after) <= levels
    assert max(len(block.unique()) for block in before) == 32


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("value", [0.0, 0.5, -0.25])
def test_constant_blocks_survive(scheme: str, value: float) -> None:
    checkpoint = tiny_checkpoint("bert", hidden_size=64)
    name = "encoder.layer.0.attention.self.value"
    with torch.no_grad():
        checkpoint.model.get_submodule(name).weight.fill_(value)
    assert torch.equal(quantised(checkpoint, scheme).model.get_submodule(name).weight, torch.full((64, 64), value))


def test_five_bits_are_closer_than_four_and_eight_closer_still(bert: Checkpoint) -> None:
    def shift(rounded: Checkpoint, name: str) -> float:
        before, after = weights(bert)[name], weights(rounded)[name]
        return float((after - before).norm() / before.norm())

    name = "encoder.layer.0.output.dense.weight"
    four, five = (shift(quantised(bert, scheme), name) for scheme in SCHEMES)
    eight = shift(quantised(bert, "q4_1"), "embeddings.word_embeddings.weight")
    assert 0.1 > four > five > 5 * eight > 0


def test_wrong_inputs_are_refused(bert: Checkpoint) -> None:
    with pytest.raises(ValueError, match="scheme: expected one of q4_1, q5_0, got 'q8_0'"):
        quantised(bert, "q8_0")
    for dtype in ("float64", "bfloat16"):
        with pytest.raises(ValueError, match=f"checkpoint: expected a model in float32, got torch.{dtype}"):
            quantised(tiny_checkpoint("bert", hidden_size=64, dtype=dtype), "q4_1")
    thin = replace(tiny_checkpoint("bert", intermediate_size=80), name="thin")
    with pytest.raises(ValueError, match="checkpoint: no linear map of thin has rows of a multiple of 32 entries"):
        quantised(thin, "q4_1")
