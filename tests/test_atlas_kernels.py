"""Kernels, masks, recurrences and signed relatives of attention, by routes that their entries do not take."""

import math

import numpy as np
import pytest
import torch
from matplotlib.mathtext import MathTextParser
from scipy.optimize import linprog

from cwlib import atlas_kernels, atlas_signed
from cwlib.atlas_kernels import patterns, rank_excess
from cwlib.atlas_pair import SYSTEMS, Pair, Placed, defects
from cwlib.atlas_recurrent import _selective, causal_rank_excess, norm_gauge
from cwlib.atlas_signed import nearest_walk
from cwlib.synthetic import generator

WALKS = ["Performer", "Sparse attention", "Linear attention", "Non-Mercer kernel machine"]
OTHERS = ["Retention", "Selective state space", "Linformer", "Multi-linear attention", "Learned kernel"]


def place(name: str, seed: int = 0) -> Placed:
    return SYSTEMS[name].place(seed)


def check(placed: Placed, words: str):
    (found,) = [each for each in placed.checks if words in each.name]
    return found


@pytest.mark.parametrize("name", WALKS + OTHERS)
def test_residual_sees_any_change_of_the_pair(name: str) -> None:
    placed = place(name)
    weight, maps = placed.pair.weight, placed.pair.maps
    edge = tuple(placed.pair.support.nonzero()[-1].tolist())
    heavier, turned = weight.clone(), maps.clone()
    heavier[edge] *= 1.001
    turned[edge] += 1e-3
    for changed in (Pair(heavier, maps), Pair(weight, turned)):
        assert Placed(changed, placed.field, placed.output).residual > 1e-8


@pytest.mark.parametrize("name", WALKS + OTHERS)
def test_checks_hold_on_other_seeds_and_are_named_after_their_system(name: str) -> None:
    for seed in (3, 4, 5):
        found = place(name, seed).checks
        assert found and all(each.passed and each.name.startswith(f"{name}: ") for each in found)


@pytest.mark.parametrize("name", WALKS + OTHERS)
def test_labels_are_short_and_can_be_drawn(name: str) -> None:
    entry = SYSTEMS[name]
    for label in (entry.walk, entry.transport):
        MathTextParser("agg").parse(label)
    assert len(entry.walk) <= 90 and len(entry.transport) <= 90 and len(entry.remark) <= 160


def test_rank_excess_is_zero_at_the_rank_and_not_below() -> None:
    drawn = torch.randn(6, 2, dtype=torch.float64, generator=generator(0))
    low = drawn @ drawn.T
    assert rank_excess(low, 2) < 1e-14 < 1e-2 < rank_excess(low, 1)
    assert rank_excess(low, 6) == 0
    assert causal_rank_excess(low.tril(), 2) < 1e-14 < 1e-2 < causal_rank_excess(low.tril(), 1)
    assert rank_excess(low.tril(), 2) > 1e-3


# --- Performer --------------------------------------------------------------------------------------------------


def test_frequencies_are_gaussian_vectors_orthogonal_in_blocks() -> None:
    drawn = atlas_kernels._frequencies(np.random.default_rng(0), 20000, 6, 4)
    gram = drawn @ drawn.transpose(0, 2, 1)
    inside = gram[:, :4, :4] - gram[:, :4, :4] * np.eye(4)
    assert np.abs(inside).max() < 1e-12 < np.abs(gram[:, :4, 4:]).max()
    assert np.abs(drawn.mean(0)).max() < 0.05
    assert np.abs(np.einsum("dfi,dfj->fij", drawn, drawn) / len(drawn) - np.eye(4)).max() < 0.06
    assert (np.linalg.norm(drawn, axis=-1) ** 4).mean() == pytest.approx(24, rel=0.05)  # chi^2 with 4 degrees


def test_rate_needs_unbiased_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = atlas_kernels._frequencies
    assert check(place("Performer"), "falls like").passed
    monkeypatch.setattr(atlas_kernels, "_frequencies", lambda *a: np.abs(honest(*a)))
    assert not check(place("Performer"), "falls like").passed


def test_performer_walk_has_the_rank_of_its_features() -> None:
    placed = place("Performer")
    assert np.linalg.matrix_rank(placed.pair.weight.numpy()) <= 4 < len(placed.field)
    assert list(placed.curve.columns) == ["x", "y", "series"] and placed.curve.y.is_monotonic_decreasing


# --- masks ------------------------------------------------------------------------------------------------------


def by_hand(mask: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, float, float]:
    """The walk, its gap and its mixing time, in numpy: the law from a high power, the time by trying all."""
    kernel = np.where(mask, np.exp(scores), 0)
    walk = kernel / kernel.sum(1, keepdims=True)
    values = np.sort(np.abs(np.linalg.eigvals(walk)))[::-1]
    laws = np.linalg.matrix_power(walk, 2**20)
    if np.abs(laws - laws[0]).max() > 1e-6:
        return walk, 1 - values[1], math.inf
    steps = next(
        t for t in range(1, 10**5) if 0.5 * np.abs(np.linalg.matrix_power(walk, t) - laws).sum(1).max() <= 0.25
    )
    return walk, 1 - values[1], steps


@pytest.mark.parametrize("seed", [0, 1])
def test_patterns_agree_with_powers_and_eigenvalues(seed: int) -> None:
    table = patterns(seed)
    n = 16
    near = np.array([[abs(i - j) <= 1 for j in range(n)] for i in range(n)])
    masks = {
        "full": np.ones((n, n), bool),
        "window": near,
        "strided": near | np.array([[(i - j) % 4 == 0 for j in range(n)] for i in range(n)]),
        "block": np.kron(np.eye(4), np.ones((4, 4))) > 0,
        "global + window": near | (np.arange(n) == 0) | (np.arange(n) == 0)[:, None],
    }
    assert {name for name, _ in table.index} == masks.keys()
    scores = {kind: each.numpy() for kind, each in zip(("tied", "untied"), atlas_kernels._scores(seed, n), strict=True)}
    for (name, kind), row in table.iterrows():
        walk, gap, steps = by_hand(masks[name], scores[kind])
        assert row["density"] == masks[name].mean()
        assert row["gap"] == pytest.approx(gap, abs=1e-9) and row["mixing_time"] == steps
        cycles = np.einsum("ij,jk,ki->ijk", walk, walk, walk)
        squares = np.einsum("ij,jk,kl,li->ijkl", walk, walk, walk, walk)
        balanced = np.allclose(cycles, cycles.transpose(0, 2, 1), rtol=1e-9, atol=0)
        balanced &= np.allclose(squares, squares.transpose(0, 3, 2, 1), rtol=1e-9, atol=0)
        assert balanced == (row["reversibility_defect"] < 1e-9) == (kind == "tied" or name == "window")


def test_patterns_order_as_their_graphs() -> None:
    tied = patterns(0).xs("tied", level="scores")
    assert tied.loc["block", "mixing_time"] == math.inf and abs(tied.loc["block", "gap"]) < 1e-12
    assert tied.loc["window", "gap"] < tied.loc["global + window", "gap"] < tied.loc["full", "gap"]
    assert tied.loc["window", "mixing_time"] > tied.loc["strided", "mixing_time"]


def test_one_global_token_is_what_opens_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = atlas_kernels._masks
    monkeypatch.setattr(atlas_kernels, "_masks", lambda n: honest(n) | {"global + window": honest(n)["window"]})
    assert not check(place("Sparse attention"), "global token").passed


# --- other walks ------------------------------------------------------------------------------------------------


def test_causal_mask_makes_linear_attention_full_rank() -> None:
    weight = place("Linear attention").pair.weight
    assert float(torch.linalg.det(weight)) == pytest.approx(float(weight.diagonal().prod()))
    assert weight.diagonal().min() > 0 and torch.equal(weight, weight.tril())


def test_non_mercer_walk_has_a_current() -> None:
    weight = place("Non-Mercer kernel machine").pair.weight
    values, vectors = np.linalg.eig(weight.numpy().T)
    law = np.real(vectors[:, np.argmax(np.real(values))])
    flow = (law / law.sum())[:, None] * weight.numpy()
    assert np.abs(flow.sum(0) - flow.sum(1)).max() < 1e-12
    assert np.abs(flow - flow.T).max() > 1e-3


# --- recurrences ------------------------------------------------------------------------------------------------


def test_norm_gauge_keeps_the_operator_and_vanishing_blocks() -> None:
    blocks = torch.randn(3, 3, 2, 2, dtype=torch.float64, generator=generator(1))
    blocks[0, 1] = 0
    pair = norm_gauge(blocks)
    assert torch.allclose(pair.blocks(), blocks, atol=1e-15) and pair.weight[0, 1] == 0
    assert torch.allclose(torch.linalg.matrix_norm(pair.maps[pair.support]), torch.tensor(2.0).double().sqrt())


def test_selective_weight_depends_on_the_way_and_softmax_odds_do_not() -> None:
    placed = place("Selective state space", 1)
    assert check(placed, "here it changes them").residual > 1e-2
    assert check(placed, "leaves the odds").residual < 1e-12
    assert torch.equal(placed.pair.weight, placed.pair.weight.tril())


def test_selective_block_is_the_product_of_its_steps() -> None:
    generated = generator(2)
    field, w_b, w_c = (torch.randn(s, dtype=torch.float64, generator=generated) for s in ((5, 3), (2, 3), (2, 3)))
    rate = -torch.rand(3, 2, dtype=torch.float64, generator=generated)
    w_step, bias = torch.randn(3, 3, dtype=torch.float64, generator=generated), torch.zeros(3, dtype=torch.float64)
    from_entry = _selective(field, (rate, w_b, w_c, w_step, bias))
    step = (1 + (field @ w_step.T + bias).exp()).log()
    for i, j in ((4, 1), (3, 3), (2, 0)):
        kept = torch.ones(3, 2, dtype=torch.float64)
        for k in range(j + 1, i + 1):
            kept = kept * (step[k][:, None] * rate).exp()
        expected = (kept * (w_c @ field[i]) * (w_b @ field[j])).sum(1) * step[j]
        assert torch.allclose(from_entry[i, j], expected, rtol=1e-12, atol=1e-14)


# --- signed weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_no_walk_is_nearer_than_the_positive_part(seed: int) -> None:
    row = torch.randn(6, dtype=torch.float64, generator=generator(seed)).numpy()
    found = 0.5 * np.abs(row - nearest_walk(torch.from_numpy(row)[None])[0].numpy()).sum()
    # least sum of t with |row - nu| <= t and nu on the simplex
    eye, zero = np.eye(6), np.zeros((1, 6))
    best = linprog(
        np.r_[np.zeros(6), np.full(6, 0.5)],
        A_ub=np.block([[eye, -eye], [-eye, -eye]]),
        b_ub=np.r_[row, -row],
        A_eq=np.hstack([np.ones((1, 6)), zero]),
        b_eq=[1],
    )
    assert best.success and found == pytest.approx(best.fun, abs=1e-9)


def test_nearest_walk_is_a_walk_even_of_negative_rows() -> None:
    weight = torch.tensor([[-1.0, -2.0], [0.25, 0.75], [2.0, -1.0]], dtype=torch.float64)
    walk = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]], dtype=torch.float64)
    assert torch.equal(nearest_walk(weight), walk)


def test_another_walk_would_not_pass_for_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas_signed, "nearest_walk", lambda w: w.abs() / w.abs().sum(1, keepdim=True))
    for name in ("Linformer", "Learned kernel"):
        assert not check(place(name), "is a nearest walk").passed


def test_learned_kernel_rows_sum_to_one_with_negative_mass() -> None:
    weight = place("Learned kernel").pair.weight
    assert torch.allclose(weight.sum(1), torch.ones(len(weight), dtype=torch.float64))
    distance = (weight - nearest_walk(weight)).abs().sum(1) / 2
    assert torch.allclose(distance, -weight.clamp_max(0).sum(1), atol=1e-14) and distance.max() > 1e-3


def test_estimate_of_a_gaussian_kernel_is_unbiased() -> None:
    points = torch.randn(4, 3, dtype=torch.float64, generator=generator(5))
    drawn = torch.randn(200_000, 3, dtype=torch.float64, generator=generator(6))
    exact = (-torch.cdist(points, points).square() / 2).exp()
    assert (atlas_signed._estimate(points, drawn) - exact).abs().max() < 0.01


def test_multi_linear_weights_carry_their_signs_in_transports() -> None:
    pair = place("Multi-linear attention").pair
    assert defects(pair)["stochastic"] > 0.1
    assert torch.allclose(torch.linalg.matrix_norm(pair.maps), torch.tensor(2.0).double())
    assert torch.linalg.matrix_rank(pair.blocks()).max() == 3
