"""Measures, reversibility and spectra of token walks (T4, T5) against definitions and known answers."""

from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from oracles import agree

from cwlib.cores import HeadTransports
from cwlib.measures import (
    choose_measure,
    degree_measure,
    is_irreducible,
    lazy_walk,
    require_measure,
    reversibilised_spectrum,
    reversibility_defect,
    stationary_measure,
    stochastic_walk,
    stochasticity_defect,
    teleporting_walk,
    token_flow,
    uniform_measure,
)
from cwlib.synthetic import random_measure, random_walk
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
    with pytest.raises(ValueError, match=r"matrix: expected an irreducible.*\(6, 6\).*token 0 absorbs.*uniform_me"):
        stationary_measure(matrix)
    agree(np.sort(np.linalg.eigvals(matrix.numpy()).real), np.sort(matrix.diagonal()))


# --- degree, flow, remedies of T5 -------------------------------------------------------------------------------------


@kinds
def test_degree_of_the_symmetrised_walk(kind: str) -> None:
    """sum_j (W_ij + W_ji) / 2, scaled to one; stationary for the walk on the graph with those weights."""
    for seed in SEEDS:
        matrix = random_matrix(seed, kind)
        n = len(matrix)
        degrees = [sum((matrix[i, j] + matrix[j, i]) / 2 for j in range(n)) for i in range(n)]
        found = degree_measure(torch.from_numpy(matrix))
        agree(found, np.divide(degrees, sum(degrees)))
        assert (found > 0).all()
        weights = matrix + matrix.T
        agree(found.numpy() @ (weights / weights.sum(1, keepdims=True)), found)
    assert degree_measure(torch.from_numpy(matrix).float()).dtype == torch.float64


def test_degree_is_stationary_where_columns_sum_to_one_too() -> None:
    agree(degree_measure(cycle(5)), stationary_measure(cycle(5)))
    assert not np.allclose(
        degree_measure(torch.from_numpy(random_matrix(3, "full"))), oracles.stationary_law(random_matrix(3, "full"))
    )


def test_a_measure_of_ones_own_is_scaled_to_one() -> None:
    given = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float32, requires_grad=True)
    found = require_measure(given, 3)
    agree(found, [0.125, 0.25, 0.625])
    assert found.dtype == torch.float64 and not found.requires_grad
    agree(given.detach(), [1.0, 2.0, 5.0])


@kinds
def test_flow(kind: str) -> None:
    """pi_i W_ij: rows sum to pi; columns too if and only if pi is stationary."""
    for seed in SEEDS:
        matrix, pi = random_matrix(seed, kind), random_measure(seed, len(random_matrix(seed, kind))).numpy()
        flow = token_flow(torch.from_numpy(matrix), torch.from_numpy(pi))
        agree(flow, [[pi[i] * matrix[i, j] for j in range(len(matrix))] for i in range(len(matrix))])
        agree(flow.sum(1), pi)
    law = oracles.stationary_law(matrix)
    agree(token_flow(torch.from_numpy(matrix), torch.from_numpy(law)).sum(0), law)


@kinds
@pytest.mark.parametrize("stay", [0.0, 0.25, 0.5, 0.9])
def test_lazy_walk_keeps_law_eigenvectors_and_reversibility(kind: str, stay: float) -> None:
    for seed in range(4):
        matrix = random_matrix(seed, kind)
        n = len(matrix)
        expected = [[(1 - stay) * matrix[i, j] + (stay if i == j else 0) for j in range(n)] for i in range(n)]
        lazy = lazy_walk(torch.from_numpy(matrix), stay)
        agree(lazy, expected)
        eigenvalues = np.sort_complex(np.linalg.eigvals(matrix))
        agree(
            abs(np.sort_complex(np.linalg.eigvals(lazy.numpy())) - ((1 - stay) * eigenvalues + stay)),
            np.zeros(n),
            atol=1e-7,
        )
        if kind in ("full", "sparse"):
            agree(stationary_measure(lazy), oracles.stationary_law(matrix))
        # a causal walk stays causal: laziness is no remedy of T5
        assert (lazy.triu(1) > 0).any() == (np.triu(matrix, 1) > 0).any()


def test_half_lazy_reversible_walks_have_no_eigenvalue_below_zero() -> None:
    for seed in SEEDS:
        weights = np.random.default_rng(seed).exponential(size=(5, 5)) ** 3
        weights = weights + weights.T - np.diag(np.diag(2 * weights))
        matrix = torch.from_numpy(weights / weights.sum(1, keepdims=True))
        assert reversibilised_spectrum(matrix, stationary_measure(matrix))[0] < -0.05
        lazy = lazy_walk(matrix)
        agree(reversibility_defect(lazy, stationary_measure(lazy)), 0.0)
        assert reversibilised_spectrum(lazy, stationary_measure(lazy))[0] >= -1e-12


@kinds
def test_teleporting_walk(kind: str) -> None:
    for seed in range(4):
        matrix = random_matrix(seed, kind)
        n = len(matrix)
        weights = random_measure(seed, n) * 3  # scaled to one by the walk
        law = (weights / weights.sum()).numpy()
        for restart, given, rho in ((0.15, None, np.full(n, 1 / n)), (0.4, weights, law)):
            expected = [[(1 - restart) * matrix[i, j] + restart * rho[j] for j in range(n)] for i in range(n)]
            found = teleporting_walk(torch.from_numpy(matrix), restart, given)
            agree(found, expected)
            agree(found.sum(1), np.ones(n))
            assert is_irreducible(found) and (stationary_measure(found) > 0).all()
        agree(teleporting_walk(torch.from_numpy(matrix), 0.0), matrix)


def test_teleporting_does_not_make_a_causal_walk_reversible() -> None:
    """It gives it a positive stationary law, which laziness does not (T5)."""
    matrix = random_walk(0, causal=True).effective_walk()
    found = teleporting_walk(matrix, 0.2)
    assert choose_measure(found)[0] == "stationary" and choose_measure(lazy_walk(matrix))[0] == "uniform"
    assert reversibility_defect(found, stationary_measure(found)) > 1e-2
    assert teleporting_walk(matrix.float()).dtype == torch.float64


def test_stochasticity_defect() -> None:
    for seed in SEEDS:
        for kind in ("full", "sparse", "causal"):
            matrix = random_matrix(seed, kind)
            agree(stochasticity_defect(torch.from_numpy(matrix)), 0.0)
            scaled = matrix * np.random.default_rng(seed).random(len(matrix))[:, None] * 2
            sums = [sum(row) for row in scaled]
            distance = np.sqrt(sum((s - 1) ** 2 for s in sums))
            size = np.sqrt(sum(s**2 for s in sums)) + np.sqrt(len(sums))
            agree(stochasticity_defect(torch.from_numpy(scaled)), distance / size)
    agree(stochasticity_defect(torch.full((3, 3), 1.0)), 1 / 2)  # rows sum to three: 2 / (3 + 1)
    agree(stochasticity_defect(torch.zeros(3, 3)), 1.0)
    agree(stochasticity_defect(random_walk(0, tokens=4, sources=6).effective_walk()), 0.0)


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


MATRIX, RECTANGLE = torch.full((3, 3), 1 / 3), torch.full((2, 3), 1 / 3)

# what is attempted, and words its error must hold: the argument, what was expected, what came
WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "degree between token sets": (lambda: degree_measure(RECTANGLE), ("matrix", "same tokens", "(2, 3)", "bipartite")),
    "degree of a vector": (lambda: degree_measure(MATRIX[0]), ("matrix", "same tokens", "(3,)")),
    "flow between token sets": (lambda: token_flow(RECTANGLE, torch.ones(2)), ("matrix", "same tokens", "(2, 3)")),
    "defect between token sets": (
        lambda: reversibility_defect(RECTANGLE, torch.ones(2)),
        ("matrix", "same tokens", "(2, 3)"),
    ),
    "spectrum between token sets": (
        lambda: reversibilised_spectrum(RECTANGLE, torch.ones(2)),
        ("matrix", "same tokens", "(2, 3)"),
    ),
    "lazy between token sets": (lambda: lazy_walk(RECTANGLE), ("matrix", "same tokens", "(2, 3)")),
    "always lazy": (lambda: lazy_walk(MATRIX, 1.0), ("stay", "[0, 1)", "got 1.0")),
    "less than never lazy": (lambda: lazy_walk(MATRIX, -0.1), ("stay", "[0, 1)", "got -0.1")),
    "lazy by nan": (lambda: lazy_walk(MATRIX, float("nan")), ("stay", "[0, 1)", "got nan")),
    "teleporting between token sets": (lambda: teleporting_walk(RECTANGLE), ("matrix", "same tokens", "(2, 3)")),
    "always restarting": (lambda: teleporting_walk(MATRIX, 1.0), ("restart", "[0, 1)", "got 1.0")),
    "law too short": (
        lambda: teleporting_walk(MATRIX, 0.1, torch.ones(2)),
        ("3 positive weights", "got 2"),
    ),
    "law that misses tokens": (
        lambda: teleporting_walk(MATRIX, 0.1, torch.tensor([1.0, 0.0, 0.0])),
        ("3 positive weights", "smallest 0"),
    ),
    "measure too long": (lambda: require_measure(torch.ones(4), 3), ("measure", "3 positive weights", "got 4")),
    "measure negative": (lambda: require_measure(-torch.ones(3), 3), ("measure", "positive", "smallest -1")),
    "stationary law of token 0": (
        lambda: require_measure(torch.tensor([1.0, 0.0]), 2),
        ("measure", "positive", "smallest 0", "uniform_measure and degree_measure"),
    ),
    "measure not a number": (lambda: require_measure(torch.nan * torch.ones(3), 3), ("measure", "finite", "nan")),
    "measure a matrix": (lambda: require_measure(torch.ones(3, 1), 3), ("measure", "(token)", "(3, 1)")),
    "measure of integers": (lambda: require_measure(torch.ones(3).long(), 3), ("measure", "floating-point", "int64")),
    "measure a list": (lambda: require_measure([1.0, 2.0], 2), ("measure", "torch.Tensor", "list")),
    "measure empty": (lambda: require_measure(torch.ones(0), 0), ("measure", "non-empty", "(0,)")),
}  # fmt: skip


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
