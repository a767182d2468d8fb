"""Matrix-free operators, extreme eigenvalues and spectral densities (`cwlib.spectra`) against dense matrices."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import oracles
import pytest
import torch
from oracles import Array, Layer, agree
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from cwlib.edges import EdgeWalk
from cwlib.measures import uniform_measure
from cwlib.spectra import (
    SpectralDensity,
    WalkOperator,
    additive,
    extreme_eigenvalues,
    generator,
    lazy,
    multiplicative,
    spectral_density,
    walk_operator,
)
from cwlib.synthetic import conditioned_walk, random_measure, random_walk, sphere_tangent_walk
from cwlib.walk import ConnectionWalk

LAYERS = ["full", "causal", "zeros", "grouped", "grouped causal", "one value head", "d_head above d_model", "one token"]


def walk_of(layer: Layer) -> ConnectionWalk:
    return ConnectionWalk(*map(torch.from_numpy, layer.parts), groups=layer.groups)


def in_coordinates(dense: Array, pi: Array) -> Array:
    """B, entry by entry: sqrt(pi_i) K_ij / sqrt(pi_j)."""
    d = len(dense) // len(pi)
    result = np.zeros_like(dense)
    for row in range(len(dense)):
        for column in range(len(dense)):
            result[row, column] = np.sqrt(pi[row // d]) * dense[row, column] / np.sqrt(pi[column // d])
    return result


def symmetric(seed: int, size: int, spread: float = 1.0) -> Array:
    factor = np.random.default_rng(seed).standard_normal((size, size)) / np.sqrt(size)
    return spread * (factor + factor.T) / 2


# --- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
def test_operator_of_a_layer(kind: str) -> None:
    """Products with one vector and with many, from the left and from the right."""
    for seed in range(2):
        layer = oracles.instance(kind, seed)
        n, d = layer.shape[1], layer.shape[3]
        rng = np.random.default_rng(seed)
        pi = rng.random(n) + 0.2
        operator = walk_operator(walk_of(layer), torch.from_numpy(pi))
        assert isinstance(operator, WalkOperator) and operator.shape == (n * d, n * d) and operator.dtype == np.float64
        b = in_coordinates(oracles.operator(layer), pi)
        vector, columns = rng.standard_normal(n * d), rng.standard_normal((n * d, 3))
        agree(operator @ vector, b @ vector, atol=1e-11)
        agree(operator @ columns, b @ columns, atol=1e-11)
        agree(operator @ np.asfortranarray(columns), b @ columns, atol=1e-11)
        agree(operator.T @ vector, b.T @ vector, atol=1e-11)
        agree(operator.H @ vector, b.T @ vector, atol=1e-11)
        agree(operator.T @ columns, b.T @ columns, atol=1e-11)
        agree(operator.matmat(np.eye(n * d)), b, atol=1e-11)
        agree(operator.rmatmat(np.eye(n * d)), b.T, atol=1e-11)


def test_operator_of_an_edge_walk() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((4, 4)) * (rng.random((4, 4)) < 0.6) + np.eye(4)
    walk = EdgeWalk.from_dense(torch.from_numpy(weights), torch.from_numpy(rng.standard_normal((4, 4, 3, 3))))
    pi = rng.random(4) + 0.2
    operator = walk_operator(walk, torch.from_numpy(pi))
    b = in_coordinates(walk.to_dense().numpy(), pi)
    columns = rng.standard_normal((12, 2))
    agree(operator @ columns, b @ columns)
    agree(operator.T @ columns, b.T @ columns)


def test_measure_is_chosen_when_none_is_given() -> None:
    for causal in (False, True):
        layer = oracles.instance("causal" if causal else "full", 0)
        pi = oracles.measure(oracles.walk(layer, "mean"))
        b = in_coordinates(oracles.operator(layer), pi)
        for walk in (walk_of(layer), EdgeWalk.from_walk(walk_of(layer))):
            agree(walk_operator(walk).matmat(np.eye(len(b))), b, atol=1e-11)


def test_float32_weights_run_in_float64() -> None:
    layer = oracles.instance("grouped", 0)
    parts = [torch.from_numpy(part).float() for part in layer.parts]
    rounded = Layer(*(p.double().numpy() for p in parts), groups=layer.groups)
    pi = np.arange(1.0, layer.shape[1] + 1)
    operator = walk_operator(ConnectionWalk(*parts, groups=layer.groups), torch.from_numpy(pi))
    b = in_coordinates(oracles.operator(rounded), pi)
    agree(operator.matmat(np.eye(len(b))), b, atol=1e-12)


@pytest.mark.parametrize("kind", ["full", "causal", "grouped"])
def test_transpose_is_the_adjoint_in_the_measure(kind: str) -> None:
    """<Px, y>_M = <x, P* y>_M with y_i = x_i sqrt(pi_i) in between (T5)."""
    layer = oracles.instance(kind, 3)
    n, d = layer.shape[1], layer.shape[3]
    rng = np.random.default_rng(1)
    pi = rng.random(n) + 0.2
    pi /= pi.sum()
    walk, root = walk_of(layer), np.sqrt(pi)[:, None]
    operator = walk_operator(walk, torch.from_numpy(pi))
    x, y = rng.standard_normal((2, n, d))
    star = (operator.T @ (root * y).ravel()).reshape(n, d) / root
    inner = (pi[:, None] * (walk @ torch.from_numpy(x)).numpy() * y).sum()
    agree((pi[:, None] * x * star).sum(), inner, atol=1e-12)
    agree((operator @ (root * x).ravel()).reshape(n, d) / root, walk @ torch.from_numpy(x), atol=1e-11)


@pytest.mark.parametrize("kind", ["full", "causal", "grouped"])
def test_reversibilisations_and_generators(kind: str) -> None:
    layer = oracles.instance(kind, 1)
    n = layer.shape[1]
    pi = np.random.default_rng(0).random(n) + 0.2
    b = in_coordinates(oracles.operator(layer), pi)
    operator, eye = walk_operator(walk_of(layer), torch.from_numpy(pi)), np.eye(len(b))
    vector = np.random.default_rng(1).standard_normal(len(b))
    made = {
        "additive": (additive(operator), (b + b.T) / 2),
        "multiplicative": (multiplicative(operator), b.T @ b),
        "generator": (generator(operator), eye - b),
        "lazy": (lazy(operator), (b + eye) / 2),
        "lazy 0.1": (lazy(operator, 0.1), 0.9 * b + 0.1 * eye),
        "generator of additive": (generator(additive(operator)), eye - (b + b.T) / 2),
        "lazy generator": (generator(lazy(additive(operator))), (eye - (b + b.T) / 2) / 2),
    }
    for name, (found, expected) in made.items():
        assert found.shape == b.shape and found.dtype == np.float64, name
        agree(found @ eye, expected, atol=1e-10)
        agree(found.T @ eye, expected.T, atol=1e-10)
        agree(found @ vector, expected @ vector, atol=1e-10)
        agree(found.T @ vector, expected.T @ vector, atol=1e-10)


def test_multiplicative_reversibilisation_has_squared_singular_values() -> None:
    operator = walk_operator(random_walk(0, causal=True))
    singular = np.linalg.svd(operator @ np.eye(48), compute_uv=False)
    agree(extreme_eigenvalues(multiplicative(operator), 5), np.sort(singular)[-5:] ** 2)


# --- extreme eigenvalues ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["full", "causal", "grouped"])
def test_extreme_eigenvalues(kind: str) -> None:
    layer = oracles.instance(kind, 2)
    pi = np.random.default_rng(0).random(layer.shape[1]) + 0.2
    operator = additive(walk_operator(walk_of(layer), torch.from_numpy(pi)))
    b = in_coordinates(oracles.operator(layer), pi)
    values = np.linalg.eigvalsh((b + b.T) / 2)
    for count in (1, 4, len(b) - 1):
        agree(extreme_eigenvalues(operator, count), values[-count:], atol=1e-10)
        agree(extreme_eigenvalues(operator, count, "SA"), values[:count], atol=1e-10)
        largest = np.sort(values[np.argsort(-abs(values))[:count]])
        agree(extreme_eigenvalues(operator, count, "LM"), largest, atol=1e-10)


def test_eigenvectors_come_as_columns() -> None:
    matrix = symmetric(0, 60)
    values, vectors = extreme_eigenvalues(aslinearoperator(matrix), 3, "SA", vectors=True)
    agree(values, np.linalg.eigvalsh(matrix)[:3])
    assert vectors.shape == (60, 3)
    agree(matrix @ vectors, vectors * values, atol=1e-9)
    agree(vectors.T @ vectors, np.eye(3), atol=1e-9)


def test_extreme_eigenvalues_do_not_depend_on_the_seed_but_are_fixed_by_it() -> None:
    operator = aslinearoperator(symmetric(1, 80))
    first = extreme_eigenvalues(operator, 4, seed=1)
    assert np.array_equal(first, extreme_eigenvalues(operator, 4, seed=1))
    agree(extreme_eigenvalues(operator, 4, seed=2), first)


def test_degenerate_eigenvalues() -> None:
    agree(extreme_eigenvalues(aslinearoperator(np.eye(9)), 3), np.ones(3))
    agree(extreme_eigenvalues(aslinearoperator(np.diag([2.0] * 4 + [1.0] * 40)), 4), np.full(4, 2.0))


def test_spectrum_of_a_connection_laplacian_lies_between_zero_and_two() -> None:
    """T4 c; additive reversibilisation has nothing left to do."""
    measure = random_measure(0, 6)
    walk = conditioned_walk(0, measure)
    operator = walk_operator(walk, measure)
    low, high = (extreme_eigenvalues(generator(operator), 2, which) for which in ("SA", "LA"))
    assert low[0] > 0 and high[1] < 2
    eigenvalues = np.sort(np.linalg.eigvals(np.eye(18) - walk.to_dense().numpy()).real)
    agree(low, eigenvalues[:2])
    agree(high, eigenvalues[-2:])
    agree(additive(operator) @ np.eye(18), operator @ np.eye(18), atol=1e-12)


# --- spectral density ------------------------------------------------------------------------------------------------


def density(matrix: Array, probes: int = 8, steps: int = 60, seed: int = 0) -> SpectralDensity:
    return spectral_density(aslinearoperator(matrix), probes, steps, seed)


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "first moment": lambda x: x,
    "second moment": lambda x: x**2,
    "third moment": lambda x: x**3,
    "fourth moment": lambda x: x**4,
    "heat trace": lambda x: np.exp(-2 * x),
    "resolvent": lambda x: 1 / (3 - x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_means_lie_within_their_errors(name: str) -> None:
    """Over 20 seeds none further than four standard errors, and about two in three within one."""
    matrix = symmetric(0, 150)
    exact = float(FUNCTIONS[name](np.linalg.eigvalsh(matrix)).mean())
    pulls = []
    for seed in range(20):
        value, error = density(matrix, probes=12, steps=20, seed=seed).mean(FUNCTIONS[name])
        assert error > 0
        pulls.append(abs(value - exact) / error)
    assert max(pulls) < 4 and np.mean(np.less(pulls, 2)) >= 0.8
    assert np.mean(np.less(pulls, 1)) <= 0.95, "an error bar that is never reached is no standard error"


def test_moments_of_a_layer_lie_within_three_errors() -> None:
    layer = oracles.instance("grouped causal", 0)
    pi = np.random.default_rng(0).random(layer.shape[1]) + 0.2
    b = in_coordinates(oracles.operator(layer), pi)
    values = np.linalg.eigvalsh((b + b.T) / 2)
    found = spectral_density(additive(walk_operator(walk_of(layer), torch.from_numpy(pi))), probes=24, steps=12)
    for power in range(1, 6):
        value, error = found.mean(lambda x, power=power: x**power)
        assert abs(value - (values**power).mean()) <= 3 * error + 1e-12, power


def test_errors_shrink_with_probes() -> None:
    matrix = symmetric(0, 150)
    errors = [density(matrix, probes=probes, steps=20).mean(np.square)[1] for probes in (4, 16, 256)]
    assert errors[0] > errors[1] > errors[2]
    agree(errors[2] / errors[1], 1 / 4, rtol=0.6)


def test_error_counts_steps_that_do_not_suffice() -> None:
    """Diagonal operators have no error from probes, z_i^2 = 1: what is left is the quadrature's."""
    matrix = np.diag(np.linspace(-1, 1, 80))
    exact = np.mean(1 / (1.02 - np.linspace(-1, 1, 80)))
    for steps in (4, 8, 16):
        value, error = density(matrix, steps=steps).mean(lambda x: 1 / (1.02 - x))
        assert 1e-8 < abs(value - exact) <= 3 * error
    agree(density(matrix, steps=80).mean(lambda x: 1 / (1.02 - x))[0], exact, rtol=1e-8)


@pytest.mark.parametrize("size", [3, 5, 12])
def test_exact_when_steps_reach_the_size(size: int) -> None:
    """Each probe then has the whole spectrum; for a diagonal operator with equal weights."""
    values = np.sort(np.random.default_rng(size).standard_normal(size))
    found = density(np.diag(values), probes=3, steps=60)
    assert found.nodes.shape == (3, size)
    for nodes, weights in zip(found.nodes, found.weights, strict=True):
        agree(nodes, values, atol=1e-9)
        agree(weights, np.full(size, 1 / size), rtol=1e-6)
    agree(found.mean(np.cosh)[0], np.cosh(values).mean(), rtol=1e-9)


def test_polynomials_are_exact_below_twice_the_steps() -> None:
    """Gauss quadrature: one probe's measure, z_i^2 = 1 on a diagonal, is met up to degree 2m - 1 and not beyond."""
    values = np.linspace(-1, 1, 50) ** 3
    found = density(np.diag(values), steps=4)
    for power in range(8):
        agree(found.mean(lambda x, power=power: x**power)[0], (values**power).mean(), atol=1e-13)
    assert abs(found.mean(lambda x: x**8)[0] - (values**8).mean()) > 1e-5


def test_exhausted_krylov_spaces_are_exact() -> None:
    """Rank one, identity, few distinct eigenvalues: a probe's measure is found before the steps are spent."""
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(40)
    direction /= np.linalg.norm(direction)
    found = density(np.outer(direction, direction), probes=400, steps=30)
    assert np.isfinite(found.nodes).all()
    for function in (np.square, np.exp):  # f = f(0) (1 - 1/N) + f(1)/N
        value, error = found.mean(function)
        assert abs(value - (function(0.0) * 39 + function(1.0)) / 40) < 3 * error
    for steps in (3, 30, 100):
        agree(density(np.eye(40), steps=steps).mean(np.exp), [np.e, 0.0], atol=1e-12)
        agree(density(np.zeros((40, 40)), steps=steps).mean(np.exp), [1.0, 0.0], atol=1e-12)
    three = np.diag(np.repeat([-1.0, 0.5, 2.0], [10, 20, 10]))
    agree(density(three, steps=30).mean(np.exp)[0], np.exp(np.diag(three)).mean())
    flip = np.kron(np.eye(20), [[0.0, 1.0], [1.0, 0.0]])  # no diagonal: every Rayleigh quotient may vanish
    value, error = density(flip, probes=64, steps=30).mean(np.exp)
    assert np.isfinite(value) and abs(value - np.cosh(1)) < 3 * error


def test_narrow_spectra_are_resolved() -> None:
    """Small steps off a large diagonal are not the end of a Krylov space."""
    deviations = 1e-6 * np.linspace(-1, 1, 50)
    value, _ = density(np.diag(1 + deviations), steps=6).mean(lambda x: (x - 1) ** 2)
    agree(value, (deviations**2).mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_scale_of_the_operator_does_not_matter(scale: float) -> None:
    matrix = symmetric(2, 40)
    plain, scaled = density(matrix, steps=15), density(scale * matrix, steps=15)
    agree(scaled.nodes, scale * plain.nodes, rtol=1e-7, atol=1e-9 * scale)
    agree(scaled.mean(lambda x: (x / scale) ** 2), plain.mean(np.square), rtol=1e-8)


def test_lost_orthogonality_leaves_the_quadrature_accurate() -> None:
    """A far eigenvalue is found again and again; its copies share one weight."""
    values = np.concatenate([np.linspace(-1, 1, 299), [50.0]])
    found = density(np.diag(values), steps=120)
    assert (abs(found.nodes[0] - 50) < 1e-6).sum() > 1, "copies, or this test shows nothing"
    for function in (np.square, lambda x: np.exp(-(x**2)), lambda x: 1 / (60 - x)):
        agree(found.mean(function)[0], function(values).mean(), rtol=1e-6)


def test_smooth_density_is_a_sum_of_bumps() -> None:
    values = np.array([-1.0, 0.0, 0.2, 1.5])
    points = np.linspace(-2, 2, 9)
    found, error = density(np.diag(values)).smooth(points, 0.3)
    bumps = [[np.exp(-(((p - v) / 0.3) ** 2) / 2) / (0.3 * np.sqrt(2 * np.pi)) for v in values] for p in points]
    agree(found, np.mean(bumps, axis=1), rtol=1e-8, atol=1e-10)
    assert error.shape == points.shape
    fine = np.linspace(-4, 4, 801)
    whole, _ = density(symmetric(0, 50)).smooth(fine, 0.1)
    agree(whole.sum() * (fine[1] - fine[0]), 1.0, rtol=1e-6)


def test_counting_function() -> None:
    values = np.array([-1.0, 0.0, 0.2, 1.5])
    found, _ = density(np.diag(values)).below(np.array([-2.0, -0.5, 0.1, 1.0, 2.0]))
    agree(found, [0.0, 0.25, 0.5, 0.75, 1.0], rtol=1e-8)
    matrix = symmetric(0, 150)
    points = np.linspace(-1.2, 1.2, 7)
    exact = [(np.linalg.eigvalsh(matrix) < p).mean() for p in points]
    found, error = density(matrix, probes=16, steps=40).below(points)
    assert (np.diff(found) >= 0).all() and found[0] >= 0 and found[-1] <= 1 + 1e-12
    assert (abs(found - exact) <= 4 * error + 1e-9).all()


def test_the_seed_fixes_the_density_and_leaves_global_state_alone() -> None:
    matrix = symmetric(0, 30)
    np.random.seed(3)
    state = np.random.get_state()[1].copy()
    first = density(matrix, steps=5, seed=4)
    assert np.array_equal(np.random.get_state()[1], state)
    assert np.array_equal(first.nodes, density(matrix, steps=5, seed=4).nodes)
    assert not np.array_equal(first.nodes, density(matrix, steps=5, seed=5).nodes)


def test_weights_are_measures() -> None:
    found = density(symmetric(0, 30), steps=9)
    assert found.nodes.shape == found.weights.shape == (8, 9) and found.coarse_nodes.shape == (8, 6)
    for weights in (found.weights, found.coarse_weights):
        assert (weights >= 0).all()
        agree(weights.sum(1), np.ones(8))


# --- a connection Laplacian with a known spectrum --------------------------------------------------------------------


def test_tangent_vectors_of_the_sphere(unchecked: None) -> None:
    """Low eigenvalues in clusters of 6, 10, 14 near l(l+1) - 1 = 1, 5, 11 in ratio (vector spherical harmonics)."""
    walk, measure = sphere_tangent_walk(2000)
    values = 1 - extreme_eigenvalues(walk_operator(walk, measure), 31)[::-1]
    clusters = np.split(values, [6, 16, 30])
    for low, high in pairwise(clusters):
        gap = high.min() - low.max()
        assert gap > np.ptp(low) and gap > 0, "clusters stand further apart than they are wide"
    means = [cluster.mean() for cluster in clusters[:3]]
    agree(np.divide(means, means[0]), [1, 5, 11], rtol=0.15)


# --- wrong inputs ----------------------------------------------------------------------------------------------------

LAYER, BETWEEN = random_walk(0), random_walk(0, tokens=4, sources=6)
EDGES = conditioned_walk(0, random_measure(0, 5))


def self_adjoint() -> LinearOperator:
    return additive(walk_operator(LAYER))


WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "between token sets": (lambda: walk_operator(BETWEEN), ("walk", "to the same tokens", "(4, 6)")),
    "between token sets, measure": (
        lambda: walk_operator(BETWEEN, uniform_measure(4)),
        ("walk", "to the same tokens", "(4, 6)"),
    ),
    "measure of zeros": (lambda: walk_operator(LAYER, torch.zeros(6)), ("measure", "6 positive weights", "smallest 0")),
    "measure too short": (lambda: walk_operator(EDGES, torch.ones(4)), ("measure", "5 positive weights", "got 4")),
    "measure not a number": (lambda: walk_operator(EDGES, torch.nan * torch.ones(5)), ("measure", "finite", "nan")),
    "no eigenvalues": (lambda: extreme_eigenvalues(self_adjoint(), 0), ("count", "1 <= count < 48", "got 0")),
    "all eigenvalues": (lambda: extreme_eigenvalues(self_adjoint(), 48), ("count", "< 48", "got 48", "to_dense")),
    "which unknown": (lambda: extreme_eigenvalues(self_adjoint(), 2, "BE"), ("which", "LA, SA or LM", "'BE'")),
    "one probe": (lambda: spectral_density(self_adjoint(), 1), ("probes", "at least 2", "got 1")),
    "two steps": (lambda: spectral_density(self_adjoint(), 4, 2), ("steps", "3", "got 4 and 2")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str, unchecked: None) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
