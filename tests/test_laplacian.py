"""Measures, reversibility and spectra of token walks (T4, T5) against definitions and known answers."""

import numpy as np
import oracles
import pytest
import torch
from oracles import agree

from cwlib.cores import HeadTransports
from cwlib.laplacian import (
    choose_measure,
    is_irreducible,
    reversibilised_spectrum,
    reversibility_defect,
    stationary_measure,
    stochastic_walk,
    uniform_measure,
)
from cwlib.synthetic import random_walk
from cwlib.walk import ConnectionWalk


def random_matrix(seed: int, kind: str) -> np.ndarray:
    """A stochastic matrix: full, sparse but irreducible, causal, or in two blocks."""
    rng = np.random.default_rng([seed, len(kind)])
    n = int(rng.integers(2, 9))
    weights = rng.exponential(size=(n, n)) ** 2
    keep = {
        "full": np.ones((n, n)),
        "sparse": (rng.random((n, n)) < 0.3) + np.roll(np.eye(n), 1, axis=1),
        "causal": np.tri(n),
        "blocks": np.equal.outer(np.arange(n) < (n + 1) // 2, np.arange(n) < (n + 1) // 2),
    }[kind]
    weights = np.where(keep > 0, weights + 0.01, 0)
    return weights / weights.sum(1, keepdims=True)


kinds = pytest.mark.parametrize("kind", ["full", "sparse", "causal", "blocks"])
SEEDS = range(12)


def cycle(n: int) -> torch.Tensor:
    """The walk that goes round n tokens."""
    return torch.eye(n, dtype=torch.float64).roll(1, 0)


# --- against oracles -------------------------------------------------------------------------------------------------


@kinds
def test_measure(kind: str) -> None:
    for seed in SEEDS:
        matrix = random_matrix(seed, kind)
        name, measure = choose_measure(torch.from_numpy(matrix))
        assert is_irreducible(torch.from_numpy(matrix)) == oracles.is_irreducible(matrix)
        assert name == ("stationary" if kind in ("full", "sparse") else "uniform")
        agree(measure, oracles.measure(matrix))
        agree(measure.sum(), 1.0)
        if name == "stationary":
            agree(measure.numpy() @ matrix, measure)
            assert (measure > 0).all()


@kinds
def test_reversibility_defect(kind: str) -> None:
    for seed in SEEDS:
        matrix = random_matrix(seed, kind)
        pi = np.random.default_rng(seed).random(len(matrix)) + 0.1
        for measure in (pi, oracles.measure(matrix)):
            defect = reversibility_defect(torch.from_numpy(matrix), torch.from_numpy(measure))
            agree(defect, oracles.reversibility_defect(matrix, measure))
            assert 0 <= defect <= 1


@kinds
def test_spectrum_of_the_reversibilised_walk(kind: str) -> None:
    for seed in SEEDS:
        matrix = random_matrix(seed, kind)
        pi = np.random.default_rng(seed).random(len(matrix)) + 0.1
        for measure in (pi, oracles.measure(matrix)):
            spectrum = reversibilised_spectrum(torch.from_numpy(matrix), torch.from_numpy(measure))
            agree(spectrum, oracles.reversibilised_spectrum(matrix, measure), atol=1e-11)
            assert (spectrum.diff() >= 0).all(), "ascending"
            assert spectrum[0] >= -1 - 1e-12
            agree(spectrum[-1], 1.0)


def test_reversibilisation_is_half_the_walk_and_its_adjoint_when_the_measure_is_stationary() -> None:
    """1/2 (W + W*) with W* = Pi^-1 W^T Pi, the adjoint in l2(pi)."""
    for seed in SEEDS:
        matrix = random_matrix(seed, "full")
        pi = oracles.stationary_law(matrix)
        adjoint = np.diag(1 / pi) @ matrix.T @ np.diag(pi)
        agree(oracles.reversibilised_walk(matrix, pi), (matrix + adjoint) / 2)
        spectrum = reversibilised_spectrum(torch.from_numpy(matrix), torch.from_numpy(pi))
        agree(spectrum, np.sort(np.linalg.eigvals((matrix + adjoint) / 2).real), atol=1e-11)


@pytest.mark.parametrize("kind", ["full", "causal", "zeros", "grouped", "one head", "one token"])
@pytest.mark.parametrize("gauge", ["mean", "sum", "norm"])
def test_stochastic_walk_of_a_layer(kind: str, gauge: str) -> None:
    for seed in range(4):
        layer = oracles.instance(kind, seed)
        matrix = stochastic_walk(ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups), gauge)
        flow = oracles.walk(layer, "norm" if gauge == "norm" else "mean")
        agree(matrix, [row / row.sum() for row in flow])
        agree(matrix.sum(1), np.ones(len(flow)))


def test_stochastic_walk_removes_the_rounding_of_attention() -> None:
    walk = random_walk(0, dtype=torch.bfloat16)
    assert (walk.effective_walk().sum(1) - 1).abs().max() > 1e-5
    agree(stochastic_walk(walk).sum(1), np.ones(6))


# --- known answers ---------------------------------------------------------------------------------------------------


def test_uniform_measure() -> None:
    agree(uniform_measure(4), np.full(4, 0.25))


def test_stationary_law_of_known_walks() -> None:
    agree(stationary_measure(torch.tensor([[0.7, 0.3], [0.1, 0.9]], dtype=torch.float64)), [0.25, 0.75])
    agree(stationary_measure(cycle(5)), np.full(5, 0.2))
    agree(stationary_measure(torch.ones(1, 1)), [1.0])
    # rows are all equal to pi
    pi = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    agree(stationary_measure(pi.repeat(3, 1)), pi)


def test_stationary_law_is_computed_in_float64() -> None:
    matrix = torch.from_numpy(random_matrix(0, "full")).float()
    agree(stationary_measure(matrix) @ matrix.double(), stationary_measure(matrix), rtol=1e-6)
    assert stationary_measure(matrix).dtype == torch.float64


def test_walk_of_a_weighted_graph_is_reversible() -> None:
    for seed in SEEDS:
        weights = np.random.default_rng(seed).exponential(size=(6, 6))
        weights = weights + weights.T
        matrix = torch.from_numpy(weights / weights.sum(1, keepdims=True))
        name, measure = choose_measure(matrix)
        assert name == "stationary"
        agree(measure, weights.sum(1) / weights.sum())
        agree(reversibility_defect(matrix, measure), 0.0)
        agree(reversibilised_spectrum(matrix, measure), np.sort(np.linalg.eigvals(matrix.numpy()).real))


@pytest.mark.parametrize("n", [3, 4, 7])
def test_a_cycle_has_no_edge_with_a_way_back(n: int) -> None:
    measure = stationary_measure(cycle(n))
    agree(reversibility_defect(cycle(n), measure), 1.0)
    # reversibilised, it is the simple walk on the cycle
    agree(reversibilised_spectrum(cycle(n), measure), np.sort(np.cos(2 * np.pi * np.arange(n) / n)))


def test_defect_counts_loops_as_symmetric() -> None:
    lazy = (cycle(3) + torch.eye(3, dtype=torch.float64)) / 2
    # |odd|^2 = 6/36, |even|^2 = 6/36 + 3 * 4/36
    agree(reversibility_defect(lazy, uniform_measure(3)), np.sqrt(6 / 18))


def test_going_back_and_forth_is_reversible() -> None:
    agree(reversibility_defect(cycle(2), uniform_measure(2)), 0.0)
    agree(reversibilised_spectrum(cycle(2), uniform_measure(2)), [-1.0, 1.0])


def test_symmetries() -> None:
    """The scale of the measure and the order of the tokens do not matter."""
    matrix = torch.from_numpy(random_matrix(3, "full"))
    pi = stationary_measure(matrix)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(matrix)))
    agree(stationary_measure(matrix[order][:, order]), pi[order])
    for other, measure in ((matrix, 5 * pi), (matrix[order][:, order], pi[order])):
        agree(reversibility_defect(other, measure), reversibility_defect(matrix, pi))
        agree(reversibilised_spectrum(other, measure), reversibilised_spectrum(matrix, pi))


def test_causal_walks_are_absorbed_by_token_0() -> None:
    """No positive stationary law exists (T5), so the measure is uniform, and says so."""
    matrix = random_walk(0, causal=True).effective_walk()
    assert not is_irreducible(matrix)
    name, measure = choose_measure(matrix)
    assert name == "uniform"
    agree(measure, np.full(6, 1 / 6))
    with pytest.raises(ValueError, match=r"matrix: expected an irreducible.*\(6, 6\).*absorbed by token 0.*uniform_me"):
        stationary_measure(matrix)
    agree(np.sort(np.linalg.eigvals(matrix.numpy()).real), np.sort(matrix.diagonal()))


# --- wrong inputs ----------------------------------------------------------------------------------------------------


def test_walk_between_different_token_sets_has_no_stationary_law() -> None:
    matrix = random_walk(0, tokens=4, sources=6).effective_walk()
    assert not is_irreducible(matrix)
    with pytest.raises(ValueError, match=r"matrix: expected an irreducible square walk, got shape \(4, 6\)"):
        stationary_measure(matrix)


def test_reducible_walk_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one communicating class"):
        stationary_measure(torch.eye(3))


def test_unknown_gauge_is_refused() -> None:
    with pytest.raises(ValueError, match="gauge: expected one of mean, sum, norm, got 'max'"):
        stochastic_walk(random_walk(0), "max")


def test_row_without_flow_is_refused_in_the_norm_gauge() -> None:
    base = random_walk(0, heads=2, tokens=3)
    attention = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    attention[1, 1:] = 1 / 3
    # head 0 carries nothing, and rows 1, 2 use head 1 as well
    transports = HeadTransports(base.value, base.output * torch.tensor([0.0, 1.0])[:, None, None])
    attention[1, 0] = torch.tensor([0.0, 1.0, 0.0])
    assert stochastic_walk(ConnectionWalk.from_transports(attention, transports), "norm").isfinite().all()
    silent = HeadTransports(base.value, base.output * 0)
    with pytest.raises(ValueError, match=r"walk: expected every row to carry flow in the norm gauge.*empty row 0"):
        stochastic_walk(ConnectionWalk.from_transports(attention, silent), "norm")


@pytest.mark.parametrize("weak", [1e-3, 1e-12, 1e-17, 1e-100])
def test_stationary_law_of_weakly_linked_parts(weak: float) -> None:
    """Two states linked by e one way and 3 e the other: 3/4 and 1/4, however small e is."""
    matrix = torch.tensor([[1 - weak, weak], [3 * weak, 1 - 3 * weak]], dtype=torch.float64)
    torch.testing.assert_close(stationary_measure(matrix), torch.tensor([0.75, 0.25], dtype=torch.float64))
