"""Seeded walks have the properties they promise, and no hidden state."""

import numpy as np
import oracles
import pytest
import torch
from oracles import Layer, agree

from cwlib.cores import HeadTransports
from cwlib.synthetic import (
    dependent_walk,
    gaussian_transports,
    generator,
    isometric_transports,
    random_walk,
    varied_shapes,
)
from cwlib.walk import ConnectionWalk


def tensors(walk: ConnectionWalk) -> tuple[torch.Tensor, ...]:
    return walk.attention, walk.value, walk.output


def same(left: ConnectionWalk, right: ConnectionWalk) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(left), tensors(right), strict=True))


# --- seeds -----------------------------------------------------------------------------------------------------------


def test_the_seed_fixes_every_number_and_leaves_global_state_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = random_walk(3, groups=1), dependent_walk(3), isometric_transports(3, heads=2, d_model=4)
    null = gaussian_transports(first[2], 3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert same(first[0], random_walk(3)) and same(first[1], dependent_walk(3))
    assert torch.equal(first[2].output, isometric_transports(3, heads=2, d_model=4).output)
    assert torch.equal(null.output, gaussian_transports(first[2], 3).output)
    assert varied_shapes(3) == varied_shapes(3)


def test_other_seeds_give_other_numbers() -> None:
    assert not same(random_walk(0), random_walk(1))
    transports = random_walk(0).transports
    assert not torch.equal(gaussian_transports(transports, 0).value, gaussian_transports(transports, 1).value)
    left, right = (isometric_transports(s, heads=1, d_model=4).output for s in (0, 1))
    assert not torch.allclose(left, right)


def test_generators_are_independent() -> None:
    one, other = generator(5), generator(5)
    torch.randn(3, generator=one)
    assert not torch.equal(torch.randn(3, generator=one), torch.randn(3, generator=other))


# --- random walks ----------------------------------------------------------------------------------------------------


def test_shape_of_a_random_walk() -> None:
    walk = random_walk(0, heads=6, tokens=5, d_model=7, d_head=2, groups=3, sources=4)
    assert walk.attention.shape == (6, 5, 4) and walk.value.shape == (2, 2, 7) and walk.output.shape == (6, 7, 2)
    assert walk.groups == 3 and walk.constant is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_random_walks_are_valid_in_every_precision(dtype: torch.dtype) -> None:
    for seed in range(30):
        walk = random_walk(seed, causal=seed % 2 == 0, dtype=dtype, **varied_shapes(seed))
        assert {x.dtype for x in tensors(walk)} == {dtype}


def test_causal_attention_looks_back_only() -> None:
    walk = random_walk(0, causal=True)
    assert walk.is_causal and not random_walk(0).is_causal
    agree(walk.attention.triu(1), np.zeros((3, 6, 6)))
    assert (walk.attention[:, torch.ones(6, 6).tril().bool()] > 0).all()
    agree(walk.attention[:, 0, 0], np.ones(3))


def test_heads_that_do_not_divide_into_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"groups=2"):
        random_walk(0, heads=3, groups=2)


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_dependent_walk_has_exactly_the_rank_it_names(rank: int) -> None:
    for seed in range(5):
        walk = dependent_walk(seed, heads=4, rank=rank)
        matrix = oracles.realigned(Layer(*(x.numpy() for x in tensors(walk))))
        assert np.linalg.matrix_rank(matrix, tol=1e-10) == rank


def test_varied_shapes_vary_and_fit() -> None:
    shapes = [varied_shapes(seed) for seed in range(60)]
    assert len({tuple(s.values()) for s in shapes}) > 40
    assert {s["groups"] for s in shapes} == {1, 2}
    assert {s["tokens"] for s in shapes} == set(range(2, 9))
    assert {s["heads"] for s in shapes} == {2, 4, 6}
    assert {s["d_head"] for s in shapes} == set(range(1, 6))
    assert {s["d_model"] for s in shapes} == set(range(3, 13))
    assert any(s["d_head"] > s["d_model"] for s in shapes) and any(s["heads"] > s["tokens"] ** 2 for s in shapes)
    for seed, shape in enumerate(shapes):
        random_walk(seed, **shape)


# --- transports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_isometric_transports_are_scaled_orthogonal_matrices(scale: float) -> None:
    transports = isometric_transports(4, heads=3, d_model=5, scale=scale)
    for h in range(3):
        t = transports.output[h] @ transports.value[h]
        agree(t.T @ t, scale**2 * np.eye(5))
    assert not torch.allclose(transports.output[0], transports.output[1])


def test_gaussian_null_has_the_shape_and_standard_normal_entries() -> None:
    like = HeadTransports(torch.zeros(3, 64, 128), torch.zeros(6, 128, 64), groups=2)
    null = gaussian_transports(like, 0)
    assert null.value.shape == like.value.shape and null.output.shape == like.output.shape and null.groups == 2
    assert null.value.dtype == null.output.dtype == torch.float64
    for entries in (null.value, null.output):
        assert abs(entries.mean()) < 0.03 and abs(entries.std() - 1) < 0.03
        assert abs((entries**4).mean() - 3) < 0.2
    # value and output are independent draws, not the same numbers twice
    assert abs(np.corrcoef(null.value.flatten(), null.output.flatten()[: null.value.numel()])[0, 1]) < 0.03
