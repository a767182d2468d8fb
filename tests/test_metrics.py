"""Every empirical quantity against its definition, its known answers, its symmetries and its registry entry."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import oracles
import pytest
import torch
from oracles import Layer, agree
from torch import Tensor

from cwlib import laplacian, metrics
from cwlib.capture import layers
from cwlib.checkpoints import tiny_checkpoint
from cwlib.cores import HeadTransports
from cwlib.measures import stochastic_walk, uniform_measure
from cwlib.metrics import METRICS, measure
from cwlib.synthetic import dependent_walk, gaussian_transports, isometric_transports, random_walk
from cwlib.walk import ConnectionWalk

kinds = pytest.mark.parametrize("kind", oracles.KINDS)
SQUARE = [kind for kind, fixed in oracles.KINDS.items() if "n_dst" not in fixed]
square_kinds = pytest.mark.parametrize("kind", SQUARE)
SEEDS = range(3)
F64 = torch.float64


def walk_of(layer: Layer) -> ConnectionWalk:
    return ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups)


def pairs(kind: str) -> list[tuple[Layer, ConnectionWalk]]:
    """Seeded layers of one kind, dense and lazy."""
    return [(layer, walk_of(layer)) for layer in (oracles.instance(kind, seed) for seed in SEEDS)]


def partner(layer: Layer, seed: int) -> Layer:
    """Another layer of the same shape, with its own attention and transports."""
    rng = np.random.default_rng([11, seed])
    attention = layer.attention * rng.exponential(size=layer.attention.shape)
    attention /= attention.sum(2, keepdims=True)
    return Layer(attention, rng.normal(size=layer.value.shape), rng.normal(size=layer.output.shape), layer.groups)


def one_head(matrix: np.ndarray | Tensor, attention: Tensor | None = None) -> ConnectionWalk:
    """A single head whose transport is the given matrix."""
    matrix = torch.as_tensor(matrix, dtype=F64)
    attention = random_walk(0, heads=1, tokens=5).attention if attention is None else attention
    return ConnectionWalk(attention, torch.eye(len(matrix), dtype=F64)[None], matrix[None])


def rotation(angle: float) -> np.ndarray:
    return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])


def gaussian(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng([13, seed]).normal(size=shape)


def uniform(tokens: int) -> Tensor:
    return torch.full((tokens, tokens), 1 / tokens, dtype=F64)


def cycle(tokens: int) -> Tensor:
    return torch.eye(tokens, dtype=F64).roll(1, 0)


# --- attention graph -------------------------------------------------------------------------------------------------


@square_kinds
@pytest.mark.parametrize("gauge", ["mean", "norm"])
def test_attention_graph_metrics_against_oracles(kind: str, gauge: str) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        matrix = stochastic_walk(walk, gauge)
        dense = np.array([row / row.sum() for row in oracles.walk(layer, gauge)])
        after = partner(layer, seed)
        later = stochastic_walk(walk_of(after), gauge)
        dense_later = np.array([row / row.sum() for row in oracles.walk(after, gauge)])
        pi = oracles.measure(dense)
        agree(metrics.depth_step(matrix, later), oracles.depth_step(dense, dense_later))
        agree(metrics.spectral_step(matrix, later), oracles.spectral_step(dense, dense_later), atol=1e-10)
        agree(metrics.reversibility_defect(matrix), oracles.reversibility_defect(dense, pi))
        agree(metrics.entropy_rate(matrix), oracles.entropy_rate(dense, pi))
        other = np.random.default_rng(seed).dirichlet(np.ones(len(dense)))
        agree(metrics.entropy_rate(matrix, torch.from_numpy(other)), oracles.entropy_rate(dense, other))
        if len(dense) > 1:
            agree(metrics.spectral_gap(matrix), oracles.spectral_gap(dense), atol=1e-10)
        else:
            assert np.isnan(metrics.spectral_gap(matrix))


@pytest.mark.parametrize("tokens", [9, 10, 14])
@pytest.mark.parametrize("causal", [True, False])
def test_sink_mass_against_oracle(tokens: int, causal: bool) -> None:
    matrix = random_walk(tokens, tokens=tokens, causal=causal).effective_walk()
    agree(metrics.sink_mass(matrix), oracles.sink_mass(matrix.numpy()))
    agree(metrics.sink_mass(matrix), matrix[8:, 0].mean())


def test_known_attention_graphs() -> None:
    for n in (2, 5, 9):
        agree(metrics.entropy_rate(uniform(n)), np.log(n))
        agree(metrics.reversibility_defect(uniform(n)), 0.0)
        agree(metrics.spectral_gap(uniform(n)), 1.0)
        agree(metrics.depth_step(uniform(n), uniform(n)), 0.0)
        agree(metrics.spectral_step(uniform(n), uniform(n)), 0.0)
        agree(metrics.entropy_rate(cycle(n)), 0.0)
        agree(metrics.depth_step(uniform(n), cycle(n)), 1 - 1 / n)
    agree(metrics.reversibility_defect(cycle(3)), 1.0)
    agree(metrics.reversibility_defect(cycle(6)), 1.0)
    # back and forth: eigenvalues 1, -1
    agree(metrics.spectral_gap(cycle(2)), 2.0)
    # standing still: every token is a class of its own, and W has the eigenvalue one n times
    still = torch.eye(4, dtype=F64)
    agree(metrics.spectral_gap(still), 0.0)
    agree(metrics.entropy_rate(still), 0.0)
    agree(metrics.reversibility_defect(still), 0.0)
    agree(metrics.depth_step(still, cycle(4)), 1.0)
    # cos(2 pi k/4) = 1, 0, 0, -1 against 1, 1, 1, 1
    agree(metrics.spectral_step(still, cycle(4)), 1.0)
    agree(metrics.spectral_step(uniform(4), still), 0.75)


def test_sink() -> None:
    matrix = torch.zeros(10, 10, dtype=F64)
    matrix[:, 0] = 1
    assert metrics.sink_mass(matrix) == 1
    agree(metrics.entropy_rate(matrix), 0.0)
    agree(metrics.sink_mass(cycle(10)), 0.0)
    # only tokens 8 and 9 count
    matrix[8] = torch.eye(10, dtype=F64)[3]
    agree(metrics.sink_mass(matrix), 0.5)
    agree(metrics.sink_mass(uniform(9)), 1 / 9)
    assert np.isnan(metrics.sink_mass(uniform(8)))


def test_entropy_rate_weighs_tokens_with_the_stationary_law() -> None:
    # token 0 decides among two, token 1 does not; pi = (2/3, 1/3)
    matrix = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=F64)
    agree(metrics.entropy_rate(matrix), 2 / 3 * np.log(2))
    agree(metrics.entropy_rate(matrix, uniform_measure(2)), np.log(2) / 2)


def test_causal_graph_is_measured_uniformly() -> None:
    matrix = random_walk(0, causal=True).effective_walk()
    agree(metrics.entropy_rate(matrix), metrics.entropy_rate(matrix, uniform_measure(6)))
    agree(metrics.reversibility_defect(matrix), oracles.reversibility_defect(matrix.numpy(), np.full(6, 1 / 6)))


def test_attention_graph_metrics_do_not_depend_on_the_order_of_tokens() -> None:
    for _, walk in pairs("zeros"):
        matrix, later = walk.effective_walk(), walk.effective_walk("norm")
        later = later / later.sum(1, keepdim=True)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(matrix)))
        turned, turned_later = matrix[order][:, order], later[order][:, order]
        for name in ("reversibility_defect", "spectral_gap", "entropy_rate"):
            agree(getattr(metrics, name)(turned), getattr(metrics, name)(matrix))
        for name in ("depth_step", "spectral_step"):
            step = getattr(metrics, name)
            agree(step(turned, turned_later), step(matrix, later))
            agree(step(matrix, later), step(later, matrix))


# --- operators and transports ----------------------------------------------------------------------------------------


@kinds
def test_walk_metrics_against_oracles(kind: str) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        agree(metrics.schmidt_participation(walk), oracles.schmidt_participation(layer))
        # the square is accurate to rounding, its root to the root of it
        agree(metrics.single_walk_error(walk) ** 2, oracles.single_walk_error(layer) ** 2, atol=1e-13)
        agree(metrics.edge_isometry(walk), oracles.edge_isometry(layer), rtol=1e-9)
        after = partner(layer, seed)
        agree(metrics.operator_cosine(walk, walk_of(after)), oracles.operator_cosine(layer, after))
        assert 1 - 1e-12 <= metrics.schmidt_participation(walk) <= walk.heads + 1e-12
        assert 0 <= metrics.single_walk_error(walk) < 1
        assert 0 < metrics.edge_isometry(walk) <= 1 + 1e-12


@kinds
def test_transport_metrics_against_oracles(kind: str) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        transports, field = walk.transports, gaussian(seed, 7, walk.d_model)
        agree(metrics.head_isometry(transports), oracles.head_isometry(layer))
        agree(metrics.sum_isometry(transports), oracles.sum_isometry(layer), rtol=1e-9)
        agree(metrics.symmetry(transports), oracles.symmetry(layer))
        agree(metrics.identity_alignment(transports), oracles.identity_alignment(layer))
        agree(metrics.norm_cv(transports, torch.from_numpy(field)), oracles.norm_cv(layer, field), atol=1e-11)
        if walk.d_model > 1:  # in one dimension all cosines are +-1
            agree(metrics.angle_correlation(transports, torch.from_numpy(field)),
                  oracles.angle_correlation(layer, field), rtol=1e-9)  # fmt: skip
        for isometry in (*metrics.head_isometry(transports).tolist(), metrics.sum_isometry(transports)):
            assert 0 < isometry <= 1 + 1e-9
        assert -1e-12 <= metrics.symmetry(transports) <= 1 + 1e-12
        assert abs(metrics.identity_alignment(transports)) <= 1 + 1e-12


@square_kinds
def test_holonomy_defect_against_oracle(kind: str) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        edges = set(oracles.support(layer))
        closed = [(i, j, k) for i, j in edges for k in range(walk.n_src) if {(j, k), (i, k)} <= edges]
        triangles = np.random.default_rng(seed).permutation(sorted(closed))[:12]
        defect = metrics.holonomy_defect(walk, torch.from_numpy(triangles))
        agree(defect, oracles.holonomy_defect(layer, triangles), atol=1e-11)
        assert -1e-12 <= defect <= 1
        sampled = metrics.sample_triangles(walk)
        if len(sampled):
            agree(metrics.holonomy_defect(walk), oracles.holonomy_defect(layer, sampled[:256]), atol=1e-11)
        else:
            assert np.isnan(metrics.holonomy_defect(walk))


def test_low_precision_is_measured_in_float64() -> None:
    low = random_walk(0, heads=4, tokens=10, d_model=16, d_head=4, groups=2, dtype=torch.bfloat16)
    layer = Layer(*(x.double().numpy() for x in (low.attention, low.value, low.output)), 2)
    field = torch.randn(10, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    agree(metrics.schmidt_participation(low), oracles.schmidt_participation(layer))
    agree(metrics.edge_isometry(low), oracles.edge_isometry(layer))
    agree(metrics.norm_cv(low.transports, field), oracles.norm_cv(layer, field.double().numpy()))
    agree(metrics.angle_correlation(low.transports, field), oracles.angle_correlation(layer, field.double().numpy()))
    agree(metrics.symmetry(low.transports), oracles.symmetry(layer))


# --- known answers ---------------------------------------------------------------------------------------------------


def test_operator_cosine_of_known_pairs() -> None:
    walk = random_walk(0)
    negated = ConnectionWalk(walk.attention, -walk.value, walk.output)
    agree(metrics.operator_cosine(walk, walk), 1.0)
    agree(metrics.operator_cosine(walk, negated), -1.0)
    scaled = ConnectionWalk(walk.attention, 7 * walk.value, walk.output)
    agree(metrics.operator_cosine(walk, scaled), 1.0)
    attention = random_walk(0, heads=1, tokens=5).attention
    agree(metrics.operator_cosine(one_head(np.eye(2), attention), one_head(rotation(np.pi / 2), attention)), 0.0)
    angle = 0.3
    agree(metrics.operator_cosine(one_head(np.eye(2), attention), one_head(rotation(angle), attention)), np.cos(angle))


def test_one_head_is_one_walk() -> None:
    for _, walk in pairs("one head"):
        agree(metrics.schmidt_participation(walk), 1.0)
        assert metrics.single_walk_error(walk) == 0


def test_parallel_heads_are_one_walk() -> None:
    """Equal attention: the transports add up to one. Equal transports: the attention does."""
    walk = random_walk(0, heads=3)
    same_attention = ConnectionWalk(walk.attention[:1].repeat(3, 1, 1), walk.value, walk.output)
    same_transport = ConnectionWalk(walk.attention, walk.value[:1], walk.output[:1].repeat(3, 1, 1), groups=3)
    for parallel in (same_attention, same_transport):
        agree(metrics.schmidt_participation(parallel), 1.0)
        agree(metrics.single_walk_error(parallel), 0.0, atol=1e-7)
    agree(metrics.holonomy_defect(same_transport), metrics.holonomy_defect(one_head(
        walk.output[0] @ walk.value[0], walk.attention[:1])))  # fmt: skip


def test_heads_orthogonal_in_attention_and_transport_all_count() -> None:
    heads = 4
    attention = torch.stack([torch.eye(heads, dtype=F64).roll(h, 0) for h in range(heads)])
    frame = torch.eye(heads, dtype=F64)
    walk = ConnectionWalk(attention, frame[:, None, :], frame[:, :, None])
    agree(metrics.schmidt_participation(walk), heads)
    agree(metrics.single_walk_error(walk), np.sqrt(1 - 1 / heads))
    agree(metrics.edge_isometry(walk), 1.0)
    agree(metrics.sum_isometry(walk.transports), 1.0)  # the sum is the identity
    agree(metrics.identity_alignment(walk.transports), 1.0)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_dependent_heads_count_at_most_their_rank(rank: int) -> None:
    walk = dependent_walk(0, heads=4, rank=rank)
    assert 1 - 1e-12 <= metrics.schmidt_participation(walk) <= rank + 1e-9
    assert metrics.single_walk_error(walk) <= np.sqrt(1 - 1 / rank) + 1e-7


def test_isometric_heads() -> None:
    transports = isometric_transports(0, heads=3, d_model=6, scale=0.2)
    agree(metrics.head_isometry(transports), np.ones(3))
    assert metrics.sum_isometry(transports) < 0.9, "isometries that differ do not add up to one (T6)"
    single = isometric_transports(0, heads=1, d_model=6, scale=0.2)
    agree(metrics.sum_isometry(single), 1.0)
    field = torch.from_numpy(gaussian(0, 9, 6))
    agree(metrics.norm_cv(single, field), 0.0)
    agree(metrics.angle_correlation(single, field), 1.0)


def test_partial_isometries_attain_the_bound_and_nothing_else_does() -> None:
    left, right = np.linalg.qr(gaussian(0, 7, 7))[0], np.linalg.qr(gaussian(1, 7, 7))[0]
    for stretch, expected in ((1.0, 1.0), (2.0, (4 + 1 + 1) ** 2 / (3 * (16 + 1 + 1)))):
        value = right[:, :3].T * np.array([stretch, 1, 1])[:, None]
        transports = HeadTransports(torch.from_numpy(value)[None], torch.from_numpy(left[:, :3].copy())[None])
        agree(metrics.head_isometry(transports), [expected])
        agree(metrics.sum_isometry(transports), expected)
    # one singular value out of r: the least isometric
    rank_one = np.zeros((3, 7))
    rank_one[0] = right[0]
    transports = HeadTransports(torch.from_numpy(rank_one)[None], torch.from_numpy(left[:, :3].copy())[None])
    agree(metrics.head_isometry(transports), [1 / 3])


def test_edge_isometry_weighs_edges_with_the_walk() -> None:
    """Row 0 reads token 0 through an isometry, token 1 through one of two dimensions."""
    attention = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.6, 0.4], [0.0, 1.0]]], dtype=F64)
    value = torch.stack([torch.eye(2, dtype=F64), torch.diag(torch.tensor([1.0, 0.0], dtype=F64))])
    walk = ConnectionWalk(attention, value, torch.eye(2, dtype=F64).repeat(2, 1, 1))
    # Omega_00 ~ diag(1.6, 1), Omega_10 ~ I, Omega_01, Omega_11 ~ diag(1, 0); W doubled is 1.6, .4, 1, 1
    mixed = (1.6**2 + 1) ** 2 / (2 * (1.6**4 + 1))
    agree(walk.edge_isometry(), [[mixed, 0.5], [1.0, 0.5]])
    agree(metrics.edge_isometry(walk), (1.6 * mixed + 0.4 * 0.5 + 1.0 + 0.5) / 4)


def test_symmetry_and_alignment_of_known_transports() -> None:
    g = gaussian(0, 5, 5)
    for matrix, symmetry in ((g + g.T, 1.0), (g - g.T, 0.0), (np.eye(5), 1.0), (-np.eye(5), 1.0)):
        agree(metrics.symmetry(one_head(matrix).transports), symmetry)
    for angle in (0.0, 0.4, np.pi / 2, 3.0):
        transports = one_head(rotation(angle)).transports
        agree(metrics.identity_alignment(transports), np.cos(angle))
        agree(metrics.symmetry(transports), np.cos(angle) ** 2)
    # a random matrix has half its square in the symmetric part
    large = gaussian_transports(HeadTransports(torch.ones(2, 64, 256), torch.ones(2, 256, 64)), 0)
    assert abs(metrics.symmetry(large) - 0.5) < 0.01 and abs(metrics.identity_alignment(large)) < 0.02


def test_holonomy_of_one_head() -> None:
    """All edges carry T, so a triangle compares T^2 with T."""
    agree(metrics.holonomy_defect(one_head(np.eye(4))), 0.0)
    projection = np.diag([1.0, 1.0, 0.0])
    agree(metrics.holonomy_defect(one_head(-3 * projection)), 0.0)
    for angle in (0.5, np.pi / 2, 2.0):
        agree(metrics.holonomy_defect(one_head(2 * rotation(angle))), 1 - abs(np.cos(angle)))


def test_flat_connection_of_many_heads_has_no_holonomy() -> None:
    """Head h serves the edges with i - j = h (mod n) and rotates by 2 pi h/n, so Omega_ij ~ g_i g_j^-1 (T8)."""
    for n in (3, 5, 8):
        attention = torch.stack([torch.eye(n, dtype=F64).roll(h, 0) for h in range(n)])
        rotations = torch.from_numpy(np.stack([rotation(2 * np.pi * h / n) for h in range(n)]))
        walk = ConnectionWalk(attention, torch.eye(2, dtype=F64).expand(n, 2, 2), rotations)
        agree(metrics.holonomy_defect(walk), 0.0)
        agree(metrics.schmidt_participation(walk), 2.0)
        agree(metrics.single_walk_error(walk), np.sqrt(0.5))
        agree(metrics.edge_isometry(walk), 1.0)
        bent = ConnectionWalk(attention, torch.eye(2, dtype=F64).expand(n, 2, 2), rotations.roll(1, 0))
        agree(metrics.holonomy_defect(bent), 1 - abs(np.cos(2 * np.pi / n)))


def test_norms_and_angles() -> None:
    stretch = one_head(np.diag([2.0, 1.0])).transports
    field = torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=F64)
    # ratios 2 and 1: deviation 1/2 of the population about the mean 3/2
    agree(metrics.norm_cv(stretch, field), 1 / 3)
    assert np.isnan(metrics.angle_correlation(stretch, field)), "one pair has no correlation"
    three = torch.tensor([[1.0, 0.0], [0.0, 3.0], [1.0, 1.0]], dtype=F64)
    assert np.isfinite(metrics.angle_correlation(stretch, three))
    # the lengths of tokens do not matter
    lengths = torch.tensor([[1.0], [5.0], [0.1]], dtype=F64)
    agree(metrics.norm_cv(stretch, lengths * three), metrics.norm_cv(stretch, three))
    agree(metrics.angle_correlation(stretch, lengths * three), metrics.angle_correlation(stretch, three))
    # a reflection of one axis swaps the cosines of (1, 1) and (-1, 1) with (1, 0)
    flip = one_head(np.array([[0.0, 0.0], [1.0, 0.0]])).transports
    agree(metrics.norm_cv(flip, torch.tensor([[3.0, 4.0], [4.0, 3.0]], dtype=F64)), 0.1 / 0.7)


# --- symmetries ------------------------------------------------------------------------------------------------------


def everything(walk: ConnectionWalk, field: np.ndarray) -> dict[str, float | np.ndarray]:
    """All quantities of a bare walk, and those of a field."""
    field = torch.from_numpy(field)
    return (
        measure(walk)
        | measure(walk, ["schmidt_spectrum", "singular_spectrum"])
        | {
            "norm_cv": metrics.norm_cv(walk.transports, field),
            "angle_correlation": metrics.angle_correlation(walk.transports, field),
        }
    )


def assert_same(left: dict, right: dict, sign: float = 1) -> None:
    assert left.keys() == right.keys()
    for name in left:
        factor = sign if name == "identity_alignment" else 1
        # the square root in an error, a defect or a singular value doubles the rounding's exponent
        tolerance = 1e-7 if name == "single_walk_error" or name.endswith(("_defect", "_spectrum")) else 1e-9
        agree(left[name], factor * right[name], rtol=1e-9, atol=tolerance)


@square_kinds
def test_orthogonal_gauge_change_leaves_every_metric(kind: str, unchecked: None) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        g, field = np.linalg.qr(gaussian(seed, walk.d_model, walk.d_model))[0], gaussian(seed, 5, walk.d_model)
        turned = Layer(layer.attention, layer.value @ g.T, g @ layer.output, layer.groups)
        if walk.d_model > 1:
            assert_same(everything(walk_of(turned), field @ g.T), everything(walk, field))
        after = partner(layer, seed)
        turned_after = Layer(after.attention, after.value @ g.T, g @ after.output, after.groups)
        agree(metrics.operator_cosine(walk_of(turned), walk_of(turned_after)),
              metrics.operator_cosine(walk, walk_of(after)), rtol=1e-9)  # fmt: skip


@pytest.mark.parametrize("c", [4.0, -0.25])
def test_scale_of_the_transports_does_not_matter(c: float, unchecked: None) -> None:
    for kind in ("full", "causal", "grouped zeros"):
        for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
            field = gaussian(seed, 5, walk.d_model)
            scaled = Layer(layer.attention, layer.value, c * layer.output, layer.groups)
            after, before = everything(walk_of(scaled), 3 * field), everything(walk, field)
            if "mass" in before:  # the scale is what it measures
                agree(1 - after.pop("mass"), abs(c) * (1 - before.pop("mass")))
            assert_same(after, before, sign=np.sign(c))


def test_order_of_heads_does_not_matter(unchecked: None) -> None:
    for kind in ("full", "zeros", "grouped zeros", "grouped causal"):
        for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
            order = np.random.default_rng(seed).permutation(len(layer.value))
            query = np.concatenate([np.arange(layer.groups) + layer.groups * h for h in order])
            other = Layer(layer.attention[query], layer.value[order], layer.output[query], layer.groups)
            field = gaussian(seed, 5, walk.d_model)
            assert_same(everything(walk_of(other), field), everything(walk, field))


# --- triangles -------------------------------------------------------------------------------------------------------


@square_kinds
def test_sampled_triangles_are_closed_by_edges_of_the_walk(kind: str) -> None:
    for layer, walk in pairs(kind):
        edges = set(oracles.support(layer))
        triangles = {tuple(t) for t in metrics.sample_triangles(walk).tolist()}
        for i, j, k in triangles:
            assert len({i, j, k}) == 3 and {(i, j), (j, k), (i, k)} <= edges
            assert not walk.is_causal or i > j > k
        # 64 x 256 draws find every triangle of so few tokens
        n = walk.n_src
        every = {(i, j, k) for i, j in edges for k in range(n) if {(j, k), (i, k)} <= edges and len({i, j, k}) == 3}
        assert len(triangles) == len(every) if len(every) < 20 else len(triangles) >= 20


def test_triangles_are_seeded_and_counted() -> None:
    walk = random_walk(0, tokens=12, causal=True)
    first = metrics.sample_triangles(walk)
    assert first.shape == (256, 3) and torch.equal(first, metrics.sample_triangles(walk, seed=0))
    assert not torch.equal(first, metrics.sample_triangles(walk, seed=1))
    assert metrics.sample_triangles(walk, count=10).shape == (10, 3)
    assert metrics.sample_triangles(random_walk(0, tokens=2)).shape == (0, 3)


def test_triangles_between_different_token_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="walk: expected as many destinations as sources, got 4 and 6"):
        metrics.sample_triangles(random_walk(0, tokens=4, sources=6))


# --- registry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeLayer:
    """What `measure` needs of a captured layer."""

    walk: ConnectionWalk
    field: Tensor
    previous: "FakeLayer | None" = None

    def residual(self) -> float:
        return 0.125


def stack() -> tuple[FakeLayer, FakeLayer]:
    shape = {"heads": 4, "tokens": 10, "groups": 2}
    first = FakeLayer(random_walk(0, **shape), torch.from_numpy(gaussian(0, 10, 8)))
    return first, FakeLayer(random_walk(1, **shape), torch.from_numpy(gaussian(1, 10, 8)), first)


NEEDS_MODEL = {"depth_step", "operator_cosine", "spectral_step", "norm_cv", "angle_correlation", "t2_residual"}
NEEDS_MODEL |= {"dirichlet_energy", "parallel_defect", "layer_cosines"}
SPECTRUM = {"spectral_density", "spectral_density_error", "spectrum_lowest", "spectrum_highest"}
BY_NAME_ONLY = SPECTRUM | {"schmidt_spectrum", "singular_spectrum", "layer_cosines"}
BY_DEFAULT = [name for name in METRICS if name not in BY_NAME_ONLY]


@pytest.mark.parametrize("gauge", ["mean", "norm"])
def test_measure_calls_every_metric_with_what_it_is_about(gauge: str) -> None:
    first, layer = stack()
    before, after = stochastic_walk(first.walk, gauge), stochastic_walk(layer.walk, gauge)
    transports = layer.walk.transports
    expected = {
        "depth_step": metrics.depth_step(before, after),
        "operator_cosine": metrics.operator_cosine(first.walk, layer.walk),
        "spectral_step": metrics.spectral_step(before, after),
        "reversibility_defect": metrics.reversibility_defect(after),
        "spectral_gap": metrics.spectral_gap(after),
        "entropy_rate": metrics.entropy_rate(after),
        "sink_mass": metrics.sink_mass(after),
        "schmidt_participation": metrics.schmidt_participation(layer.walk),
        "single_walk_error": metrics.single_walk_error(layer.walk),
        "head_isometry": float(metrics.head_isometry(transports).mean()),
        "sum_isometry": metrics.sum_isometry(transports),
        "edge_isometry": metrics.edge_isometry(layer.walk),
        "symmetry": metrics.symmetry(transports),
        "identity_alignment": metrics.identity_alignment(transports),
        "norm_cv": metrics.norm_cv(transports, layer.field),
        "angle_correlation": metrics.angle_correlation(transports, layer.field),
        "holonomy_defect": metrics.holonomy_defect(layer.walk),
        "laplacian_defect": laplacian.laplacian_defect(layer.walk),
        "metric_defect": laplacian.metric_defect(layer.walk),
        "inverse_defect": laplacian.inverse_defect(layer.walk),
        "metric_balance_defect": laplacian.metric_balance_defect(layer.walk),
        "mass": laplacian.mass(layer.walk),
        "dirichlet_energy": laplacian.dirichlet_energy(layer.walk, layer.field),
        "parallel_defect": laplacian.parallel_defect(layer.walk, layer.field),
        "t2_residual": 0.125,
    }
    measured = measure(layer, gauge=gauge)
    assert measured == expected
    assert list(measured) == BY_DEFAULT
    assert all(type(value) is float for value in measured.values())
    some = ["symmetry", "depth_step"]
    assert measure(layer, some, gauge=gauge) == {name: expected[name] for name in some}


def test_gauge_matters_to_attention_graphs_alone() -> None:
    _, layer = stack()
    mean, norm = measure(layer), measure(layer, gauge="norm")
    for name in BY_DEFAULT:
        assert (mean[name] != norm[name]) == (METRICS[name].about == "graph"), name


def test_a_first_layer_has_no_step() -> None:
    measured = measure(stack()[0])
    assert {name for name, value in measured.items() if np.isnan(value)} == {
        "depth_step", "operator_cosine", "spectral_step",
    }  # fmt: skip


def test_a_bare_walk_has_what_needs_no_model() -> None:
    first, _ = stack()
    measured = measure(first.walk)
    assert set(measured) == set(BY_DEFAULT) - NEEDS_MODEL
    assert measured == {name: value for name, value in measure(first).items() if name in measured}


def test_a_walk_between_different_token_sets_has_what_needs_no_way_back() -> None:
    measured = measure(random_walk(0, tokens=9, sources=6))
    refused = {"reversibility_defect", "spectral_gap", "spectral_step", "holonomy_defect"}
    refused |= {"laplacian_defect", "metric_defect", "inverse_defect", "metric_balance_defect", "mass"}
    assert set(measured) == set(BY_DEFAULT) - NEEDS_MODEL - refused
    assert np.isfinite(list(measured.values())).all()


def test_metrics_of_weights_do_not_depend_on_attention() -> None:
    first, layer = stack()
    other = FakeLayer(ConnectionWalk.from_transports(first.walk.attention, layer.walk.transports), layer.field, first)
    left, right = measure(layer), measure(other)
    for name in BY_DEFAULT:
        if METRICS[name].weights_only:
            assert left[name] == right[name]
        elif METRICS[name].about != "transport":
            assert left[name] != right[name] or name == "t2_residual", name
    assert {n for n, m in METRICS.items() if m.weights_only} == {
        "head_isometry", "singular_spectrum", "sum_isometry", "symmetry", "identity_alignment",
    }  # fmt: skip
    spectra = [measure(x, ["singular_spectrum"])["singular_spectrum"] for x in (layer, other)]
    assert np.array_equal(*spectra)


@pytest.mark.parametrize("name", METRICS)
def test_registry_entry(name: str) -> None:
    metric = METRICS[name]
    assert metric.name == name and metric.version >= 1
    assert metric.range and len(metric.description) > 20 and "\n\n" not in metric.description
    if name != "t2_residual":
        function = getattr(metrics, name)
        marks = re.compile(r":math:|[`$]")  # mathematics is marked as notebooks have it
        written = " ".join(inspect.getdoc(function).split())
        assert marks.sub("", written).startswith(marks.sub("", metric.description))
        assert ":math:" not in metric.description


# --- wrong inputs ----------------------------------------------------------------------------------------------------


FIRST, SECOND = stack()
BIPARTITE = random_walk(0, tokens=4, sources=6)
WRONG: dict[str, tuple[Callable[[], object], list[str]]] = {
    "unknown name": (lambda: measure(SECOND, ["symetry"]), ["metrics", "'symetry'", "symmetry", "depth_step"]),
    "a string": (lambda: measure(SECOND, "symmetry"), ["metrics", "list of names", "'symmetry'", "['symmetry']"]),
    "a string, of weights": (
        lambda: measure(SECOND.walk.transports, "symmetry"),
        ["metrics", "list of names", "'symmetry'", "['symmetry']"],
    ),
    "unknown gauge": (lambda: measure(SECOND, gauge="max"), ["gauge", "'mean' or 'norm'", "'max'"]),
    "sum gauge": (lambda: measure(SECOND, gauge="sum"), ["gauge", "'mean' or 'norm'", "'sum'"]),
    "gap of a bipartite walk": (lambda: measure(BIPARTITE, ["spectral_gap"]), ["matrix", "same tokens", "(4, 6)"]),
    "holonomy of a bipartite walk": (lambda: metrics.holonomy_defect(BIPARTITE), ["walk", "4", "6"]),
    **{
        f"bare walk: {name}": (lambda name=name: measure(FIRST.walk, [name]), ["layer", name, "bare ConnectionWalk"])
        for name in sorted(NEEDS_MODEL)
    },
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str, unchecked: None) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match=r"expected|unknown|needs") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


@pytest.mark.parametrize("metric", [metrics.reversibility_defect, metrics.spectral_gap])
@pytest.mark.parametrize("sources", [1, 6])
def test_graph_metrics_refuse_walks_between_different_token_sets(
    metric: Callable[[Tensor], float], sources: int
) -> None:
    """One source would broadcast to a number without meaning."""
    with pytest.raises(ValueError, match=rf"matrix: expected .* same tokens, got shape \(4, {sources}\)"):
        metric(random_walk(0, tokens=4, sources=sources).effective_walk())


@pytest.mark.parametrize("rest", [1.0, 1e-3, 1e-5])
def test_metrics_of_the_sum_keep_their_digits_where_heads_cancel(rest: float) -> None:
    """T_2 = -T_0 + rest R and T_3 = -T_1 + rest R': only the two rests are left."""
    rng = torch.Generator().manual_seed(0)
    value = torch.randn(2, 3, 8, dtype=torch.float64, generator=rng)
    output = torch.randn(4, 8, 3, dtype=torch.float64, generator=rng)
    cancelling = HeadTransports(torch.cat([value, value]), torch.cat([output[:2], rest * output[2:] - output[:2]]))
    left = HeadTransports(value, output[2:])
    for metric in (metrics.symmetry, metrics.identity_alignment):
        assert metric(cancelling) == pytest.approx(metric(left), rel=1e-4)
    # their rank bounds differ: min(8, 4 x 3) and 2 x 3
    assert 8 * metrics.sum_isometry(cancelling) == pytest.approx(6 * metrics.sum_isometry(left), rel=1e-4)


# --- the spectrum ----------------------------------------------------------------------------------------------------


def generator_spectrum(walk: ConnectionWalk) -> np.ndarray:
    """Eigenvalues of I - (P + P*)/(2 s), dense, in the stationary measure if there is one."""
    dense, w = walk.to_dense().numpy(), walk.effective_walk().numpy()
    pi = oracles.measure(w).repeat(walk.d_model) ** 0.5
    balanced = pi[:, None] * dense / pi
    return 1 - np.linalg.eigvalsh(balanced + balanced.T) / 2 / (1 - laplacian.mass(walk))


@pytest.mark.parametrize("causal", [False, True])
def test_spectral_density_is_that_of_the_dense_generator(causal: bool) -> None:
    walk = random_walk(3, heads=2, tokens=12, d_model=8, d_head=4, causal=causal)
    found = measure(walk, sorted(SPECTRUM))
    exact = generator_spectrum(walk)
    at = np.array(METRICS["spectral_density"].at)
    smooth = np.exp(-((at[:, None] - exact) ** 2) / (2 * 0.1**2)).mean(1) / (0.1 * np.sqrt(2 * np.pi))
    error = found["spectral_density_error"]
    assert found["spectral_density"].shape == error.shape == at.shape == (41,)
    assert (error > 0).sum() > 10 and error.max() < 0.3
    # four probes: three estimated deviations, and a little for where the estimate itself happens to be small
    assert (np.abs(found["spectral_density"] - smooth) <= 3 * error + 0.05).mean() > 0.9
    assert found["spectrum_lowest"] == pytest.approx(exact.min(), abs=1e-6)
    assert found["spectrum_highest"] == pytest.approx(exact.max(), abs=1e-6)


def test_the_spectrum_of_a_connection_laplacian_lies_where_t4_puts_it() -> None:
    """One head whose transport is a scaled reflection, and a symmetric walk (T4 e)."""
    reflection = torch.diag(torch.tensor([1.0, 1.0, -1.0], dtype=F64))
    attention = torch.full((1, 4, 4), 0.25, dtype=F64)
    walk = ConnectionWalk(attention, torch.eye(3, dtype=F64)[None], 2.5 * reflection[None])
    found = measure(walk, ["spectrum_lowest", "spectrum_highest", "mass"])
    # eigenvalues of the walk are 1 and 0; of the reflection, 1 and -1
    agree(list(found.values()), [0.0, 2.0, -1.5])


def test_what_takes_seconds_and_what_is_a_function_is_asked_for_by_name() -> None:
    assert not BY_NAME_ONLY & set(measure(SECOND)) and set(METRICS) >= BY_NAME_ONLY
    assert all(METRICS[name].about == "spectrum" for name in SPECTRUM)
    assert {name for name, metric in METRICS.items() if metric.at} == {
        "schmidt_spectrum", "singular_spectrum", "layer_cosines", "spectral_density", "spectral_density_error",
    }  # fmt: skip
    found = measure(SECOND, ["schmidt_spectrum", "singular_spectrum", "layer_cosines"])
    for name, values in found.items():
        assert values.shape == (len(METRICS[name].at),) and np.isfinite(values).any(), name


# --- functions of a rank or of a layer -------------------------------------------------------------------------------


def padded(values: list | np.ndarray) -> np.ndarray:
    """NaN from the end of the values on."""
    return np.concatenate([values, np.full(128 - len(values), np.nan)])


@kinds
def test_schmidt_spectrum_is_that_of_the_realigned_operator(kind: str) -> None:
    assert METRICS["schmidt_spectrum"].at == tuple(range(1, 129))
    for layer, walk in pairs(kind):
        values = oracles.schmidt(layer)
        # below 1e-8 of the largest there is rounding
        agree(metrics.schmidt_spectrum(walk), padded(values / np.sqrt((values**2).sum())), atol=1e-7)


def test_known_schmidt_spectra() -> None:
    frame, attention = torch.eye(4, dtype=F64), torch.stack([cycle(4).roll(h, 0) for h in range(4)])
    scale = torch.tensor([1.0, 3.0, 0.0, 2.0], dtype=F64)[:, None, None]
    walk = ConnectionWalk(attention, frame[:, None, :], scale * frame[:, :, None])
    agree(metrics.schmidt_spectrum(walk), padded(np.array([3, 2, 1, 0]) / np.sqrt(14)))
    nothing = ConnectionWalk(attention, frame[:, None, :], 0 * frame[:, :, None])
    assert np.isnan(metrics.schmidt_spectrum(nothing)).all()


@kinds
def test_singular_spectrum_is_that_of_the_dense_transports(kind: str) -> None:
    at = METRICS["singular_spectrum"].at
    assert at == pytest.approx(np.arange(21) / 20)
    for layer, walk in pairs(kind):
        curves = []
        for value in oracles.singular_values(layer):
            relative, last = value / np.sqrt((value**2).mean()), len(value) - 1
            below = [min(int(t * last), max(last - 1, 0)) for t in at]
            curves.append([relative[k] + (t * last - k) * (relative[min(k + 1, last)] - relative[k])
                           for t, k in zip(at, below, strict=True)])  # fmt: skip
        agree(metrics.singular_spectrum(walk.transports), np.mean(curves, axis=0), rtol=1e-9)


def test_known_singular_spectra() -> None:
    at = np.arange(21) / 20
    agree(metrics.singular_spectrum(isometric_transports(0, heads=3, d_model=6, scale=0.2)), np.ones(21))
    agree(metrics.singular_spectrum(one_head(np.diag([-1.0, 3.0])).transports), (3 - 2 * at) / np.sqrt(5))
    # a head that carries nothing has no spectrum; the mean is over the others
    value = torch.diag_embed(torch.tensor([[1.0, 3.0], [0.0, 0.0], [2.0, 2.0]], dtype=F64))
    identity = torch.eye(2, dtype=F64).repeat(3, 1, 1)
    agree(metrics.singular_spectrum(HeadTransports(value, identity)), ((3 - 2 * at) / np.sqrt(5) + 1) / 2)
    assert np.isnan(metrics.singular_spectrum(HeadTransports(0 * value, identity))).all()


@square_kinds
def test_layer_cosines_are_those_of_the_dense_operators(kind: str) -> None:
    first = oracles.instance(kind, 0)
    second, third = partner(first, 1), partner(first, 2)
    chain = None
    for layer in (first, second, third):
        chain = FakeLayer(walk_of(layer), torch.empty(0), chain)
    expected = padded([oracles.operator_cosine(before, third) for before in (first, second)])
    agree(measure(chain, ["layer_cosines"])["layer_cosines"], expected)
    agree(metrics.layer_cosines(walk_of(third), [walk_of(first), walk_of(second)]), expected)
    assert METRICS["layer_cosines"].at == tuple(range(128))


def test_layer_cosines_are_undefined_before_the_first_layer_and_where_nothing_is_carried() -> None:
    first, second = stack()
    assert np.isnan(measure(first, ["layer_cosines"])["layer_cosines"]).all()
    nothing = ConnectionWalk(first.walk.attention, 0 * first.walk.value, first.walk.output, groups=2)
    agree(metrics.layer_cosines(second.walk, [second.walk, nothing, second.walk]), padded([1.0, np.nan, 1.0]))


def test_layer_cosines_need_every_layer_before() -> None:
    checkpoint = tiny_checkpoint("bert")
    kept = list(layers(checkpoint, "three layers"))
    dense = [oracles.operator(Layer(*(x.double().numpy() for x in (k.walk.attention, k.walk.value, k.walk.output))))
             for k in kept]  # fmt: skip
    expected = [(k * dense[2]).sum() / np.linalg.norm(k) / np.linalg.norm(dense[2]) for k in dense[:2]]
    agree(measure(kept[2], ["layer_cosines"])["layer_cosines"], padded(expected), rtol=1e-6)
    # while streaming, the layer before is there, and no other
    refused = []
    for layer in layers(checkpoint, "three layers"):
        if layer.index < 2:
            measure(layer, ["layer_cosines"])
        else:
            with pytest.raises(ValueError, match=r"layer: layer_cosines needs the 2 layers before, of which 1 ") as got:
                measure(layer, ["layer_cosines"])
            refused.append("keep list(cwlib.layers(...))" in str(got.value))
    assert refused == [True]
    alone = kept[1]
    del kept, layer
    with pytest.raises(ValueError, match=r"needs the 1 layers before, of which 0 are left"):
        measure(alone, ["layer_cosines"])
