"""Numbers per edge and per token (`cwlib.blocks`), factored and explicit, against loops over dense transports."""

import numpy as np
import oracles
import pytest
import torch
from oracles import KINDS, Array, Layer, agree

from cwlib import kernels
from cwlib.blocks import Blocks, FactoredBlocks
from cwlib.cores import HeadTransports
from cwlib.edges import EdgeWalk, ExplicitBlocks
from cwlib.synthetic import random_walk
from cwlib.walk import ConnectionWalk

Maps = dict[tuple[int, int], Array]  # Omega_ij of the edges that carry weight

SQUARE = [kind for kind in KINDS if not {"n_dst", "n_src"} & set(KINDS[kind])]
RECTANGULAR = [kind for kind in KINDS if kind not in SQUARE]
SEEDS = range(2)


def walk_of(layer: Layer) -> ConnectionWalk:
    return ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups)


def maps_of(layer: Layer) -> Maps:
    return {(i, j): oracles.transport(layer, i, j) for i, j in oracles.support(layer)}


def sparse_maps(seed: int, tokens: int = 6, d_model: int = 3) -> tuple[Maps, Array]:
    """Transports and weights on about half of all pairs, loops and one-way edges among them; not square-symmetric."""
    rng = np.random.default_rng(seed)
    kept = np.argwhere(rng.random((tokens, tokens)) < 0.5)
    maps = {(int(i), int(j)): rng.standard_normal((d_model, d_model)) for i, j in kept}
    return maps, np.array(
        [[rng.random() + 0.1 if (i, j) in maps else 0.0 for j in range(tokens)] for i in range(tokens)]
    )


def explicit(maps: Maps, weights: Array) -> EdgeWalk:
    pairs = list(maps)
    np.random.default_rng(len(pairs)).shuffle(pairs)  # the order of edges must not matter
    dst, src = torch.tensor(pairs).T
    weight = torch.tensor([weights[pair] for pair in pairs])
    return EdgeWalk(len(weights), dst, src, weight, torch.from_numpy(np.array([maps[tuple(pair)] for pair in pairs])))


# --- oracles ---------------------------------------------------------------------------------------------------------


def per_edge(maps: Maps, shape: tuple[int, int]) -> dict[str, Array]:
    """Norms and traces of the definitions, edge by edge; zero without an edge, or without a way back."""
    result = {name: np.zeros(shape) for name in ("squares", "quartics", "pairings", "round_trips")}
    for (i, j), omega in maps.items():
        result["squares"][i, j] = np.trace(omega.T @ omega)
        result["quartics"][i, j] = np.trace(omega.T @ omega @ omega.T @ omega)
        if shape[0] == shape[1] and (j, i) in maps:
            around = omega @ maps[j, i]
            result["pairings"][i, j] = np.trace(around)
            result["round_trips"][i, j] = np.trace(around.T @ around)
    return result


def per_token(maps: Maps, flow: Array) -> list[Array]:
    """B_j = sum_i f_ij Omega_ij^T Omega_ij for every source j."""
    d = next(iter(maps.values())).shape[1]
    metrics = [np.zeros((d, d)) for _ in range(flow.shape[1])]
    for (i, j), omega in maps.items():
        metrics[j] += flow[i, j] * omega.T @ omega
    return metrics


def assert_blocks(blocks: Blocks, maps: Maps, flow: Array, field: Array, rtol: float = 1e-10) -> None:
    """Assert every attribute but the ranks, to rounding of the largest entry (transports may cancel)."""
    square = flow.shape[0] == flow.shape[1]
    for name, expected in per_edge(maps, flow.shape).items():
        if square or name in ("squares", "quartics"):
            agree(getattr(blocks, name), expected, rtol=rtol, atol=rtol * abs(expected).max())
    metrics = per_token(maps, flow)
    traces, squares = blocks.incoming(torch.from_numpy(flow))
    agree(traces, [np.trace(b) for b in metrics], rtol=rtol)
    agree(squares, [(b * b).sum() for b in metrics], rtol=rtol)
    energy = blocks.incoming_energy(torch.from_numpy(flow), torch.from_numpy(field))
    agree(energy, [x @ b @ x for x, b in zip(field, metrics, strict=True)], rtol=rtol)


def draw(seed: int, maps: Maps, shape: tuple[int, int]) -> tuple[Array, Array]:
    """A flow on the edges, and a field."""
    rng = np.random.default_rng(seed)
    flow = np.array([[rng.random() if (i, j) in maps else 0.0 for j in range(shape[1])] for i in range(shape[0])])
    return flow, rng.standard_normal((shape[1], next(iter(maps.values())).shape[1]))


# --- against oracles -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SQUARE + RECTANGULAR)
def test_factored_blocks_against_dense_transports(kind: str) -> None:
    for seed in SEEDS:
        layer = oracles.instance(kind, seed)
        maps, shape = maps_of(layer), layer.attention.shape[1:]
        flow, field = draw(seed, maps, shape)
        blocks = walk_of(layer).blocks
        assert isinstance(blocks, FactoredBlocks)
        assert_blocks(blocks, maps, flow, field)
        ranks = [[oracles.rank_bound(layer, i, j) for j in range(shape[1])] for i in range(shape[0])]
        agree(blocks.ranks, ranks)


@pytest.mark.parametrize("kind", ["full", "grouped causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_read_exactly(kind: str, dtype: torch.dtype) -> None:
    """Float64 from the first product on: the rounding of the inputs is the only one."""
    layer = oracles.instance(kind, 5)
    tensors = [torch.from_numpy(part).to(dtype) for part in layer.parts]
    rounded = Layer(*(t.double().numpy() for t in tensors), groups=layer.groups)
    maps, shape = maps_of(rounded), rounded.attention.shape[1:]
    flow, field = draw(0, maps, shape)
    walk = ConnectionWalk(*tensors, groups=layer.groups)
    assert_blocks(walk.blocks, maps, flow, field)
    assert walk.blocks.squares.dtype == walk.blocks.round_trips.dtype == torch.float64


@pytest.mark.parametrize("seed", range(4))
def test_explicit_blocks_against_dense_transports(seed: int) -> None:
    maps, weights = sparse_maps(seed)
    assert any((j, i) not in maps for i, j in maps) and any((j, i) in maps for i, j in maps if i != j)
    flow, field = draw(seed, maps, weights.shape)
    blocks = explicit(maps, weights).blocks
    assert isinstance(blocks, ExplicitBlocks)
    assert_blocks(blocks, maps, flow, field)
    agree(blocks.ranks, np.where(weights > 0, 3.0, 0.0))


@pytest.mark.parametrize("kind", ["full", "grouped zeros", "causal", "one head"])
def test_explicit_and_factored_agree_on_one_layer(kind: str) -> None:
    layer = oracles.instance(kind, 3)
    walk = walk_of(layer)
    edges = EdgeWalk.from_walk(walk)
    flow, field = draw(1, maps_of(layer), layer.attention.shape[1:])
    for name in ("squares", "quartics", "pairings", "round_trips"):
        factored = getattr(walk.blocks, name)
        agree(getattr(edges.blocks, name), factored, atol=1e-10 * float(factored.abs().max()))
    flow, field = torch.from_numpy(flow), torch.from_numpy(field)
    for left, right in zip(edges.blocks.incoming(flow), walk.blocks.incoming(flow), strict=True):
        agree(left, right)
    agree(edges.blocks.incoming_energy(flow, field), walk.blocks.incoming_energy(flow, field))


# --- what they promise -----------------------------------------------------------------------------------------------


def test_one_way_edges_have_no_return() -> None:
    blocks = random_walk(2, causal=True).blocks
    for name in ("pairings", "round_trips"):
        matrix = getattr(blocks, name)
        agree(matrix - torch.diag(matrix.diagonal()), np.zeros((6, 6)))
        assert (matrix.diagonal() != 0).all()


def test_there_and_back_does_not_depend_on_the_end_for_traces() -> None:
    """tr(Omega_ij Omega_ji) is symmetric in i and j; the norm of the product is not."""
    blocks = random_walk(4).blocks
    agree(blocks.pairings, blocks.pairings.T)
    assert not torch.allclose(blocks.round_trips, blocks.round_trips.T, rtol=1e-2)


def test_ranks_count_value_heads_once() -> None:
    """Under grouped-query attention the query heads of a group share V, and with it the rank."""
    layer = oracles.instance("grouped", 0)
    assert float(walk_of(layer).blocks.ranks.max()) == min(2 * layer.shape[4], layer.shape[3])
    single = layer.attention.copy()
    single[1:, 0] = 0.0
    single[1:, 0, 1] = 1.0  # heads 1.. look at token 1 only, head 0 at all
    ranks = walk_of(Layer(single, layer.value, layer.output, layer.groups)).blocks.ranks
    assert ranks[0, 0] == layer.shape[4]


def test_ranks_bound_the_ranks_of_transports() -> None:
    for kind in ("thin heads", "grouped zeros", "d_head above d_model"):
        layer = oracles.instance(kind, 1)
        ranks = walk_of(layer).blocks.ranks
        for (i, j), omega in maps_of(layer).items():
            assert np.linalg.matrix_rank(omega) <= ranks[i, j]


def test_pieces_of_rows_and_of_edges_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of ten tokens at a time, and forms of degree four over about half of their edges at a time."""
    walk = random_walk(0, heads=4, tokens=10, d_model=3, d_head=1)
    whole = random_walk(0, heads=4, tokens=10, d_model=3, d_head=1).blocks
    names = ("squares", "quartics", "pairings", "round_trips")
    at_once = [getattr(whole, name) for name in names]
    assert len(list(kernels.pieces(walk.attention))) == 1
    monkeypatch.setattr(kernels, "WORKSPACE", 3 * 32 * 4 * 10)
    assert len(list(kernels.pieces(walk.attention))) == 4
    for name, expected in zip(names, at_once, strict=True):
        agree(getattr(walk.blocks, name), expected)
    heads = np.einsum("hda,hae->hde", walk.output.numpy(), walk.value.numpy())
    weights = walk.attention.numpy() / walk.attention.numpy().sum(0)
    omega = 4 * np.einsum("hij,hde->ijde", weights, heads)
    around = omega @ omega.transpose(1, 0, 2, 3)
    agree(walk.blocks.round_trips, (around**2).sum((2, 3)), atol=1e-9)
    agree(walk.blocks.quartics, ((omega.transpose(0, 1, 3, 2) @ omega) ** 2).sum((2, 3)), atol=1e-9)


def test_nothing_of_size_d_model_squared_is_formed() -> None:
    """One map between fibres of this dimension would take 80 GB (T9)."""
    d_model = 100_000
    walk = random_walk(0, heads=2, tokens=3, d_model=d_model, d_head=2)
    blocks, flow = walk.blocks, walk.effective_walk()
    field = torch.ones(3, d_model, dtype=torch.float64)
    numbers = [blocks.squares, blocks.quartics, blocks.pairings, blocks.round_trips, *blocks.incoming(flow)]
    assert all(x.isfinite().all() for x in [*numbers, blocks.incoming_energy(flow, field)])


def test_vanishing_transports_give_zeros() -> None:
    zero = HeadTransports(torch.zeros(2, 3, 8), torch.zeros(2, 8, 3))
    blocks = ConnectionWalk.from_transports(random_walk(0, heads=2).attention, zero).blocks
    for name in ("squares", "quartics", "pairings", "round_trips"):
        agree(getattr(blocks, name), np.zeros((6, 6)))
