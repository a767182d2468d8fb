"""Edges, measures, operators and generators: inputs at the limits of what makes sense, and what is refused."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from oracles import agree
from scipy.sparse.linalg import aslinearoperator

from cwlib.edges import EdgeWalk
from cwlib.holonomy import cycle_defect, holonomy, parallel_fields, triangle_defect
from cwlib.laplacian import dirichlet_energy, in_metric, inverse_defect, parallel_defect, whitening_metric
from cwlib.measures import (
    degree_measure,
    is_irreducible,
    reversibilised_spectrum,
    reversibility_defect,
    stationary_measure,
    stochasticity_defect,
    token_flow,
    uniform_measure,
)
from cwlib.spectra import (
    WalkOperator,
    additive,
    extreme_eigenvalues,
    generator,
    lazy,
    multiplicative,
    spectral_density,
    walk_operator,
)
from cwlib.synthetic import (
    conditioned_walk,
    cycle_walk,
    flat_walk,
    random_measure,
    random_metrics,
    random_orthogonal,
    random_walk,
    sphere_tangent_walk,
)
from cwlib.walk import ConnectionWalk

F64 = torch.float64
NILPOTENT = torch.tensor([[0.0, 1], [0, 0]], dtype=F64)


# --- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["float32", "requires_grad", "int32", "int16"])
def test_tensors_of_any_precision(change: str, unchecked: None) -> None:
    rng = np.random.default_rng(0)
    tokens, here = 300, torch.tensor([0, 218, 100])
    there = torch.tensor([100, 236, 0])  # the first two pairs have one index dst * 300 + src in 16 bits
    weight, maps = (
        torch.from_numpy(rng.random(3) + 0.1).float(),
        torch.from_numpy(rng.standard_normal((3, 2, 2))).float(),
    )
    plain = EdgeWalk(tokens, here, there, weight.double(), maps.double())
    if change == "float32":
        walk = EdgeWalk(tokens, here, there, weight, maps)
    elif change == "requires_grad":
        walk = EdgeWalk(tokens, here, there, weight.double().requires_grad_(), maps.double().requires_grad_())
    else:
        dtype = getattr(torch, change)
        walk = EdgeWalk(tokens, here.to(dtype), there.to(dtype), weight.double(), maps.double())
    field = torch.ones(tokens, 2)
    agree(walk @ field, plain @ field)
    agree(walk.sparse().sum(), plain.sparse().sum())
    agree(walk.change_frames(2 * torch.eye(2).repeat(tokens, 1, 1)).maps, plain.maps)
    agree(holonomy(walk, [0, 100]), plain.maps[0] @ plain.maps[2])
    agree(dirichlet_energy(walk, field), dirichlet_energy(plain, field))
    assert (walk @ field).requires_grad is False


# --- laplacian -------------------------------------------------------------------------------------------------------


def test_ways_that_annihilate_each_other_are_far_from_inverse() -> None:
    swap = torch.tensor([[0.0, 1], [1, 0]], dtype=F64)
    walk = EdgeWalk.from_dense(swap, NILPOTENT.expand(2, 2, 2, 2).clone())
    agree(inverse_defect(walk), 1.0)
    head = ConnectionWalk(random_walk(0, heads=1).attention, NILPOTENT[None, :1], torch.eye(2, 1, dtype=F64)[None])
    agree(inverse_defect(head), 1.0)


def test_walks_without_a_way_back_have_no_inverse_defect_in_any_order() -> None:
    walk = random_walk(0, causal=True)
    order = torch.tensor([3, 1, 0, 2, 5, 4])
    assert np.isnan(inverse_defect(ConnectionWalk(walk.attention[:, order][:, :, order], walk.value, walk.output)))
    around = torch.eye(3, dtype=F64).roll(1, 0) + torch.eye(3, dtype=F64)
    assert np.isnan(inverse_defect(EdgeWalk.from_dense(around / 2, torch.eye(2, dtype=F64).expand(3, 3, 2, 2).clone())))


def test_a_field_that_only_sends_arrives_at_right_angles() -> None:
    maps = torch.eye(2, dtype=F64)[None]
    walk = EdgeWalk(2, torch.tensor([0]), torch.tensor([1]), torch.ones(1, dtype=F64), maps)
    agree(parallel_defect(walk, torch.tensor([[0.0, 0.0], [1.0, 2.0]], dtype=F64)), 1.0)


@pytest.mark.parametrize("count", range(2, 13))
def test_whitening_a_constant_is_refused_whatever_its_value(count: int) -> None:
    with pytest.raises(ValueError, match="field that varies"):
        whitening_metric(torch.full((count, 3), 0.1, dtype=F64))


def test_whitening_gives_a_metric_that_is_accepted() -> None:
    """However ill-conditioned: symmetric to rounding of its largest entries, not of every entry."""
    rng = np.random.default_rng(1)
    field = torch.from_numpy(rng.standard_normal((200, 64)) * np.logspace(-6, 0, 64))
    walk = random_walk(0, d_model=64)
    for tokens, ridge in ((200, 1e-3), (200, 1e-6), (10, 1e-3), (10, 1e-8), (10, 1e-10)):
        for size in (1e-8, 1.0, 1e8):
            metric = whitening_metric(size * field[:tokens], ridge)
            agree(metric, metric.T, rtol=0, atol=0)
            in_metric(walk, metric)


def test_a_metric_inverted_in_float32_is_symmetric_enough() -> None:
    metric = torch.linalg.inv(random_metrics(0, 1, 8)[0].float())
    assert not torch.equal(metric, metric.T)
    in_metric(random_walk(0), metric)


# --- holonomy --------------------------------------------------------------------------------------------------------


def test_small_singular_values_of_a_long_way_round_count() -> None:
    """diag(1, e) around a cycle: rank two, cosine (1 + e)/sqrt(2 (1 + e^2)), however small e is above rounding."""
    for e in (1e-3, 1e-9, 1e-11, 1e-13):
        walk = cycle_walk(4, torch.diag(torch.tensor([1.0, e], dtype=F64)))
        agree(cycle_defect(walk, [0, 3, 2, 1]), np.sqrt(1 - (1 + e) ** 2 / (2 * (1 + e**2))), rtol=1e-8)


def test_triangle_defect_is_never_below_zero() -> None:
    walk = flat_walk(0, random_measure(0, 5), random_orthogonal(0, 5, 3))
    assert min(triangle_defect(walk, i, j, k) for i in range(5) for j in range(5) for k in range(5)) >= 0


# --- spectra ---------------------------------------------------------------------------------------------------------


def test_spectral_density_of_one_number() -> None:
    agree(spectral_density(aslinearoperator(np.array([[2.0]]))).mean(np.exp), [np.exp(2), 0.0], atol=1e-12)


def test_extreme_eigenvalues_of_the_zero_operator() -> None:
    values, vectors = extreme_eigenvalues(aslinearoperator(np.zeros((50, 50))), 3, vectors=True)
    agree(values, np.zeros(3))
    agree(vectors.T @ vectors, np.eye(3))


# --- refusals --------------------------------------------------------------------------------------------------------

LAYER, BETWEEN = random_walk(0), random_walk(0, tokens=4, sources=6)
EDGES, PI = conditioned_walk(0, random_measure(0, 5)), random_measure(0, 5)
W = LAYER.effective_walk()
EYE = torch.eye(8, dtype=F64)
OPERATOR = additive(walk_operator(LAYER))
DENSITY = spectral_density(OPERATOR, 4, 6)
WIDE = aslinearoperator(np.ones((20, 30)))


def cycle_of(**changes: object) -> EdgeWalk:
    here = torch.arange(3)
    parts = {
        "tokens": 3,
        "dst": here,
        "src": here.roll(1),
        "weight": torch.ones(3),
        "maps": torch.eye(2).repeat(3, 1, 1),
    }
    return EdgeWalk(**parts | changes)


WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    # edges
    "indices of floats": (lambda: cycle_of(dst=torch.arange(3.0)), ("dst", "integers", "float32")),
    "indices in a column": (lambda: cycle_of(src=torch.arange(3)[:, None]), ("src", "(edge)", "(3, 1)")),
    "indices a list": (lambda: cycle_of(dst=[0, 1, 2]), ("dst", "integers", "list")),
    "half a token": (lambda: cycle_of(tokens=3.5), ("tokens", "int", "3.5")),
    "more maps than pairs": (
        lambda: EdgeWalk.from_dense(torch.ones(2, 2), torch.ones(3, 3, 2, 2)),
        ("maps", "(2, 2, d_model, d_model)", "(3, 3, 2, 2)"),
    ),
    "fewer maps than pairs": (
        lambda: EdgeWalk.from_dense(torch.ones(2, 2), torch.ones(1, 1, 2, 2)),
        ("maps", "(2, 2, d_model, d_model)", "(1, 1, 2, 2)"),
    ),
    "frames singular": (lambda: cycle_of().change_frames(torch.zeros(3, 2, 2)), ("frames", "invertible", "token 0")),
    # laplacian
    "metric leaning": (lambda: in_metric(LAYER, EYE + 0.1 * torch.ones(8, 8).triu(1)), ("metric", "asymmetry")),
    "small metric leaning": (lambda: in_metric(LAYER, 1e-9 * (EYE + 0.5 * torch.ones(8, 8).triu(1))), ("asymmetry",)),
    "metric of other shape": (lambda: in_metric(LAYER, EYE[:7, :7]), ("metric", "([6,] 8, 8)", "got (7, 7)")),
    "metric a list": (lambda: in_metric(LAYER, [[1.0]]), ("metric", "torch.Tensor", "list")),
    "ridge infinite": (lambda: whitening_metric(EYE, torch.inf), ("ridge", "got inf")),
    # holonomy
    "cycle between token sets": (lambda: holonomy(BETWEEN, [0, 3]), ("walk", "as many destinations", "4 and 6")),
    "triangle between token sets": (lambda: triangle_defect(BETWEEN, 0, 1, 3), ("walk", "as many", "4 and 6")),
    "cycle of fractions": (lambda: holonomy(LAYER, [0.7, 1.2]), ("cycle", "token indices", "[0.7, 1.2]")),
    "cycle of letters": (lambda: holonomy(LAYER, ["a"]), ("cycle", "token indices", "['a']")),
    "cycle a number": (lambda: holonomy(LAYER, 3), ("cycle", "token indices", "3")),
    "cycle counted from the end": (lambda: holonomy(LAYER, [0, -1]), ("cycle", "below 6", "got -1")),
    "cycle out of range": (lambda: holonomy(EDGES, [0, 9]), ("cycle", "below 5", "got 9")),
    "cycle not joined": (lambda: holonomy(cycle_of(tokens=4), [0, 3]), ("cycle", "(dst=", "W > 0, got 0 both ways")),
    "tolerance negative": (lambda: parallel_fields(EDGES, PI, -1.0), ("tolerance", "nonnegative", "-1.0")),
    "tolerance not a number": (lambda: parallel_fields(EDGES, PI, np.nan), ("tolerance", "nonnegative", "nan")),
    # spectra
    "operator of edges": (lambda: WalkOperator(EDGES), ("walk", "ConnectionWalk", "EdgeWalk", "walk_operator")),
    "lazier than always": (lambda: lazy(OPERATOR, 2.0), ("stay", "[0, 1)", "2.0")),
    "generator of a rectangle": (lambda: generator(WIDE), ("operator", "square", "(20, 30)")),
    "generator of a matrix": (lambda: generator(np.eye(3)), ("operator", "LinearOperator", "ndarray")),
    "additive rectangle": (lambda: additive(WIDE), ("operator", "square", "(20, 30)")),
    "multiplicative rectangle": (lambda: multiplicative(WIDE), ("operator", "square", "(20, 30)")),
    "eigenvalues of a rectangle": (lambda: extreme_eigenvalues(WIDE, 2), ("operator", "square", "(20, 30)")),
    "half an eigenvalue": (lambda: extreme_eigenvalues(OPERATOR, 2.5), ("count", "got 2.5")),
    "density of a rectangle": (lambda: spectral_density(WIDE, 4, 6), ("operator", "square", "(20, 30)")),
    "half a probe": (lambda: spectral_density(OPERATOR, 4.5, 6), ("probes", "integers", "4.5")),
    "density of nan": (
        lambda: spectral_density(aslinearoperator(np.full((9, 9), np.nan)), 4, 6),
        ("operator", "finite", "NaN"),
    ),
    "no width": (lambda: DENSITY.smooth(np.zeros(1), 0.0), ("width", "positive", "0.0")),
    "width negative": (lambda: DENSITY.smooth(np.zeros(1), -1.0), ("width", "positive", "-1.0")),
    "one point bare": (lambda: DENSITY.below(0.0), ("points", "vector", "()")),
    "points in a grid": (lambda: DENSITY.smooth(np.zeros((2, 2)), 0.1), ("points", "vector", "(2, 2)")),
    # measures
    "flow, measure too short": (lambda: token_flow(W, torch.ones(5)), ("measure", "6 nonnegative weights", "got 5")),
    "flow, one weight for all": (lambda: token_flow(W, torch.ones(1)), ("measure", "6 nonnegative weights", "got 1")),
    "flow, negative": (lambda: reversibility_defect(W, -torch.ones(6)), ("measure", "nonnegative", "smallest -1")),
    "spectrum, measure zero": (lambda: reversibilised_spectrum(W, torch.zeros(6)), ("measure", "smallest 0")),
    "degree of a token apart": (
        lambda: degree_measure(torch.diag(torch.tensor([1.0, 0.0]))),
        ("matrix", "weight at every token", "token 1"),
    ),
    "law of a vector": (lambda: stationary_measure(torch.ones(3)), ("matrix", "square", "(3,)")),
    "defect of a vector": (lambda: stochasticity_defect(torch.ones(3)), ("matrix", "(dst, src)", "(3,)")),
    "uniform on nothing": (lambda: uniform_measure(0), ("tokens", "at least one", "0")),
    # synthetic
    "negative pi": (lambda: conditioned_walk(0, -PI), ("measure", "positive")),
    "pi with a gap": (lambda: conditioned_walk(0, torch.tensor([1.0, 0, 0])), ("measure", "positive", "smallest 0")),
    "no scale": (lambda: conditioned_walk(0, PI, scale=0.0), ("scale", "positive", "0.0")),
    "one metric for all": (lambda: conditioned_walk(0, PI, 3, torch.eye(3)), ("metrics", "token, d_model", "(3, 3)")),
    "metrics negative": (
        lambda: conditioned_walk(0, PI, 3, -torch.eye(3).repeat(5, 1, 1)),
        ("metrics", "positive definite", "-1"),
    ),
    "flat, frames singular": (lambda: flat_walk(0, PI, torch.zeros(5, 3, 3)), ("frames", "invertible", "token 0")),
    "cycle of two": (lambda: cycle_walk(2, torch.eye(2)), ("tokens", "at least 3", "2")),
    "cycle, singular": (lambda: cycle_walk(4, torch.zeros(2, 2)), ("around", "invertible", "rank 0")),
    "cycle, rectangle": (lambda: cycle_walk(4, torch.ones(2, 3)), ("around", "square", "(2, 3)")),
    "cycle, nan": (lambda: cycle_walk(4, torch.nan * torch.eye(2)), ("around", "finite", "nan")),
    "sphere without points": (lambda: sphere_tangent_walk(0), ("points", "at least 3", "0")),
    "sphere, radius negative": (lambda: sphere_tangent_walk(50, radius=-1.0), ("radius", "positive", "-1.0")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str, unchecked: None) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def test_is_irreducible_of_a_vector(unchecked: None) -> None:
    assert not is_irreducible(torch.ones(3))


@pytest.mark.parametrize("function", [extreme_eigenvalues, spectral_density])
def test_operators_that_are_not_self_adjoint_are_refused(function: Callable) -> None:
    """Lanczos iteration would answer all the same."""
    for walk in (random_walk(0), random_walk(1, causal=True)):
        operator = walk_operator(walk)
        with pytest.raises(ValueError, match=r"operator: expected a self-adjoint one.*additive"):
            function(operator)
        function(additive(operator))
        function(multiplicative(operator))
