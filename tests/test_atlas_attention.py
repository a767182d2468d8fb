"""Attention, positions and value maps in the atlas: its helpers against torch, and its statements by a second route."""

import numpy as np
import pytest
import torch

from cwlib import atlas_attention, atlas_positions, atlas_values
from cwlib.atlas_attention import attend, dot_products, output_maps, scores
from cwlib.atlas_pair import SYSTEMS, Pair, Placed, defects, ranks
from cwlib.atlas_positions import causal_softmax, rotary_products, rotate
from cwlib.checks import Check, relative_residual

MINE = [
    *("Transformer", "Cross-attention", "Modern Hopfield network", "Learned sink", "ALiBi", "Rotary positions"),
    *("Differential attention", "Laplacian heads", "Grouped-query attention", "Multi-head latent attention"),
    "Tensor product attention",
]


def _place(name: str, seed: int = 5) -> Placed:
    return SYSTEMS[name].place(seed)


def _check(placed: Placed, words: str) -> Check:
    (found,) = [check for check in placed.checks if words in check.name]
    return found


@pytest.mark.parametrize("name", MINE)
def test_every_statement_holds_on_other_draws(name: str, unchecked: None) -> None:
    for seed in range(10, 18):
        placed = _place(name, seed)
        assert placed.residual <= 1e-10
        assert all(check.passed for check in placed.checks), [c for c in placed.checks if not c.passed]


@pytest.mark.parametrize("name", MINE)
def test_residual_sees_a_wrong_weight_and_a_wrong_transport(name: str) -> None:
    placed = _place(name)
    for side in ("weight", "maps"):
        parts = {"weight": placed.pair.weight.clone(), "maps": placed.pair.maps.clone()}
        parts[side][-1, 0] *= 1 + 1e-5
        wrong = Placed(Pair(**parts), placed.field, placed.output, placed.constant)
        assert wrong.residual > 1e-10, side


def test_modules_are_told_apart() -> None:
    places = {entry.place.__module__ for entry in SYSTEMS.values() if entry.name in MINE}
    assert places == {module.__name__ for module in (atlas_attention, atlas_positions, atlas_values)}


@pytest.mark.parametrize("causal", [False, True])
def test_naive_attention_is_torchs(causal: bool) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((5, 6)), rng.standard_normal((3, 2, 4, 6))
    w_o = rng.standard_normal((6, 8))
    values = np.einsum("hae,je->hja", w[2], x)
    query, key, value = (torch.from_numpy(np.einsum("hae,je->hja", each, x)) for each in w)
    expected = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=causal)
    joined = expected[0].transpose(0, 1).flatten(1) @ torch.from_numpy(w_o).T
    assert (
        relative_residual(torch.from_numpy(attend(dot_products(w[0], x, w[1], x), values, w_o, causal)), joined) < 1e-13
    )
    # and the torch side, which shares no code with it
    field, q, k = (torch.from_numpy(each) for each in (x, w[0], w[1]))
    seen = scores(q, field, k, field)
    attention = causal_softmax(seen) if causal else seen.softmax(-1)
    walked = torch.einsum("hda,hij,hja->id", output_maps(w_o, 2), attention, value)
    assert relative_residual(walked, joined) < 1e-13


def test_rotations_compose_and_meet_in_the_distance() -> None:
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 3, 4, 6))
    vector = query[0, 0]
    assert np.allclose(rotate(rotate(vector, 3), 4), rotate(vector, 7), atol=1e-13)
    assert np.linalg.norm(rotate(vector, 9)) == pytest.approx(np.linalg.norm(vector), rel=1e-14)
    assert not np.allclose(rotate(vector, 1), vector)
    products = rotary_products(torch.from_numpy(query), torch.from_numpy(key))
    for h, i, j in np.ndindex(3, 4, 4):
        assert float(products[h, i, j]) == pytest.approx(rotate(query[h, i], i) @ rotate(key[h, j], j), abs=1e-12)


def test_hopfield_fixed_points_pass_from_the_mean_to_a_pattern() -> None:
    curve = _place("Modern Hopfield network").curve
    pattern, mean = (curve[curve.series == name] for name in ("to the nearest pattern", "to the mean"))
    assert list(pattern.x) == sorted(pattern.x) and pattern.x.tolist() == mean.x.tolist()
    assert mean.y.iloc[0] < 1e-2 < pattern.y.iloc[0] and pattern.y.iloc[-1] < 1e-2 < mean.y.iloc[-1]


def test_hopfield_states_end_in_minima_of_the_energy() -> None:
    placed = _place("Modern Hopfield network")

    def energy(xi: torch.Tensor) -> torch.Tensor:
        return xi.square().sum() / 2 - (placed.field @ xi).logsumexp(0)

    for xi in placed.output:
        for _ in range(500):
            xi = placed.field.T @ (placed.field @ xi).softmax(0)
        assert torch.autograd.functional.jacobian(energy, xi).norm() < 1e-8
        assert torch.linalg.eigvalsh(torch.autograd.functional.hessian(energy, xi)).min() > 0


def test_mass_of_differential_attention() -> None:
    weight = _place("Differential attention").pair.weight
    kept = weight.sum(1)  # 1 - lambda in every row
    assert 0 < float(kept.min()) < 1 and float(kept.std()) < 1e-15
    assert (weight.abs().sum(1) >= kept).all() and (weight.abs().sum(1) <= 2 - kept).all()


def test_laplacian_layer_vanishes_on_constants_but_for_its_averaging_head() -> None:
    placed = _place("Laplacian heads")
    once = torch.ones(len(placed.field), 1, dtype=torch.float64) * placed.field[0]
    moved = placed.pair @ once
    assert relative_residual(moved, moved[:1].expand_as(moved)) < 1e-12  # constants stay constant
    assert ranks(placed.pair)["schmidt_rank"] == 2
    assert torch.linalg.matrix_rank(placed.pair.blocks().sum(1)[0]) == 4  # the head that subtracts has dropped out


def test_sink_leaves_a_walk_below_stochastic() -> None:
    pair = _place("Learned sink").pair
    assert float(torch.linalg.eigvals(pair.weight).abs().max()) < float(pair.weight.sum(1).max()) + 1e-12 < 1
    assert torch.linalg.matrix_power(pair.weight, 2000).max() < 1e-6


def test_transports_of_latent_attention_share_a_kernel() -> None:
    for name, width in (("Multi-head latent attention", 3), ("Grouped-query attention", 4)):
        blocks = _place(name).pair.blocks().flatten(0, 2)
        unseen = torch.linalg.svd(blocks).Vh[width:]
        assert unseen.shape == (8 - width, 8)
        assert float((blocks @ unseen.T).norm() / blocks.norm()) < 1e-13
        assert ranks(_place(name).pair)["walk_rank"] == 6  # the weights are not of low rank


def test_tensor_product_values_are_quadratic_and_attention_values_are_not() -> None:
    placed = _place("Tensor product attention")
    assert defects(placed.pair)["constant"] > 0.1
    assert _check(placed, "many transports").residual > 0.01
    assert _check(placed, "another transport").residual > 0.1
    # one head of ordinary attention has one transport
    alone = _place("Differential attention").pair
    assert defects(alone)["constant"] < 1e-12
