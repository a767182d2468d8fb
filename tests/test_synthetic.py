"""Seeded walks have the properties they promise, and no hidden state."""

import numpy as np
import oracles
import pytest
import torch
from oracles import Layer, agree

from cwlib.cores import HeadTransports
from cwlib.edges import EdgeWalk
from cwlib.synthetic import (
    conditioned_walk,
    cycle_walk,
    dependent_walk,
    flat_walk,
    gaussian_transports,
    generator,
    isometric_transports,
    random_measure,
    random_metrics,
    random_orthogonal,
    random_walk,
    sphere_tangent_walk,
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
    measure, metrics = random_measure(3, 4), random_metrics(3, 4, 2)
    made = (
        conditioned_walk(3, measure, 2, isometric=False),
        flat_walk(3, measure, metrics),
        sphere_tangent_walk(60, 3, 1.0)[0],
    )
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert same(first[0], random_walk(3)) and same(first[1], dependent_walk(3))
    assert torch.equal(first[2].output, isometric_transports(3, heads=2, d_model=4).output)
    assert torch.equal(null.output, gaussian_transports(first[2], 3).output)
    assert varied_shapes(3) == varied_shapes(3)
    assert torch.equal(measure, random_measure(3, 4)) and torch.equal(metrics, random_metrics(3, 4, 2))
    again = (
        conditioned_walk(3, measure, 2, isometric=False),
        flat_walk(3, measure, metrics),
        sphere_tangent_walk(60, 3, 1.0)[0],
    )
    for left, right in zip(made, again, strict=True):
        assert torch.equal(left.maps, right.maps) and torch.equal(left.weight, right.weight)


def test_other_seeds_give_other_numbers() -> None:
    assert not same(random_walk(0), random_walk(1))
    transports = random_walk(0).transports
    assert not torch.equal(gaussian_transports(transports, 0).value, gaussian_transports(transports, 1).value)
    left, right = (isometric_transports(s, heads=1, d_model=4).output for s in (0, 1))
    assert not torch.allclose(left, right)
    assert not torch.allclose(random_measure(0, 4), random_measure(1, 4))
    measure = random_measure(0, 4)
    left, right = (conditioned_walk(s, measure) for s in (0, 1))
    assert not torch.allclose(left.maps, right.maps) and not torch.allclose(left.weight, right.weight)


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
    with pytest.raises(ValueError, match=r"groups: .*got 2"):
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


def test_gaussian_null_has_the_shape_and_normal_entries_of_the_layers_own_size() -> None:
    """Mean zero, the root mean square of the layer's entries, the fourth moment of a normal law."""
    rng = generator(1)
    value = torch.rand(3, 64, 128, generator=rng) * 0.4 - 0.1
    output = 5 * torch.randn(6, 128, 64, dtype=torch.float64, generator=rng) + 2
    null = gaussian_transports(HeadTransports(value, output, groups=2), 0)
    assert null.value.shape == value.shape and null.output.shape == output.shape and null.groups == 2
    assert null.value.dtype == null.output.dtype == torch.float64
    for entries, like in ((null.value, value), (null.output, output)):
        size = np.sqrt((like.double().numpy() ** 2).mean())
        assert abs(entries.mean()) < 0.03 * size and abs(entries.std() / size - 1) < 0.03
        assert abs((entries**4).mean() / size**4 - 3) < 0.2
    # value and output are independent draws, not the same numbers twice
    assert abs(np.corrcoef(null.value.flatten(), null.output.flatten()[: null.value.numel()])[0, 1]) < 0.03


def test_gaussian_null_scales_with_the_layer() -> None:
    """The same numbers at the layer's size; a layer of zeros has a null of zeros."""
    like = random_walk(0).transports
    plain, scaled = (
        gaussian_transports(like, 0),
        gaussian_transports(HeadTransports(3 * like.value, like.output / 7), 0),
    )
    agree(scaled.value, 3 * plain.value)
    agree(scaled.output, plain.output / 7)
    silent = gaussian_transports(HeadTransports(0 * like.value, like.output), 0)
    assert (silent.value == 0).all() and torch.equal(silent.output, plain.output)


# --- measures, metrics, rotations ------------------------------------------------------------------------------------


def test_random_measures_are_positive_probabilities() -> None:
    for seed in range(20):
        measure = random_measure(seed, 2 + seed)
        agree(measure.sum(), 1.0)
        assert (measure > 0).all() and measure.max() / measure.min() <= 4
    assert random_measure(0, 500).max() / random_measure(0, 500).min() > 3.5, "the whole range is used"


def test_random_metrics_are_positive_definite() -> None:
    for seed in range(10):
        metrics = random_metrics(seed, 5, 4).numpy()
        assert metrics.shape == (5, 4, 4)
        agree(metrics, metrics.transpose(0, 2, 1))
        values = np.linalg.eigvalsh(metrics)
        assert values.min() >= 0.4 and values.max() <= 2.5
        assert np.ptp(values) > 1
        assert abs(metrics[0] - metrics[1]).max() > 0.1


def test_random_orthogonal_matrices_are_uniform_on_the_whole_group() -> None:
    drawn = random_orthogonal(0, 4000, 3).numpy()
    agree(drawn.transpose(0, 2, 1) @ drawn, np.broadcast_to(np.eye(3), (4000, 3, 3)))
    # half are reflections; entries have mean 0 and square 1/3, and no memory of a fixed rotation
    assert abs(np.mean(np.linalg.det(drawn) > 0) - 0.5) < 0.04
    assert abs(drawn.mean(0)).max() < 0.04 and abs((drawn**2).mean(0) - 1 / 3).max() < 0.02
    assert abs(np.trace(drawn, axis1=1, axis2=2).mean()) < 0.06


# --- walks that meet conditions --------------------------------------------------------------------------------------


def held(walk: EdgeWalk, measure: np.ndarray, metrics: np.ndarray, scale: float = 1.0) -> dict[str, bool]:
    """Conditions S, R and both halves of M from their definitions, edge by edge."""
    weight = walk.effective_walk().numpy()
    n, d = len(measure), walk.d_model
    maps = {(i, j): walk.transport(i, j).numpy() for i, j in walk.support.nonzero().tolist()}
    return {
        "stochastic": bool(abs(weight.sum(1) - 1).max() < 1e-10),
        "reversible": all(
            abs(measure[i] * weight[i, j] - measure[j] * weight[j, i]) < 1e-10 for i in range(n) for j in range(n)
        ),
        "isometric": all(
            abs(m.T @ metrics[i] @ m - scale**2 * metrics[j]).max() < 1e-9 for (i, j), m in maps.items()
        ),
        "inverse": all(abs(m @ maps[j, i] - scale**2 * np.eye(d)).max() < 1e-9 for (i, j), m in maps.items()),
    }  # fmt: skip


SWITCHES = ["stochastic", "reversible", "isometric", "inverse"]


@pytest.mark.parametrize("off", [[], *([s] for s in SWITCHES), ["reversible", "inverse"], SWITCHES])
@pytest.mark.parametrize("curved", [False, True])
def test_conditioned_walk_breaks_exactly_what_is_switched_off(off: list[str], curved: bool) -> None:
    for seed in range(4):
        tokens, d, scale = 3 + seed, 2 + seed % 2, (1.0, 0.5)[seed % 2]
        measure = random_measure(seed, tokens)
        metrics = random_metrics(seed, tokens, d) if curved else None
        walk = conditioned_walk(seed, measure, d, metrics, scale, **dict.fromkeys(off, False))
        assert walk.support.all() and walk.d_model == d
        flat = np.broadcast_to(np.eye(d), (tokens, d, d))
        found = held(walk, measure.numpy(), metrics.numpy() if curved else flat, scale)
        assert found == {name: name not in off for name in SWITCHES}
        if "stochastic" not in off:  # the circulation leaves the law as it is
            agree(measure.numpy() @ walk.effective_walk().numpy(), measure)


def test_conditioned_walk_takes_a_measure_of_any_size() -> None:
    measure = random_measure(0, 4)
    agree(conditioned_walk(0, 7 * measure).to_dense(), conditioned_walk(0, measure).to_dense())


def test_flat_walk_goes_between_frames() -> None:
    measure = random_measure(0, 4)
    frames = torch.eye(3, dtype=torch.float64) + 0.3 * random_metrics(0, 4, 3)
    walk = flat_walk(0, measure, frames)
    for i in range(4):
        for j in range(4):
            agree(walk.transport(i, j), frames[i].numpy() @ np.linalg.inv(frames[j].numpy()))
    found = held(walk, measure.numpy(), np.linalg.inv(frames.numpy() @ frames.numpy().transpose(0, 2, 1)))
    assert all(found.values()), found


@pytest.mark.parametrize("tokens", [3, 4, 7])
def test_cycle_walk(tokens: int) -> None:
    turn = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
    walk = cycle_walk(tokens, turn)
    weight = walk.effective_walk().numpy()
    for i in range(tokens):
        for j in range(tokens):
            assert weight[i, j] == (0.5 if (i - j) % tokens in (1, tokens - 1) else 0.0)
            if weight[i, j]:
                special = {(0, tokens - 1): turn.numpy(), (tokens - 1, 0): np.linalg.inv(turn.numpy())}
                agree(walk.transport(i, j), special.get((i, j), np.eye(2)))


def test_sphere_tangent_walk_is_a_connection_laplacian() -> None:
    """S, R and M hold to rounding; every point has neighbours, none is its own."""
    walk, measure = sphere_tangent_walk(120, seed=1, radius=0.8)
    assert walk.tokens == len(measure) == 120 and walk.d_model == 2
    agree(measure.sum(), 1.0)
    found = held(walk, measure.numpy(), np.broadcast_to(np.eye(2), (120, 2, 2)))
    assert all(found.values()), found
    assert not walk.support.diagonal().any()
    # about a quarter of r^2 of the sphere lies within r of a point
    agree(walk.support.double().sum() / 120**2, 0.8**2 / 4, rtol=0.15)


WRONG = {
    "two tokens": (lambda: conditioned_walk(0, random_measure(0, 2)), ("measure", "at least 3 tokens", "got 2")),
    "one dimension": (lambda: conditioned_walk(0, random_measure(0, 3), 1), ("d_model", "2 dimensions", "got 3 and 1")),
    "too few metrics": (
        lambda: conditioned_walk(0, random_measure(0, 4), 3, random_metrics(0, 3, 3)),
        ("expected shape (4, 3, 3)", "got (3, 3, 3)"),
    ),
    "too few frames": (
        lambda: flat_walk(0, random_measure(0, 4), random_orthogonal(0, 3, 3)),
        ("frames", "expected shape (4, 3, 3)", "got (3, 3, 3)"),
    ),
    "points too far apart": (lambda: sphere_tangent_walk(20, radius=0.1), ("radius", "two neighbours", "radius 0.1")),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
