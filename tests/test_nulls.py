"""Null models change what they say and nothing else."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cwlib.nulls import KEEP_W, null_layers, shuffled_heads, without_first_token
from cwlib.synthetic import random_walk
from cwlib.walk import ConnectionWalk


@dataclass(frozen=True)
class Captured:
    index: int
    walk: ConnectionWalk
    field: torch.Tensor


def stack(causal: bool = True) -> list[Captured]:
    walks = [random_walk(seed, heads=4, tokens=7, groups=2, causal=causal) for seed in range(3)]
    return [Captured(i, w, torch.full((7, 8), float(i), dtype=torch.float64)) for i, w in enumerate(walks)]


def test_shuffled_rows_are_those_of_the_heads_in_another_order() -> None:
    attention = random_walk(0, heads=5, tokens=9).attention
    dealt = shuffled_heads(attention, 3)
    orders = set()
    for i in range(9):
        rows, given = attention[:, i].tolist(), dealt[:, i].tolist()
        orders.add(tuple(rows.index(row) for row in given))
        assert sorted(rows) == sorted(given)
    assert len(orders) > 3, "every token has an order of its own"
    torch.testing.assert_close(dealt.mean(0), attention.mean(0))
    assert torch.equal(dealt, shuffled_heads(attention, 3)) and not torch.equal(dealt, shuffled_heads(attention, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_without_the_first_token_is_renormalised(dtype: torch.dtype) -> None:
    attention = random_walk(1, heads=3, tokens=6, causal=True).attention.to(dtype)
    left = without_first_token(attention).numpy()
    given = attention.double().numpy()
    for h in range(3):
        for i in range(1, 6):
            kept = given[h, i, 1:]
            np.testing.assert_allclose(left[h, i - 1], kept / kept.sum(), rtol=1e-12)
    ConnectionWalk(torch.from_numpy(left), torch.ones(3, 1, 2), torch.ones(3, 2, 1))  # rows sum to one


def test_a_token_that_attended_to_the_first_alone_keeps_to_itself() -> None:
    attention = torch.zeros(1, 4, 4)
    attention[0, :, 0] = 1.0
    assert torch.equal(without_first_token(attention)[0], torch.eye(3, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 4, 5)])
def test_too_few_tokens_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"attention: expected at least three tokens.*got {shape[1]} x {shape[2]}"):
        without_first_token(torch.ones(shape) / shape[2])


@pytest.mark.parametrize("source", ["trained", "init"])
def test_other_sources_change_nothing(source: str) -> None:
    layers = stack()
    assert [layer for _, layer in null_layers(source, 0, layers, {})] == layers


@pytest.mark.parametrize("source", ["gaussian", "shuffled", "sinkless"])
def test_a_null_changes_what_it_names(source: str) -> None:
    layers, known = stack(), {}
    found = list(null_layers(source, 2, layers, known))
    assert [index for index, _ in found] == [0, 1, 2]
    for layer, (_, null) in zip(layers, found, strict=True):
        same_maps = torch.equal(null.walk.value, layer.walk.value) and torch.equal(null.walk.output, layer.walk.output)
        same_attention = null.walk.attention.shape == layer.walk.attention.shape and torch.equal(
            null.walk.attention, layer.walk.attention
        )
        assert same_maps == (source != "gaussian") and same_attention == (source == "gaussian")
        if source in KEEP_W:
            torch.testing.assert_close(null.walk.effective_walk(), layer.walk.effective_walk())
            assert torch.equal(null.field, layer.field)
        else:
            assert null.walk.n_src == 6 and torch.equal(null.field, layer.field[1:])
    # a layer knows the one before it, changed alike, and no more of the past
    assert found[0][1].previous is None and found[2][1].previous.walk is found[1][1].walk
    assert found[2][1].previous.previous is None
    assert sorted(known) == ([0, 1, 2] if source == "gaussian" else [])


def test_gaussian_maps_are_drawn_once_per_layer() -> None:
    known: dict = {}
    first = [null.walk.value for _, null in null_layers("gaussian", 0, stack(), known)]
    again = [null.walk.value for _, null in null_layers("gaussian", 0, stack(), known)]
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])
