"""Walks given edge by edge (`cwlib.edges`) against loops over edges, and what they refuse."""

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from oracles import Array, agree

from cwlib.edges import EdgeWalk
from cwlib.synthetic import random_walk
from cwlib.walk import ConnectionWalk

Edges = dict[tuple[int, int], tuple[float, Array]]  # (i, j) -> W_ij, Omega_ij

SEEDS = range(4)


def some_edges(seed: int, tokens: int = 5, d_model: int = 3) -> Edges:
    """About half of all pairs, loops among them; the last token receives nothing."""
    rng = np.random.default_rng(seed)
    pairs = [(int(i), int(j)) for i, j in np.argwhere(rng.random((tokens - 1, tokens)) < 0.5)]
    return {pair: (0.1 + rng.random(), rng.standard_normal((d_model, d_model))) for pair in pairs}


def edge_walk(edges: Edges, tokens: int = 5) -> EdgeWalk:
    dst, src = torch.tensor(list(edges)).T
    weight = torch.tensor([w for w, _ in edges.values()], dtype=torch.float64)
    return EdgeWalk(tokens, dst, src, weight, torch.from_numpy(np.array([m for _, m in edges.values()])))


def operator(edges: Edges, tokens: int = 5) -> Array:
    """K with block (i, j) at rows i d.. and columns j d.."""
    d = len(next(iter(edges.values()))[1])
    dense = np.zeros((tokens * d, tokens * d))
    for (i, j), (weight, omega) in edges.items():
        dense[i * d : (i + 1) * d, j * d : (j + 1) * d] = weight * omega
    return dense


# --- against loops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_one_step_and_the_operator(seed: int) -> None:
    edges = some_edges(seed)
    walk, field = edge_walk(edges), np.random.default_rng(seed).standard_normal((5, 3))
    step = np.zeros((5, 3))
    for (i, j), (weight, omega) in edges.items():
        step[i] += weight * omega @ field[j]
    agree(walk @ torch.from_numpy(field), step)
    rounded = field.astype(np.float32)
    agree(walk @ torch.from_numpy(rounded), (operator(edges) @ rounded.ravel()).reshape(5, 3))
    agree(walk.to_dense(), operator(edges))
    agree(walk.sparse().toarray(), operator(edges))
    assert walk.sparse().nnz == 9 * len(edges)


@pytest.mark.parametrize("seed", SEEDS)
def test_walk_matrix_support_and_transports(seed: int) -> None:
    edges = some_edges(seed)
    walk = edge_walk(edges)
    weights, norms, support = np.zeros((5, 5)), np.zeros((5, 5)), np.zeros((5, 5))
    for (i, j), (weight, omega) in edges.items():
        weights[i, j], norms[i, j], support[i, j] = weight, weight * np.linalg.norm(omega) / np.sqrt(3), 1
        agree(walk.transport(i, j), omega)
    for gauge in ("mean", "sum"):
        agree(walk.effective_walk(gauge), weights)
    agree(walk.effective_walk("norm"), norms)
    agree(walk.support, support)
    assert walk.support.dtype == torch.bool
    assert (walk.n_dst, walk.n_src, walk.d_model) == (5, 5, 3)
    assert repr(walk) == f"EdgeWalk(tokens=5, edges={len(edges)}, d_model=3)"


@pytest.mark.parametrize("seed", SEEDS)
def test_from_dense_keeps_the_edges_with_weight(seed: int) -> None:
    edges = some_edges(seed)
    weights = np.zeros((5, 5), dtype=np.float32)
    maps = np.full((5, 5, 3, 3), np.nan, dtype=np.float32)  # off the support Omega is undefined and plays no part
    for (i, j), (weight, omega) in edges.items():
        weights[i, j], maps[i, j] = weight, omega
    walk = EdgeWalk.from_dense(torch.from_numpy(weights), torch.from_numpy(maps))
    rounded = {(i, j): (float(weights[i, j]), maps[i, j].astype(np.float64)) for i, j in edges}
    assert walk.weight.dtype == walk.maps.dtype == torch.float64
    agree(walk.to_dense(), operator(rounded))


@pytest.mark.parametrize("kind", ["full", "zeros", "causal", "grouped", "one token"])
def test_the_edges_of_a_layer_are_the_layer(kind: str) -> None:
    layer = oracles.instance(kind, 0)
    walk = ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups)
    edges = EdgeWalk.from_walk(walk)
    agree(edges.to_dense(), oracles.operator(layer))
    agree(edges.effective_walk(), oracles.walk(layer, "mean"))
    agree(edges.effective_walk("norm"), oracles.walk(layer, "norm"))
    assert sorted(zip(edges.dst.tolist(), edges.src.tolist(), strict=True)) == oracles.support(layer)
    for i, j in oracles.support(layer):
        agree(edges.transport(i, j), oracles.transport(layer, i, j))


@pytest.mark.parametrize("seed", SEEDS)
def test_change_of_frames_is_conjugation(seed: int) -> None:
    edges = some_edges(seed)
    frames = np.random.default_rng(seed + 50).standard_normal((5, 3, 3))
    g = np.zeros((15, 15))
    for i in range(5):
        g[3 * i : 3 * i + 3, 3 * i : 3 * i + 3] = frames[i]
    changed = edge_walk(edges).change_frames(torch.from_numpy(frames))
    agree(changed.to_dense(), g @ operator(edges) @ np.linalg.inv(g), rtol=1e-8, atol=1e-9)
    agree(changed.effective_walk(), edge_walk(edges).effective_walk())
    back = changed.change_frames(torch.from_numpy(np.linalg.inv(frames)))
    agree(back.to_dense(), operator(edges), rtol=1e-8, atol=1e-9)


def test_the_order_of_edges_does_not_matter() -> None:
    edges = some_edges(1)
    other = edge_walk(dict(reversed(edges.items())))
    field = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 3)))
    agree(other @ field, edge_walk(edges) @ field)
    agree(other.to_dense(), operator(edges))


def test_walk_is_immutable() -> None:
    with pytest.raises(AttributeError):
        edge_walk(some_edges(0)).weight = torch.ones(1)


# --- wrong inputs ----------------------------------------------------------------------------------------------------


def cycle_of(**changes: object) -> EdgeWalk:
    """Edges 1 -> 0, 2 -> 1, 0 -> 2 with something changed."""
    parts: dict = {
        "tokens": 3,
        "dst": torch.tensor([0, 1, 2]),
        "src": torch.tensor([1, 2, 0]),
        "weight": torch.ones(3, dtype=torch.float64),
        "maps": torch.eye(2, dtype=torch.float64).repeat(3, 1, 1),
    }
    return EdgeWalk(**parts | changes)


def eyes(*shape: int) -> torch.Tensor:
    return torch.eye(2, dtype=torch.float64).expand(*shape, 2, 2)


ONES = torch.ones(2, 2, dtype=torch.float64)

# what is attempted, and words its error must hold: the argument, what was expected, what came
WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "an edge twice": (
        lambda: cycle_of(dst=torch.tensor([0, 0, 2]), src=torch.tensor([1, 1, 0])),
        ("dst, src", "every edge once", "twice"),
    ),
    "index too large": (lambda: cycle_of(dst=torch.tensor([0, 1, 3])), ("dst", "[0, 3)", "got 0 to 3")),
    "index negative": (lambda: cycle_of(src=torch.tensor([1, -1, 0])), ("src", "[0, 3)", "got -1 to 1")),
    "no tokens": (lambda: cycle_of(tokens=0), ("dst", "[0, 0)", "got 0 to 2")),
    "weight of zero": (lambda: cycle_of(weight=torch.tensor([1.0, 0, 1])), ("weight", "positive", "got 0", "leave")),
    "weight negative": (lambda: cycle_of(weight=torch.tensor([1.0, -2, 1])), ("weight", "positive", "got -2")),
    "weight not a number": (lambda: cycle_of(weight=torch.tensor([1.0, torch.nan, 1])), ("weight", "nan at [1]")),
    "weight of integers": (lambda: cycle_of(weight=torch.ones(3, dtype=torch.long)), ("weight", "floating", "int64")),
    "weight meta": (lambda: cycle_of(weight=torch.ones(3, device="meta")), ("weight", "holds numbers", "meta", "load")),
    "maps sparse": (lambda: cycle_of(maps=eyes(3).to_sparse()), ("maps", "dense", "sparse_coo", ".to_dense()")),
    "source sparse": (lambda: cycle_of(src=torch.tensor([1, 2, 0]).to_sparse()), ("src", "dense", ".to_dense()")),
    "source meta": (lambda: cycle_of(src=torch.zeros(3, dtype=int, device="meta")), ("src", "numbers", "meta", "load")),
    "weight a list": (lambda: cycle_of(weight=[1.0, 1.0, 1.0]), ("weight", "torch.Tensor", "list")),
    "map infinite": (lambda: cycle_of(maps=torch.inf * ONES.repeat(3, 1, 1)), ("maps", "finite", "inf at [0, 0, 0]")),
    "maps not square": (lambda: cycle_of(maps=torch.ones(3, 2, 3)), ("maps", "square", "(3, 2, 3)")),
    "too few maps": (lambda: cycle_of(maps=eyes(2)), ("maps", "3 weights", "(2, 2, 2)")),
    "too few sources": (lambda: cycle_of(src=torch.tensor([1, 2])), ("3 weights", "3 dst, 2 src")),
    "no edges": (lambda: cycle_of(weight=torch.zeros(0)), ("weight", "non-empty", "(0,)")),
    "dense walk not square": (lambda: EdgeWalk.from_dense(torch.ones(2, 3), eyes(2, 3)), ("walk", "square", "(2, 3)")),
    "dense walk negative": (lambda: EdgeWalk.from_dense(-ONES, eyes(2, 2)), ("weight", "positive", "got -1")),
    "dense walk not a number": (
        lambda: EdgeWalk.from_dense(torch.nan * ONES, eyes(2, 2)),
        ("weight", "finite", "nan"),
    ),
    "dense walk without edges": (lambda: EdgeWalk.from_dense(0 * ONES, eyes(2, 2)), ("weight", "non-empty", "(0,)")),
    "layer between token sets": (
        lambda: EdgeWalk.from_walk(random_walk(0, tokens=4, sources=6)),
        ("walk", "as many destinations as sources", "4 and 6"),
    ),
    "gauge unknown": (lambda: cycle_of().effective_walk("max"), ("gauge", "mean, sum, norm", "'max'")),
    "edge without weight": (lambda: cycle_of().transport(0, 2), ("dst=0, src=2", "W > 0, got 0", "walk.support")),
    "dst out of range": (lambda: cycle_of().transport(3, 0), ("dst", "token index below 3", "from -3", "got 3")),
    "src out of range": (lambda: cycle_of().transport(0, -4), ("src", "token index below 3", "from -3", "got -4")),
    "half an index": (lambda: cycle_of().transport(0, 0.5), ("src", "integer", "below 3", "got 0.5")),
    "field of other shape": (lambda: cycle_of() @ torch.ones(2, 3), ("field", "(3, 2)", "got (2, 3)")),
    "field not a number": (lambda: cycle_of() @ torch.full((3, 2), torch.nan), ("field", "finite", "nan at [0, 0]")),
    "one frame for all": (lambda: cycle_of().change_frames(ONES), ("frames", "token, d_model, d_model", "(2, 2)")),
    "too few frames": (lambda: cycle_of().change_frames(eyes(2)), ("frames", "(3, 2, 2)", "got (2, 2, 2)")),
    "frame not a number": (lambda: cycle_of().change_frames(torch.nan * eyes(3)), ("frames", "finite", "nan")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str, unchecked: None) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_tokens_are_counted_from_the_end_as_in_a_layer(unchecked: None) -> None:
    layer = random_walk(0)
    agree(EdgeWalk.from_walk(layer).transport(-1, np.int64(0)), layer.transport(-1, np.int64(0)))
    agree(layer.transport(-1, 0), layer.transport(5, 0))
