"""Conditions of T4 as numbers (`cwlib.laplacian`) against dense matrices, loops over edges and least squares."""

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from oracles import Array, Layer, agree

from cwlib.cores import HeadTransports
from cwlib.edges import EdgeWalk
from cwlib.laplacian import (
    conditions,
    detailed_balance_defect,
    dirichlet_energy,
    in_metric,
    inverse_defect,
    laplacian_defect,
    mass,
    metric_balance_defect,
    metric_defect,
    parallel_defect,
    whitening_metric,
)
from cwlib.measures import degree_measure, uniform_measure
from cwlib.synthetic import (
    conditioned_walk,
    flat_walk,
    isometric_transports,
    random_measure,
    random_metrics,
    random_orthogonal,
    random_walk,
    varied_shapes,
)
from cwlib.walk import ConnectionWalk

Edges = dict[tuple[int, int], tuple[float, Array, int]]  # (i, j) -> W_ij, Omega_ij, bound on its rank

SCALE_FREE = [laplacian_defect, detailed_balance_defect, metric_defect, metric_balance_defect, inverse_defect]
LAYERS = ["full", "zeros", "grouped", "grouped zeros", "causal", "d_head above d_model", "one head", "one token"]
MEASURES = ["chosen", "uniform", "degree", "random"]


# --- oracles: dense matrices, loops over edges, least squares --------------------------------------------------------


def spd(seed: int, count: int, d: int) -> Array:
    """Symmetric positive definite matrices with eigenvalues from 0.3 to about 3."""
    factors = np.random.default_rng(seed).standard_normal((count, d, d))
    return 0.3 * np.eye(d) + factors @ factors.transpose(0, 2, 1) / d


def layer_edges(layer: Layer) -> Edges:
    weights = oracles.walk(layer, "mean")
    return {
        (i, j): (weights[i, j], oracles.transport(layer, i, j), oracles.rank_bound(layer, i, j))
        for i, j in oracles.support(layer)
    }


def random_edges(seed: int, tokens: int = 4, d: int = 3) -> Edges:
    """Loops, edges both ways and one way; rows do not sum to one."""
    rng = np.random.default_rng(seed)
    return {
        (i, j): (0.1 + rng.random(), rng.standard_normal((d, d)), d)
        for i in range(tokens)
        for j in range(tokens)
        if j == (i + 1) % tokens or rng.random() < 0.6
    }


def edge_walk(edges: Edges) -> EdgeWalk:
    dst, src = torch.tensor(list(edges)).T
    weight, maps, _ = zip(*edges.values(), strict=True)
    weight = torch.tensor(weight, dtype=torch.float64)
    return EdgeWalk(1 + int(max(dst.max(), src.max())), dst, src, weight, torch.from_numpy(np.array(maps)))


def in_frames(edges: Edges, metrics: Array) -> Edges:
    """Orthonormal frames from Cholesky factors, G_i = C_i C_i^T, x_i -> C_i^T x_i.

    The code takes symmetric roots; the two differ by rotations of the fibres, which nothing here may feel.
    """
    c = np.linalg.cholesky(metrics)
    return {(i, j): (w, c[i].T @ omega @ np.linalg.inv(c[j]).T, r) for (i, j), (w, omega, r) in edges.items()}


def operator(edges: Edges, n: int) -> Array:
    d = len(next(iter(edges.values()))[1])
    dense = np.zeros((n, d, n, d))
    for (i, j), (weight, omega, _) in edges.items():
        dense[i, :, j] = weight * omega
    return dense.reshape(n * d, n * d)


def walk_matrix(edges: Edges, n: int) -> Array:
    w = np.zeros((n, n))
    for (i, j), (weight, _, _) in edges.items():
        w[i, j] = weight
    return w


def mass_matrix(pi: Array, metrics: Array) -> Array:
    """M = blockdiag(pi_i G_i)."""
    n, d = len(pi), metrics.shape[-1]
    m = np.zeros((n, d, n, d))
    for i in range(n):
        m[i, :, i] = pi[i] * metrics[i]
    return m.reshape(n * d, n * d)


def best_scale(targets: list[Array], references: list[Array], sign: bool = False) -> tuple[float, float]:
    """min_c |targets - c references| over all entries at once, relative to the targets; and c (c >= 0 if asked)."""
    y, x = (np.concatenate([m.ravel() for m in ms]) for ms in (targets, references))
    c = float(np.linalg.lstsq(x[:, None], y, rcond=None)[0][0])
    c = max(c, 0.0) if sign else c
    return float(np.linalg.norm(y - c * x) / np.linalg.norm(y)), c


def row_projection(omega: Array, rank: int) -> Array:
    """Projection on the leading right singular vectors."""
    right = np.linalg.svd(omega)[2][:rank]
    return right.T @ right


def defects(edges: Edges, pi: Array, metrics: Array) -> dict[str, float]:
    """All conditions from their definitions, for walks and metrics of any kind."""
    n, m = len(pi), mass_matrix(pi, metrics)
    k = operator(edges, n)
    adjoint = np.linalg.solve(m, k.T @ m)
    root = np.linalg.cholesky(m).T

    def m_norm(a: Array) -> float:
        return float(np.linalg.norm(root @ a @ np.linalg.inv(root)))

    # in orthonormal frames: flows, transports, what arrives back
    framed = in_frames(edges, metrics)
    flow = {(i, j): pi[i] * w for (i, j), (w, _, _) in framed.items()}
    identity = np.eye(metrics.shape[-1])
    balance = [np.zeros_like(identity) for _ in range(n)]
    kept, projections, f_k = [], [], np.zeros_like(k)
    for (i, j), (_, omega, rank) in framed.items():
        f = flow[i, j]
        kept.append(np.sqrt(f) * omega.T @ omega)
        projections.append(np.sqrt(f) * row_projection(omega, rank))
        balance[j] = balance[j] + f * omega.T @ omega
        d = len(omega)
        f_k[i * d : i * d + d, j * d : j * d + d] = f * omega
    metric, square = best_scale(kept, projections)

    total, weight = 0.0, 0.0
    for (i, j), (_, omega, rank) in framed.items():
        if (j, i) in framed:
            around, both = omega @ framed[j, i][1], min(rank, framed[j, i][2])
            projection = row_projection(around, both)
            # min over c >= 0 of |c A - Pi| / |Pi|
            defect, _ = best_scale([projection], [around], sign=True)
            total, weight = total + (flow[i, j] + flow[j, i]) * defect, weight + flow[i, j] + flow[j, i]
    lower = all(i >= j for i, j in framed)
    w = walk_matrix(edges, n)
    sums = [sum(row) for row in w]
    return {
        "stochasticity_defect": float(np.linalg.norm(np.subtract(sums, 1)) / (np.linalg.norm(sums) + np.sqrt(n))),
        "reversibility_defect": oracles.reversibility_defect(w, pi),
        "metric_defect": metric,
        "inverse_defect": np.nan if (lower and n > 1) or weight == 0 else total / weight,
        "mass": 1 - np.sqrt(square),
        "detailed_balance_defect": float(np.linalg.norm(f_k - f_k.T) / (2 * np.linalg.norm(f_k))),
        "laplacian_defect": m_norm(k - adjoint) / (2 * m_norm(k)),
        "metric_balance_defect": best_scale(balance, [p * identity for p in pi])[0],
    }


def energy(edges: Edges, pi: Array, metrics: Array, field: Array) -> float:
    """The double sum over edges, and the size of the field, both in the given metrics."""
    total = 0.0
    for (i, j), (weight, omega, _) in edges.items():
        step = field[i] - omega @ field[j]
        total += pi[i] * weight * step @ metrics[i] @ step / 2
    return total / sum(p * x @ g @ x for p, x, g in zip(pi, field, metrics, strict=True))


def best_angle(edges: Edges, pi: Array, field: Array) -> float:
    """min over c >= 0 of |x_i - c Omega_ij x_j| / |x_i| over all edges at once, weighted by pi_i W_ij."""
    here = [np.sqrt(pi[i] * weight) * field[i] for (i, _), (weight, _, _) in edges.items()]
    arriving = [np.sqrt(pi[i] * weight) * omega @ field[j] for (i, j), (weight, omega, _) in edges.items()]
    return best_scale(here, arriving, sign=True)[0]


def choose(kind: str, edges: Edges, n: int) -> tuple[Array, torch.Tensor | None]:
    """A measure for the oracle, and what the code is given (not scaled to sum to one)."""
    w = walk_matrix(edges, n)
    if kind == "chosen":
        # only a stochastic walk has a stationary law
        stochastic = np.allclose(w.sum(1), 1)
        return (oracles.measure(w), None) if stochastic else choose("random", edges, n)
    pi = {
        "uniform": np.full(n, 1 / n),
        "degree": (w.sum(0) + w.sum(1)) / (2 * w.sum()),
        "random": np.random.default_rng(n).random(n) + 0.2,
    }[kind]
    return pi / pi.sum(), torch.from_numpy(pi * 3.0)


def walk_of(layer: Layer) -> ConnectionWalk:
    return ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups)


def assert_conditions(walk: ConnectionWalk | EdgeWalk, given: torch.Tensor | None, expected: dict[str, float]) -> None:
    found = conditions(walk, given)
    assert list(found) == ["measure", *expected]
    for name, value in expected.items():
        # a square root of a difference: 1e-8 near zero, full accuracy elsewhere
        agree(found[name], value, rtol=1e-10, atol=1e-10 if value > 1e-3 else 1e-7)


# --- against oracles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("measure", MEASURES)
def test_conditions_of_a_layer(kind: str, measure: str) -> None:
    for seed in range(2):
        layer = oracles.instance(kind, seed)
        edges, n, d = layer_edges(layer), layer.shape[1], layer.shape[3]
        pi, given = choose(measure, edges, n)
        assert_conditions(walk_of(layer), given, defects(edges, pi, np.broadcast_to(np.eye(d), (n, d, d))))


@pytest.mark.parametrize("measure", MEASURES)
def test_conditions_of_an_edge_walk(measure: str) -> None:
    for seed in range(4):
        edges = random_edges(seed)
        pi, given = choose(measure, edges, 4)
        assert_conditions(edge_walk(edges), given, defects(edges, pi, np.broadcast_to(np.eye(3), (4, 3, 3))))


@pytest.mark.parametrize("kind", ["full", "zeros", "grouped", "causal", "d_head above d_model"])
def test_conditions_of_a_layer_in_a_shared_metric(kind: str) -> None:
    layer = oracles.instance(kind, 2)
    edges, n, d = layer_edges(layer), layer.shape[1], layer.shape[3]
    metric = spd(7, 1, d)[0]
    pi, given = choose("random", edges, n)
    expected = defects(edges, pi, np.broadcast_to(metric, (n, d, d)))
    assert_conditions(in_metric(walk_of(layer), torch.from_numpy(metric)), given, expected)
    explicit = EdgeWalk.from_walk(walk_of(layer))
    full = {name for name in expected if name not in ("metric_defect", "inverse_defect", "mass")}
    found = conditions(in_metric(explicit, torch.from_numpy(metric)), given)
    for name in full:  # an explicit map has no rank bound below d_model
        agree(found[name], expected[name], atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_conditions_of_an_edge_walk_in_a_metric_per_token(seed: int) -> None:
    edges, metrics = random_edges(seed), spd(seed, 4, 3)
    pi, given = choose("random", edges, 4)
    walk = in_metric(edge_walk(edges), torch.from_numpy(metrics))
    assert_conditions(walk, given, defects(edges, pi, metrics))


def test_float32_layers_are_read_exactly() -> None:
    for kind in ("full", "grouped", "causal"):
        layer = oracles.instance(kind, 3)
        parts = [torch.from_numpy(part).float() for part in layer.parts]
        rounded = Layer(*(p.double().numpy() for p in parts), groups=layer.groups)
        n, d = layer.shape[1], layer.shape[3]
        pi, given = choose("random", layer_edges(rounded), n)
        expected = defects(layer_edges(rounded), pi, np.broadcast_to(np.eye(d), (n, d, d)))
        assert_conditions(ConnectionWalk(*parts, groups=layer.groups), given, expected)


def test_the_measure_is_named() -> None:
    assert conditions(random_walk(0))["measure"] == "stationary"
    assert conditions(random_walk(0, causal=True))["measure"] == "uniform"
    assert conditions(random_walk(0), uniform_measure(6))["measure"] == "given"


# --- energy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
def test_energy_of_a_layer_is_the_double_sum(kind: str) -> None:
    layer = oracles.instance(kind, 4)
    edges, n, d = layer_edges(layer), layer.shape[1], layer.shape[3]
    field = np.random.default_rng(0).standard_normal((n, d))
    for measure in MEASURES:
        pi, given = choose(measure, edges, n)
        expected = energy(edges, pi, np.broadcast_to(np.eye(d), (n, d, d)), field)
        agree(dirichlet_energy(walk_of(layer), torch.from_numpy(field), given), expected)
    agree(dirichlet_energy(walk_of(layer), torch.from_numpy(5 * field), given), expected)


@pytest.mark.parametrize("seed", range(4))
def test_energy_in_a_metric_per_token(seed: int) -> None:
    """Fields change with the frames, x_i -> G_i^1/2 x_i; the energy is that of the metric."""
    edges, metrics = random_edges(seed), spd(seed, 4, 3)
    field = np.random.default_rng(seed).standard_normal((4, 3))
    pi, given = choose("random", edges, 4)
    values, vectors = np.linalg.eigh(metrics)
    root = vectors * np.sqrt(values)[:, None] @ vectors.transpose(0, 2, 1)
    framed = torch.from_numpy(np.einsum("iab,ib->ia", root, field))
    agree(
        dirichlet_energy(in_metric(edge_walk(edges), torch.from_numpy(metrics)), framed, given),
        energy(edges, pi, metrics, field),
    )


def test_energy_is_the_rayleigh_quotient_under_metric_balance() -> None:
    """<X, LX> / <X, X>: with (S) and balance, also without reversibility or inverses; not without balance (T4 b)."""
    for seed in range(3):
        measure = random_measure(seed, 5)
        fields = np.random.default_rng(seed).standard_normal((8, 5, 3))
        for broken in ({}, {"reversible": False}, {"inverse": False}, {"isometric": False}, {"stochastic": False}):
            walk = conditioned_walk(seed, measure, **broken)
            dense, m = walk.to_dense().numpy(), np.diag(measure.numpy().repeat(3))
            quotients = [x @ m @ (x - dense @ x) / (x @ m @ x) for x in fields.reshape(8, 15)]
            found = [dirichlet_energy(walk, torch.from_numpy(x), measure) for x in fields]
            if broken in ({"isometric": False}, {"stochastic": False}):
                assert np.abs(np.subtract(found, quotients)).max() > 1e-2
            else:
                agree(found, quotients)


def test_energy_of_a_connection_laplacian_is_at_most_two() -> None:
    measure = random_measure(3, 5)
    for seed in range(20):
        field = torch.from_numpy(np.random.default_rng(seed).standard_normal((5, 3)))
        assert 0 < dirichlet_energy(conditioned_walk(1, measure), field, measure) < 2


def test_parallel_fields_have_no_energy() -> None:
    measure, frames = random_measure(0, 5), random_orthogonal(0, 5, 3)
    parallel = frames @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    agree(dirichlet_energy(flat_walk(0, measure, frames), parallel, measure), 0.0, atol=1e-14)


@pytest.mark.parametrize("kind", LAYERS)
def test_parallel_defect_of_a_layer(kind: str) -> None:
    for seed in range(3):
        layer = oracles.instance(kind, seed)
        edges, n, d = layer_edges(layer), layer.shape[1], layer.shape[3]
        field = np.random.default_rng(seed).standard_normal((n, d))
        for measure in ("chosen", "random"):
            pi, given = choose(measure, edges, n)
            agree(parallel_defect(walk_of(layer), torch.from_numpy(field), given), best_angle(edges, pi, field))


def test_parallel_defect_of_an_edge_walk() -> None:
    found = []
    for seed in range(12):
        edges, field = random_edges(seed), np.random.default_rng(seed).standard_normal((4, 3))
        pi, given = choose("random", edges, 4)
        found.append(parallel_defect(edge_walk(edges), torch.from_numpy(field), given))
        agree(found[-1], best_angle(edges, pi, field))
    assert 1.0 in found and min(found) < 0.99, "both signs of the overlap occur"


@pytest.mark.parametrize("scale", [0.2, 1.0, 6.0])
def test_parallel_defect_does_not_feel_the_scale_of_transports_or_field(scale: float) -> None:
    """Nor does it of the measure; a parallel field has none at any scale, its opposite transport all."""
    measure, frames = random_measure(0, 5), random_orthogonal(0, 5, 3)
    parallel = frames @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    flat = flat_walk(0, measure, frames)
    scaled = EdgeWalk(5, flat.dst, flat.src, flat.weight, scale * flat.maps)
    agree(parallel_defect(scaled, parallel, measure), 0.0, atol=1e-7)
    agree(parallel_defect(EdgeWalk(5, flat.dst, flat.src, flat.weight, -flat.maps), parallel, measure), 1.0)
    other = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 3)))
    expected = parallel_defect(flat, other, measure)
    assert 0.1 < expected < 1
    agree(parallel_defect(scaled, 3 * other, 7 * measure), expected)


# --- zero cases ------------------------------------------------------------------------------------------------------

# which numbers leave zero when a condition is switched off alone
MOVES = {
    "none": ({}, set()),
    "stochastic": ({"stochastic": False}, {"stochasticity_defect", "metric_balance_defect"}),
    "reversible": ({"reversible": False}, {"reversibility_defect", "detailed_balance_defect", "laplacian_defect"}),
    "isometric": (
        {"isometric": False},
        {"metric_defect", "mass", "detailed_balance_defect", "laplacian_defect", "metric_balance_defect"},
    ),
    "inverse": ({"inverse": False}, {"inverse_defect", "detailed_balance_defect", "laplacian_defect"}),
}  # fmt: skip


@pytest.mark.parametrize("off", MOVES)
@pytest.mark.parametrize("curved", [False, True])
def test_only_the_defects_of_a_broken_condition_move(off: str, curved: bool) -> None:
    for seed in range(5):
        measure = random_measure(seed, 4 + seed % 3)
        metrics = random_metrics(seed + 9, len(measure), 3) if curved else None
        walk = conditioned_walk(seed, measure, 3, metrics=metrics, **MOVES[off][0])
        walk = in_metric(walk, metrics) if curved else walk
        found = conditions(walk, measure)
        for name, value in found.items():
            if name != "measure":
                moved = name in MOVES[off][1]
                assert abs(value) > 1e-2 if moved else abs(value) < 1e-7, (name, value)


def test_a_metric_overlooked_is_a_metric_violated() -> None:
    measure, metrics = random_measure(1, 5), random_metrics(2, 5, 3)
    walk = conditioned_walk(0, measure, 3, metrics=metrics)
    for function in (metric_defect, laplacian_defect, metric_balance_defect):
        assert function(walk, measure) > 0.05
        agree(function(in_metric(walk, metrics), measure), 0.0, atol=1e-7)
    agree(inverse_defect(walk, measure), 0.0, atol=1e-7)  # to be inverse needs no metric


@pytest.mark.parametrize("scale", [0.25, 1.0, 3.0])
def test_mass_is_one_minus_the_scale(scale: float) -> None:
    measure = random_measure(0, 5)
    walk = conditioned_walk(0, measure, 4, scale=scale)
    agree(mass(walk, measure), 1 - scale)
    found = conditions(walk, measure)
    assert max(abs(v) for k, v in found.items() if k not in ("measure", "mass")) < 1e-7


def test_one_isometric_head_is_self_adjoint_iff_an_involution() -> None:
    """T4 e, in a layer: attention reversible in its degree, transport a reflection or a rotation."""
    weights = np.random.default_rng(0).exponential(size=(5, 5))
    weights = torch.from_numpy(weights + weights.T)
    attention = (weights / weights.sum(1, keepdims=True))[None]
    measure = weights.sum(1)
    rotation = isometric_transports(0, 1, 4).output
    reflection = torch.eye(4, dtype=torch.float64) - 0.5 * torch.ones(4, 4, dtype=torch.float64)
    eye = torch.eye(4, dtype=torch.float64)[None]
    layer = ConnectionWalk(attention, eye, reflection[None])
    found = conditions(layer, measure)
    assert max(abs(v) for k, v in found.items() if k != "measure") < 1e-7
    turned = conditions(ConnectionWalk(attention, eye, rotation), measure)
    assert {k for k, v in turned.items() if k != "measure" and abs(v) > 1e-2} == {
        "inverse_defect", "detailed_balance_defect", "laplacian_defect"
    }  # fmt: skip


def test_extremes_of_the_laplacian_defect() -> None:
    """Zero, 1/sqrt 2 and one: self-adjoint, nothing flows back, skew."""
    two = torch.tensor([[0.0, 1], [1, 0]], dtype=torch.float64)
    turn = torch.tensor([[0.0, -1], [1, 0]], dtype=torch.float64)
    agree(laplacian_defect(EdgeWalk.from_dense(two, turn.expand(2, 2, 2, 2).clone())), 1.0)
    agree(detailed_balance_defect(EdgeWalk.from_dense(two, turn.expand(2, 2, 2, 2).clone())), 1.0)
    onward = torch.eye(3, dtype=torch.float64).roll(1, 0)
    one_way = EdgeWalk.from_dense(onward, torch.ones(3, 3, 1, 1, dtype=torch.float64))
    agree(laplacian_defect(one_way), 0.5**0.5)
    agree(detailed_balance_defect(one_way), 0.5**0.5)


def test_half_the_walk_and_its_adjoint_is_nearest_self_adjoint() -> None:
    """No self-adjoint operator is nearer in the M-norm than the defect says (T5)."""
    layer = oracles.instance("causal", 1)
    edges, n, d = layer_edges(layer), layer.shape[1], layer.shape[3]
    pi, given = choose("degree", edges, n)
    m = mass_matrix(pi, np.broadcast_to(np.eye(d), (n, d, d)))
    root = np.sqrt(np.diag(m))
    b = root[:, None] * operator(edges, n) / root
    best = laplacian_defect(walk_of(layer), given) * np.linalg.norm(b)
    agree(np.linalg.norm(b - (b + b.T) / 2), best)
    rng = np.random.default_rng(0)
    for size in (1e-3, 1e-1, 1.0):
        other = rng.standard_normal(b.shape) * size
        assert np.linalg.norm(b - (b + b.T + other + other.T) / 2) > best


# --- invariances and ranges ------------------------------------------------------------------------------------------


def test_change_of_frames_with_its_metric_leaves_everything(unchecked: None) -> None:
    """Gauge invariance: x_i -> g_i x_i takes G_i to g_i^-T G_i g_i^-1."""
    for seed in range(4):
        edges, metrics = random_edges(seed), spd(seed, 4, 3)
        frames = np.eye(3) + 0.4 * np.random.default_rng(seed + 3).standard_normal((4, 3, 3))
        inverse = np.linalg.inv(frames)
        moved = inverse.transpose(0, 2, 1) @ metrics @ inverse
        moved = (moved + moved.transpose(0, 2, 1)) / 2
        walk, measure = edge_walk(edges), random_measure(seed, 4)
        before = conditions(in_metric(walk, torch.from_numpy(metrics)), measure)
        there = walk.change_frames(torch.from_numpy(frames))
        after = conditions(in_metric(there, torch.from_numpy(moved)), measure)
        for name in set(before) - {"measure"}:
            agree(after[name], before[name], rtol=1e-9, atol=1e-9)


def test_one_change_of_frames_for_a_layer(unchecked: None) -> None:
    for kind in ("full", "grouped", "causal"):
        layer = oracles.instance(kind, 1)
        d = layer.shape[3]
        g = np.eye(d) + 0.2 * np.random.default_rng(0).standard_normal((d, d))
        inverse = np.linalg.inv(g)
        moved = Layer(layer.attention, layer.value @ inverse, g @ layer.output, layer.groups)
        metric = torch.from_numpy(inverse.T @ inverse)
        before, after = conditions(walk_of(layer)), conditions(in_metric(walk_of(moved), metric))
        for name in set(before) - {"measure"}:
            agree(after[name], before[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("factor", [1e-3, 7.0, 1e4])
def test_scale_of_transports_and_measure_does_not_matter(factor: float, unchecked: None) -> None:
    layer, measure = random_walk(3, heads=4, groups=2, d_head=2), random_measure(0, 6)
    scaled = ConnectionWalk(layer.attention, layer.value, factor * layer.output, groups=2)
    walk = EdgeWalk.from_walk(layer)
    wider = EdgeWalk(walk.tokens, walk.dst, walk.src, walk.weight, factor * walk.maps)
    for function in SCALE_FREE:
        agree(function(scaled, factor * measure), function(layer, measure), rtol=1e-8)
        agree(function(wider, factor * measure), function(walk, measure), rtol=1e-8)
    agree(1 - mass(scaled, measure), factor * (1 - mass(layer, measure)))


def test_order_of_tokens_and_heads_does_not_matter(unchecked: None) -> None:
    for seed in range(3):
        walk, measure = random_walk(seed, heads=4), random_measure(seed, 6)
        rng = np.random.default_rng(seed)
        order, heads = torch.from_numpy(rng.permutation(6)), torch.from_numpy(rng.permutation(4))
        attention = walk.attention[heads][:, order][:, :, order]
        other = ConnectionWalk(attention, walk.value[heads], walk.output[heads])
        for function in [*SCALE_FREE, mass]:
            agree(function(other, measure[order]), function(walk, measure), rtol=1e-9)


def test_defects_lie_between_zero_and_one(unchecked: None) -> None:
    for seed in range(60):
        shape = varied_shapes(seed)
        walk = random_walk(seed, causal=seed % 3 == 0, **shape)
        for measure in (None, random_measure(seed, shape["tokens"]), degree_measure(walk.effective_walk())):
            for function in SCALE_FREE:
                value = function(walk, measure)
                undefined = function is inverse_defect and seed % 3 == 0
                assert np.isnan(value) if undefined else 0 <= value <= 1, (function.__name__, value)
            assert mass(walk, measure) < 1


def test_causal_layers_have_no_way_back_but_loops() -> None:
    assert np.isnan(inverse_defect(random_walk(0, causal=True)))
    assert np.isfinite(inverse_defect(random_walk(0, causal=True, tokens=1)))  # nothing but a loop to judge by


def test_energy_does_not_feel_frames_or_scale_of_the_measure() -> None:
    walk, measure = random_walk(0), random_measure(0, 6)
    field = torch.from_numpy(np.random.default_rng(0).standard_normal((6, 8)))
    turn = random_orthogonal(0, 1, 8)[0]
    turned = ConnectionWalk(walk.attention, walk.value @ turn.T, turn @ walk.output)
    expected = dirichlet_energy(walk, field, measure)
    agree(dirichlet_energy(turned, field @ turn.T, measure), expected)
    agree(dirichlet_energy(walk, field, 9 * measure), expected)


# --- metrics ---------------------------------------------------------------------------------------------------------


def test_whitening_metric_makes_the_field_white() -> None:
    rng = np.random.default_rng(0)
    field = rng.standard_normal((50, 4)) @ rng.standard_normal((4, 4)) + 3.0
    centred = field - field.mean(0)
    covariance = sum(np.outer(x, x) for x in centred) / 50
    for ridge in (1e-3, 0.5):
        metric = whitening_metric(torch.from_numpy(field), ridge).numpy()
        agree(metric, np.linalg.inv(covariance + ridge * np.trace(covariance) / 4 * np.eye(4)), rtol=1e-9, atol=1e-10)
    metric = whitening_metric(torch.from_numpy(field), 1e-12).numpy()
    c = np.linalg.cholesky(metric)
    agree(c.T @ covariance @ c, np.eye(4), rtol=1e-6, atol=1e-6)


def test_whitening_with_fewer_tokens_than_dimensions_counts_the_rest_by_the_ridge() -> None:
    field = torch.from_numpy(np.random.default_rng(1).standard_normal((3, 6))).float()
    values = torch.linalg.eigvalsh(whitening_metric(field, 1e-2))
    centred = field.double() - field.double().mean(0)
    level = float((centred**2).sum() / 3 / 6)
    agree(values[-4:], np.full(4, 1 / (1e-2 * level)), rtol=1e-8)  # two directions with data, four without
    assert (values[:2] < 0.1 * values[-1]).all()


def test_in_metric_is_a_change_of_frames() -> None:
    """K -> G^1/2 K G^-1/2, for layers and for edges, the constant section with it."""
    metric = spd(0, 1, 8)[0]
    values, vectors = np.linalg.eigh(metric)
    root = vectors * np.sqrt(values) @ vectors.T
    plain = random_walk(1, heads=4, groups=2)
    constant = torch.arange(8.0)
    walk = ConnectionWalk(plain.attention, plain.value, plain.output, constant, groups=2)
    changed = in_metric(walk, torch.from_numpy(metric))
    big, inverse = np.kron(np.eye(6), root), np.kron(np.eye(6), np.linalg.inv(root))
    agree(changed.to_dense(), big @ walk.to_dense().numpy() @ inverse, atol=1e-11)
    agree(changed.constant, root @ constant.double().numpy())
    field = np.random.default_rng(0).standard_normal((6, 8))
    agree(changed.apply(torch.from_numpy(field @ root)), walk.apply(torch.from_numpy(field)).numpy() @ root, atol=1e-11)
    edges = in_metric(EdgeWalk.from_walk(walk), torch.from_numpy(metric))
    agree(edges.to_dense(), changed.to_dense(), atol=1e-11)
    agree(in_metric(walk, torch.eye(8)).to_dense(), walk.to_dense(), atol=1e-12)


def test_a_layer_between_token_sets_has_a_metric_too() -> None:
    walk = random_walk(0, tokens=3, sources=5)
    metric = torch.from_numpy(spd(0, 1, 8)[0])
    assert in_metric(walk, metric).attention.shape == (3, 3, 5)


# --- wrong inputs ----------------------------------------------------------------------------------------------------

LAYER, BETWEEN = random_walk(0), random_walk(0, tokens=4, sources=6)
EDGES = conditioned_walk(0, random_measure(0, 5))
FIELD = torch.ones(6, 8, dtype=torch.float64)
EYE = torch.eye(8, dtype=torch.float64)


def weights(*values: float) -> torch.Tensor:
    return torch.tensor([1.0] * (6 - len(values)) + list(values), dtype=torch.float64)


# what is attempted with each function of (walk, measure), and words its error must hold
REFUSED: dict[str, tuple[ConnectionWalk | EdgeWalk, object, tuple[str, ...]]] = {
    "between token sets": (BETWEEN, None, ("expected a walk from tokens to the same tokens", "(4, 6)", "bipartite")),
    "between token sets, measure": (BETWEEN, uniform_measure(4), ("same tokens", "(4, 6)")),
    "negative": (LAYER, weights(-1.0), ("measure", "6 positive weights", "smallest -1", "degree_measure")),
    "zero": (LAYER, weights(0.0), ("measure", "positive", "smallest 0")),
    "too long": (LAYER, torch.ones(7), ("measure", "6 positive weights", "got 7")),
    "too short": (EDGES, torch.ones(4), ("measure", "5 positive weights", "got 4")),
    "nan": (LAYER, weights(torch.nan), ("measure", "finite", "nan at [5]")),
    "infinite": (LAYER, weights(torch.inf), ("measure", "finite", "inf at [5]")),
    "column": (LAYER, torch.ones(6, 1), ("measure", "(token)", "(6, 1)")),
    "integers": (LAYER, torch.ones(6, dtype=torch.long), ("measure", "floating-point", "int64")),
    "list": (LAYER, [1.0] * 6, ("measure", "torch.Tensor", "list")),
}


def energy_of_ones(walk: ConnectionWalk | EdgeWalk, measure: torch.Tensor | None) -> float:
    return dirichlet_energy(walk, torch.ones(walk.n_src, walk.d_model), measure)


def angle_of_ones(walk: ConnectionWalk | EdgeWalk, measure: torch.Tensor | None) -> float:
    return parallel_defect(walk, torch.ones(walk.n_src, walk.d_model), measure)


FUNCTIONS = [*SCALE_FREE, mass, conditions, energy_of_ones, angle_of_ones]


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_walks_and_measures_are_refused(name: str, unchecked: None) -> None:
    walk, measure, words = REFUSED[name]
    for function in FUNCTIONS:
        with pytest.raises(ValueError, match="expected") as caught:
            function(walk, measure)
        for word in words:
            assert word in str(caught.value), (word, str(caught.value))


LEANING = EYE + 0.1 * torch.ones_like(EYE).triu(1)
PER_TOKEN = torch.eye(3, dtype=torch.float64).repeat(5, 1, 1)

WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "field too short": (lambda: dirichlet_energy(LAYER, FIELD[:5]), ("field", "(6, 8)", "got (5, 8)")),
    "field not a number": (lambda: dirichlet_energy(LAYER, FIELD * torch.nan), ("field", "finite", "nan at [0, 0]")),
    "field of zeros": (lambda: dirichlet_energy(LAYER, 0 * FIELD), ("field", "does not vanish", "zeros")),
    "field an array": (lambda: dirichlet_energy(LAYER, FIELD.numpy()), ("field", "torch.Tensor", "ndarray")),
    "field of other width": (lambda: dirichlet_energy(EDGES, FIELD), ("field", "(5, 3)", "got (6, 8)")),
    "angle of zeros": (lambda: parallel_defect(LAYER, 0 * FIELD), ("field", "does not vanish", "zeros")),
    "angle of a field too short": (lambda: parallel_defect(LAYER, FIELD[:5]), ("field", "(6, 8)", "got (5, 8)")),
    "metric not symmetric": (lambda: in_metric(LAYER, LEANING), ("metric", "symmetric positive definite")),
    "metric of a token not symmetric": (
        lambda: in_metric(EDGES, PER_TOKEN + 0.1 * torch.ones(3, 3).triu(1)),
        ("metric", "symmetric positive definite"),
    ),
    "metric negative": (lambda: in_metric(LAYER, -EYE), ("metric", "positive definite", "smallest eigenvalue -1")),
    "metric singular": (lambda: in_metric(LAYER, 0 * EYE), ("metric", "positive definite", "smallest eigenvalue 0")),
    "metric too small": (lambda: in_metric(LAYER, EYE[:7, :7]), ("metric", "8, 8", "7, 7")),
    "metric not a number": (lambda: in_metric(LAYER, torch.nan * EYE), ("metric", "finite", "nan at [0, 0]")),
    "metric a vector": (lambda: in_metric(LAYER, EYE[0]), ("metric", "d_model, d_model", "(8,)")),
    "metric of integers": (lambda: in_metric(LAYER, EYE.long()), ("metric", "floating-point", "int64")),
    "a metric per token of a layer": (
        lambda: in_metric(LAYER, EYE.repeat(6, 1, 1)),
        ("metric", "one matrix for all tokens", "one per token"),
    ),
    "too few metrics": (lambda: in_metric(EDGES, PER_TOKEN[:4]), ("metric", "5", "3, 3", "4")),
    "whitening a constant": (lambda: whitening_metric(torch.ones(5, 3)), ("field that varies", "variance 0")),
    "whitening without a ridge": (lambda: whitening_metric(FIELD + EYE[:6], 0.0), ("ridge > 0", "got 0.0")),
    "whitening, ridge negative": (lambda: whitening_metric(FIELD + EYE[:6], -1.0), ("ridge > 0", "got -1.0")),
    "whitening, ridge not a number": (lambda: whitening_metric(FIELD + EYE[:6], torch.nan), ("ridge > 0", "got nan")),
    "whitening one vector": (lambda: whitening_metric(FIELD[0]), ("field", "token, d_model", "(8,)")),
    "whitening not a number": (lambda: whitening_metric(FIELD * torch.nan), ("field", "finite", "nan")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_fields_and_metrics_are_refused(name: str, unchecked: None) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_vanishing_transports_leave_nothing_to_compare() -> None:
    zero = HeadTransports(torch.zeros(3, 3, 8), torch.zeros(3, 8, 3))
    walk = ConnectionWalk.from_transports(LAYER.attention, zero)
    assert all(np.isnan(function(walk)) for function in SCALE_FREE)
    agree(mass(walk), 1.0)
    agree(dirichlet_energy(walk, FIELD), 0.5)  # |x_i|^2 / 2 stays
    agree(parallel_defect(walk, FIELD), 1.0)
