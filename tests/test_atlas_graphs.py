"""Systems on graphs, meshes and sheaves: what their checks say by other routes, and pairs that are slightly wrong."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.mathtext import MathTextParser

from cwlib.atlas import SYSTEMS
from cwlib.atlas_geometry import icosahedron
from cwlib.atlas_pair import Pair, Placed, defects
from cwlib.edges import EdgeWalk
from cwlib.holonomy import holonomy, parallel_fields
from cwlib.laplacian import conditions
from cwlib.measures import stationary_measure
from cwlib.synthetic import random_metrics

NAMES = [
    *("Graph attention network", "Graph Transformer Network", "Spectral attention network"),
    *("Geometric deep learning", "Gauge equivariant CNN"),
    *("Neural sheaf diffusion", "Sheaf network with connection Laplacian"),
]


def edge_walk(placed: Placed) -> EdgeWalk:
    return EdgeWalk.from_dense(placed.pair.weight, placed.pair.maps)


def check(placed: Placed, words: str) -> float:
    (found,) = [each.residual for each in placed.checks if words in each.name]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_other_seeds_pass_too(name: str) -> None:
    for seed in range(10, 18):
        placed = SYSTEMS[name].place(seed)
        assert placed.residual <= 1e-10
        assert not [each for each in placed.checks if not each.passed]


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_that_is_slightly_wrong_is_not_the_system(name: str) -> None:
    placed = SYSTEMS[name].place(3)
    pair = placed.pair
    weight = pair.weight.clone()
    first, second = pair.support[0].nonzero().flatten()[:2]
    weight[0, [first, second]] += torch.tensor([0.01, -0.01], dtype=torch.float64)
    turned = pair.maps.clone()
    turned[0, first] = -turned[0, first]
    for wrong in (Pair(weight, pair.maps), Pair(pair.weight, turned)):
        assert replace(placed, pair=wrong).residual > 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_entries_are_short_and_can_be_typeset(name: str) -> None:
    entry = SYSTEMS[name]
    assert len(entry.walk) <= 90 and len(entry.transport) <= 90 and len(entry.remark) <= 160
    for text in (entry.walk, entry.transport):
        MathTextParser("agg").parse(text)


@pytest.mark.parametrize("name", ["Gauge equivariant CNN", "Sheaf network with connection Laplacian"])
def test_curved_systems_are_connection_laplacians_without_parallel_fields(name: str) -> None:
    walk = edge_walk(SYSTEMS[name].place(1))
    found = conditions(walk)
    assert found.pop("measure") == "stationary"
    assert max(abs(value) for value in found.values()) < 1e-7
    assert len(parallel_fields(walk)) == 0


def test_icosahedron_is_an_oriented_sphere() -> None:
    vertices, faces = icosahedron()
    sides = {(f[k], f[(k + 1) % 3]) for f in faces for k in range(3)}
    assert len(faces) == 20 and len(sides) == 60 and {(b, a) for a, b in sides} == sides
    assert len({v for f in faces for v in f}) - len(sides) // 2 + len(faces) == 2
    assert np.allclose([np.linalg.norm(vertices[a] - vertices[b]) for a, b in sides], 2 / np.hypot(1, (1 + 5**0.5) / 2))
    assert min(np.linalg.det(vertices[list(f)]) for f in faces) > 0.1


def test_holonomy_of_a_mistaken_edge_is_seen() -> None:
    placed = SYSTEMS["Gauge equivariant CNN"].place(0)
    walk = edge_walk(placed)
    _, faces = icosahedron()
    star = [i for i, face in enumerate(faces) if 0 in face]
    ring, here = [star[0]], star[0]
    while len(ring) < 5:
        here = next(i for i in star if i not in ring and len(set(faces[i]) & set(faces[here])) == 2)
        ring.append(here)
    assert abs(float(holonomy(walk, ring).trace()) - 1) < 1e-12  # 2 cos(pi/3)
    maps = placed.pair.maps.clone()
    maps[ring[0], ring[1]] = torch.eye(2, dtype=torch.float64)
    wrong = EdgeWalk.from_dense(placed.pair.weight, maps)
    assert abs(float(holonomy(wrong, ring).trace()) - 1) > 1e-3


def test_low_spectrum_is_that_of_vector_fields_on_a_sphere() -> None:
    values = 1 - torch.linalg.eigvalsh(edge_walk(SYSTEMS["Gauge equivariant CNN"].place(7)).to_dense()).flip(0)
    steps = (values.diff() > 1e-6).nonzero().flatten() + 1
    assert steps[:2].tolist() == [6, 16]  # multiplicities 2(2l + 1) for l = 1, 2
    assert 3 < values[6] / values[0] < 6  # l(l + 1) - 1 has ratio 5


def test_frames_change_neither_spectrum_nor_weights() -> None:
    walk = edge_walk(SYSTEMS["Geometric deep learning"].place(2))
    moved = walk.change_frames(random_metrics(5, walk.tokens, walk.d_model))
    before = torch.linalg.eigvals(walk.to_dense()).real.sort().values
    after = torch.linalg.eigvals(moved.to_dense()).real.sort().values
    assert torch.allclose(before, after, atol=1e-10)
    assert torch.equal(moved.effective_walk(), walk.effective_walk())
    assert before.min() > -1 - 1e-12 and before.max() < 1


def test_meta_path_walk_is_lazy() -> None:
    weight = SYSTEMS["Graph Transformer Network"].place(0).pair.weight
    rest = 2 * weight - torch.eye(len(weight), dtype=torch.float64)
    assert rest.min() >= -1e-15 and torch.allclose(rest.sum(1), torch.ones(6, dtype=torch.float64))


def test_spectral_attention_meets_every_other_token() -> None:
    weight = SYSTEMS["Spectral attention network"].place(0).pair.weight
    assert not weight.diagonal().any()
    assert (weight + torch.eye(7, dtype=torch.float64) > 0).all()


def test_linear_graph_attention_is_a_walk_on_conductances() -> None:
    rng = torch.Generator().manual_seed(0)
    edges = torch.ones(6, 6, dtype=torch.bool)
    edges[0, 3:5] = edges[3:5, 0] = edges[1, 5] = edges[5, 1] = False
    left, right = torch.randn(2, 6, dtype=torch.float64, generator=rng)
    attention = (left[:, None] + right).masked_fill(~edges, -torch.inf).softmax(-1)
    conductance = edges * (right[:, None] + right).exp()
    assert torch.allclose(stationary_measure(attention), conductance.sum(1) / conductance.sum())
    assert torch.allclose(attention, conductance / conductance.sum(1, keepdim=True))


def test_classes_stay_apart_only_with_signed_transports() -> None:
    placed = SYSTEMS["Neural sheaf diffusion"].place(4)
    curves = placed.curve.pivot(index="x", columns="series", values="y")
    assert curves.loc[0, "identity"] == curves.loc[0, "signed"]
    assert curves.loc[100, "identity"] < 1e-6 < 2 - 1e-6 < curves.loc[100, "signed"] < 2 + 1e-6


def test_general_restriction_maps_keep_self_adjointness_only() -> None:
    walk = edge_walk(SYSTEMS["Neural sheaf diffusion"].place(0))
    dense = walk.to_dense()
    assert torch.allclose(dense, dense.T, atol=1e-12)
    found = conditions(walk)
    assert found["detailed_balance_defect"] < 1e-7 < 1e-2 < min(found["metric_defect"], found["inverse_defect"])


def test_checks_of_rank_and_order_can_fail() -> None:
    placed = SYSTEMS["Graph attention network"].place(0)
    assert check(placed, "rank sources alike") < 1e-12 < 1e-2 < check(placed, "dot products")
    assert defects(placed.pair)["reversible"] > 1e-3
