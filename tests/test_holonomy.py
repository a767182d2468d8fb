"""Holonomy and parallel fields (`cwlib.holonomy`, T8) against products of dense maps and least squares."""

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from oracles import Array, Layer, agree

from cwlib import metrics
from cwlib.edges import EdgeWalk
from cwlib.holonomy import cycle_defect, holonomy, parallel_fields, triangle_defect
from cwlib.laplacian import dirichlet_energy
from cwlib.measures import uniform_measure
from cwlib.spectra import generator, walk_operator
from cwlib.synthetic import (
    conditioned_walk,
    cycle_walk,
    flat_walk,
    isometric_transports,
    random_measure,
    random_orthogonal,
    random_walk,
)
from cwlib.walk import ConnectionWalk


def walk_of(layer: Layer) -> ConnectionWalk:
    return ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups)


def rotation(angle: float) -> torch.Tensor:
    c, s = np.cos(angle), np.sin(angle)
    return torch.tensor([[c, -s], [s, c]], dtype=torch.float64)


def around(maps: dict[tuple[int, int], Array], cycle: list[int]) -> Array:
    """Product along the cycle; where an edge is missing, the transpose of its reverse."""
    product = np.eye(len(next(iter(maps.values()))))
    for step in range(len(cycle)):
        i, j = cycle[step], cycle[(step + 1) % len(cycle)]
        product = product @ (maps[i, j] if (i, j) in maps else maps[j, i].T)
    return product


def defect(matrix: Array, rank: int) -> float:
    """min_{s >= 0} |s H - Pi| / |Pi|, Pi the projection on the row space."""
    rows = np.linalg.svd(matrix)[2][:rank]
    projection = rows.T @ rows
    scale = max(np.linalg.lstsq(matrix.reshape(-1, 1), projection.ravel(), rcond=None)[0][0], 0.0)
    return float(np.linalg.norm(scale * matrix - projection) / np.linalg.norm(projection))


# --- holonomy --------------------------------------------------------------------------------------------------------

CYCLES = [[0], [1, 0], [0, 1, 2], [2, 1, 0], [0, 2, 1, 2], [1, 1, 0]]


@pytest.mark.parametrize("kind", ["full", "grouped", "causal", "grouped causal", "heads fill d_model", "one head"])
def test_holonomy_of_a_layer_is_the_product_of_transports(kind: str) -> None:
    for seed in range(2):
        layer = oracles.instance(kind, seed)
        walk = walk_of(layer)
        maps = {(i, j): oracles.transport(layer, i, j) for i, j in oracles.support(layer)}
        for cycle in CYCLES:
            expected = around(maps, cycle)
            agree(holonomy(walk, cycle), expected, atol=1e-10 * np.abs(expected).max())
            # generic maps lose no rank but what their heads lack
            steps = zip(cycle, cycle[1:] + cycle[:1], strict=True)
            rank = min(max(oracles.rank_bound(layer, i, j), oracles.rank_bound(layer, j, i)) for i, j in steps)
            agree(cycle_defect(walk, cycle), defect(expected, rank), rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_holonomy_of_an_edge_walk_with_one_way_edges(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept = rng.random((4, 4)) < 0.6
    pairs = [
        (i, j) for i in range(4) for j in range(4) if i == j or (kept[i, j] if kept[i, j] or kept[j, i] else i > j)
    ]
    assert len(pairs) < 16
    maps = {pair: rng.standard_normal((3, 3)) for pair in pairs}
    dst, src = torch.tensor(pairs).T
    weight = torch.from_numpy(rng.random(len(pairs)) + 0.1)
    walk = EdgeWalk(4, dst, src, weight, torch.from_numpy(np.array(list(maps.values()))))
    for cycle in [*CYCLES, [3, 2, 1, 0]]:
        expected = around(maps, cycle)
        agree(holonomy(walk, cycle), expected, atol=1e-11)
        agree(cycle_defect(walk, cycle), defect(expected, 3), rtol=1e-8, atol=1e-7)


def test_going_round_the_cycle_walk_is_the_map_it_was_built_from() -> None:
    for tokens in (3, 5):
        turn = torch.tensor([[1.0, 2.0], [-0.5, 3.0]], dtype=torch.float64)
        walk = cycle_walk(tokens, turn)
        there = [0, *range(tokens - 1, 0, -1)]
        agree(holonomy(walk, there), turn)
        agree(holonomy(walk, there[::-1]), np.linalg.inv(turn.numpy()))  # tokens 1, 2, ..., n-1, 0
        agree(holonomy(walk, there * 2), turn @ turn)


@pytest.mark.parametrize("angle", [0.0, 0.3, np.pi / 2, 2.0, np.pi])
def test_defect_of_a_rotation_is_its_sine(angle: float) -> None:
    """<R, I>/2 = cos; beyond a right angle no nonnegative scale helps."""
    found = cycle_defect(cycle_walk(4, rotation(angle)), [0, 3, 2, 1])
    agree(found, np.sin(angle) if angle < np.pi / 2 else 1.0, atol=1e-7)
    agree(cycle_defect(cycle_walk(4, 5 * rotation(angle)), [0, 3, 2, 1]), found, atol=1e-7)


def test_adjoint_of_a_missing_edge_is_its_inverse_for_isometries_only() -> None:
    onward = torch.eye(3, dtype=torch.float64).roll(1, 0)
    turn = rotation(0.7).expand(3, 3, 2, 2).clone()
    agree(cycle_defect(EdgeWalk.from_dense(onward, turn), [0, 2]), 0.0, atol=1e-7)
    shear = torch.tensor([[1.0, 2.0], [0.0, 1.0]], dtype=torch.float64).expand(3, 3, 2, 2).clone()
    assert cycle_defect(EdgeWalk.from_dense(onward, shear), [0, 2]) > 0.1


def test_change_of_frames_conjugates_holonomy() -> None:
    walk = conditioned_walk(0, random_measure(0, 4))
    frames = torch.eye(3) + 0.3 * torch.from_numpy(np.random.default_rng(0).standard_normal((4, 3, 3)))
    for cycle in CYCLES:
        g = frames[cycle[0]].numpy()
        agree(
            holonomy(walk.change_frames(frames), cycle),
            g @ holonomy(walk, cycle).numpy() @ np.linalg.inv(g),
            atol=1e-9,
        )
    turned = walk.change_frames(random_orthogonal(1, 4, 3))
    for cycle in CYCLES:
        agree(cycle_defect(turned, cycle), cycle_defect(walk, cycle), atol=1e-7)


def test_where_the_cycle_starts_does_not_matter_to_isometries() -> None:
    walk = conditioned_walk(2, random_measure(0, 4))
    for start in range(3):
        cycle = [1, 3, 2][start:] + [1, 3, 2][:start]
        agree(cycle_defect(walk, cycle), cycle_defect(walk, [1, 3, 2]))
    assert cycle_defect(walk, [1, 3, 2]) > 0.1


def test_flat_connections_have_no_holonomy() -> None:
    frames = torch.eye(3) + 0.3 * torch.from_numpy(np.random.default_rng(1).standard_normal((4, 3, 3)))
    walk = flat_walk(0, random_measure(0, 4), frames)
    for cycle in CYCLES:
        agree(holonomy(walk, cycle), np.eye(3), atol=1e-10)
    agree(triangle_defect(walk, 0, 1, 2), 0.0, atol=1e-10)


def test_partial_isometries_are_judged_on_their_support() -> None:
    """A projection transports nothing around wrongly: what it keeps it leaves in place."""
    keep = torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    walk = EdgeWalk.from_dense(torch.ones(2, 2, dtype=torch.float64) / 2, keep.expand(2, 2, 3, 3).clone())
    agree(cycle_defect(walk, [0, 1]), 0.0, atol=1e-7)


def test_vanishing_holonomy_has_no_defect() -> None:
    zero = EdgeWalk.from_dense(torch.ones(3, 3, dtype=torch.float64) / 3, torch.zeros(3, 3, 2, 2, dtype=torch.float64))
    assert np.isnan(cycle_defect(zero, [0, 1]))
    assert np.isnan(triangle_defect(zero, 0, 1, 2))


def test_one_isometric_head_has_the_holonomy_of_its_powers() -> None:
    transports = isometric_transports(0, heads=1, d_model=3)
    walk = ConnectionWalk.from_transports(random_walk(0, heads=1).attention, transports)
    t = transports.output[0].numpy()
    for length in (1, 2, 3):
        agree(holonomy(walk, list(range(length))), np.linalg.matrix_power(t, length), atol=1e-12)


# --- triangles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "causal", "grouped"])
def test_triangle_defect(kind: str) -> None:
    layer = oracles.instance(kind, 2)
    walk = walk_of(layer)
    for triangle in ([2, 1, 0], [2, 0, 0], [1, 1, 1], [2, 2, 1]):
        agree(triangle_defect(walk, *triangle), oracles.holonomy_defect(layer, [triangle]))


def test_triangles_of_a_layer_average_to_its_holonomy_defect() -> None:
    walk = random_walk(0, tokens=3, causal=True)
    triangles = torch.tensor([[2, 1, 0]])
    agree(metrics.holonomy_defect(walk, triangles), triangle_defect(walk, 2, 1, 0))


def test_triangle_defect_does_not_feel_scale_sign_or_rotations() -> None:
    walk = conditioned_walk(0, random_measure(0, 4), inverse=False)
    expected = triangle_defect(walk, 0, 1, 2)
    assert 0 < expected <= 1
    factors = torch.from_numpy(np.random.default_rng(0).choice([-2.0, 0.5, 3.0], len(walk.weight)))
    scaled = EdgeWalk(4, walk.dst, walk.src, walk.weight, factors[:, None, None] * walk.maps)
    for other in (scaled, walk.change_frames(random_orthogonal(3, 4, 3))):
        agree(triangle_defect(other, 0, 1, 2), expected)


# --- parallel fields -------------------------------------------------------------------------------------------------


def assert_parallel(walk: ConnectionWalk | EdgeWalk, fields: torch.Tensor, measure: torch.Tensor) -> None:
    """Orthonormal in l2(pi), and kept by the transport of every edge."""
    x, pi = fields.numpy(), measure.numpy() / measure.numpy().sum()
    gram = [[sum(p * a @ b for p, a, b in zip(pi, u, v, strict=True)) for v in x] for u in x]
    agree(np.reshape(gram, (len(x), len(x))), np.eye(len(x)), atol=1e-10)
    for i, j in walk.support.nonzero().tolist():
        for field in x:
            agree(walk.transport(i, j).numpy() @ field[j], field[i], atol=1e-6)


def test_parallel_fields_of_a_flat_connection_are_its_frames() -> None:
    """d of them, x_i = g_i v, whether or not the frames are isometric."""
    measure = random_measure(0, 5)
    skewed = torch.eye(3) + 0.3 * torch.from_numpy(np.random.default_rng(1).standard_normal((5, 3, 3)))
    for frames in (random_orthogonal(0, 5, 3), skewed.double()):
        walk = flat_walk(0, measure, frames)
        fields = parallel_fields(walk, measure)
        assert fields.shape == (3, 5, 3)
        assert_parallel(walk, fields, measure)
        vectors = np.linalg.inv(frames.numpy()) @ fields.numpy()[..., None]  # g_i^-1 x_i = v for every token
        agree(vectors, np.broadcast_to(vectors[:, :1], vectors.shape), atol=1e-7)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_every_component_has_its_own(parts: int) -> None:
    tokens = 2 * parts
    block = torch.block_diag(*[torch.full((2, 2), 0.5, dtype=torch.float64)] * parts)
    frames = random_orthogonal(parts, tokens, 2)
    maps = torch.einsum("iab,jcb->ijac", frames, frames)
    walk = EdgeWalk.from_dense(block, maps)
    fields = parallel_fields(walk)
    assert fields.shape == (2 * parts, tokens, 2)
    assert_parallel(walk, fields, uniform_measure(tokens))


def test_curved_connections_have_fewer() -> None:
    assert len(parallel_fields(conditioned_walk(0, random_measure(0, 5)), random_measure(0, 5))) == 0
    # a turn about an axis leaves the axis
    turn = torch.block_diag(rotation(1.0), torch.ones(1, 1, dtype=torch.float64))
    walk = cycle_walk(5, turn)
    fields = parallel_fields(walk)
    assert fields.shape == (1, 5, 3)
    assert_parallel(walk, fields, uniform_measure(5))
    agree(fields[0, :, 2].abs(), np.ones(5))


def test_parallel_fields_of_a_layer() -> None:
    """Two heads T/2 on blocks of two tokens: Omega = T, and x_i = T x_j asks for eigenvectors of eigenvalue one."""
    identity = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    attention = torch.block_diag(*[torch.full((2, 2), 0.5, dtype=torch.float64)] * 2).repeat(2, 1, 1)
    for diagonal, dimension in (((1.0, 1.0, 1.0), 6), ((1.0, -1.0, 1.0), 4), ((-1.0, -1.0, -1.0), 0)):
        t = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        walk = ConnectionWalk(attention, identity, t.repeat(2, 1, 1) / 2)
        agree(walk.transport(0, 1), t)
        fields = parallel_fields(walk)
        assert fields.shape == (dimension, 4, 3)
        assert_parallel(walk, fields, uniform_measure(4))
    assert len(parallel_fields(random_walk(0, causal=True))) == 0


def test_parallel_fields_span_the_kernel_of_the_generator() -> None:
    """T4 c: for a connection Laplacian the two spaces are one."""
    measure = random_measure(1, 4)
    for walk in (flat_walk(0, measure, random_orthogonal(0, 4, 3)), conditioned_walk(0, measure)):
        laplacian = np.eye(12) - walk.to_dense().numpy()
        s = np.linalg.svd(laplacian, compute_uv=False)
        fields = parallel_fields(walk, measure)
        assert len(fields) == (s < 1e-10).sum()
        for field in fields:
            agree(laplacian @ field.numpy().ravel(), np.zeros(12), atol=1e-8)


def test_tolerance_is_energy_over_size() -> None:
    walk, measure = conditioned_walk(3, random_measure(0, 4)), random_measure(0, 4)
    half = parallel_fields(walk, measure, tolerance=0.7)
    assert 0 < len(half) < len(parallel_fields(walk, measure, tolerance=2.1)) == 12
    assert all(dirichlet_energy(walk, field, measure) <= 0.7 + 1e-12 for field in half)
    symmetric = generator(walk_operator(walk, measure)).matmat(np.eye(12))
    agree(symmetric, symmetric.T)
    assert len(half) == (np.linalg.eigvalsh(symmetric) <= 0.7).sum()


# --- wrong inputs ----------------------------------------------------------------------------------------------------


def path() -> EdgeWalk:
    """Edges 1 -> 0 and 2 -> 1; token 3 stands alone."""
    maps = torch.eye(2, dtype=torch.float64).repeat(2, 1, 1)
    return EdgeWalk(4, torch.tensor([0, 1]), torch.tensor([1, 2]), torch.ones(2, dtype=torch.float64), maps)


WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "no tokens": (lambda: holonomy(random_walk(0), []), ("cycle", "at least one token", "none")),
    "defect of no tokens": (lambda: cycle_defect(random_walk(0), []), ("cycle", "at least one token", "none")),
    "not joined": (lambda: holonomy(path(), [0, 1, 2]), ("edge (dst=", "W > 0, got 0", "support")),
    "alone": (lambda: cycle_defect(path(), [3, 0]), ("W > 0, got 0", "support")),
    "loop without weight": (lambda: holonomy(path(), [0]), ("dst=0, src=0", "W > 0, got 0")),
    "token out of range": (lambda: holonomy(random_walk(0), [0, 9]), ("token index below 6", "got 9")),
    "triangle not closed": (lambda: triangle_defect(path(), 0, 1, 2), ("dst=0, src=2", "W > 0, got 0")),
    "triangle out of range": (lambda: triangle_defect(random_walk(0), 0, 1, 9), ("token index below 6", "got 9")),
    "triangle against time": (
        lambda: triangle_defect(random_walk(0, causal=True), 0, 1, 2),
        ("dst=0, src=1", "W > 0, got 0"),
    ),
    "too large": (
        lambda: parallel_fields(random_walk(0, heads=1, d_model=800, d_head=1)),
        ("walk", "at most 4096, got 4800", "extreme_eigenvalues"),
    ),
    "between token sets": (
        lambda: parallel_fields(random_walk(0, tokens=4, sources=6)),
        ("from tokens to the same tokens", "(4, 6)"),
    ),
    "measure negative": (
        lambda: parallel_fields(conditioned_walk(0, random_measure(0, 5)), -random_measure(0, 5)),
        ("measure", "5 positive weights", "smallest -"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str, unchecked: None) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
