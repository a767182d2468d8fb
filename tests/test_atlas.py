"""Every system of the atlas against the walk it induces, and the measures of a pair against hand-made ones."""

import math
from pathlib import Path

import pytest
import torch

from cwlib.atlas import place, table
from cwlib.atlas_geometry import laplacian_checks
from cwlib.atlas_pair import CONDITIONS, ROUNDING, SYSTEMS, Pair, best_measure, defects, ranks
from cwlib.measures import uniform_measure
from cwlib.synthetic import conditioned_walk, flat_walk, random_measure, random_orthogonal, random_walk

SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def tables() -> list:
    return [table(seed) for seed in SEEDS]


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("seed", SEEDS)
def test_system_is_the_pair_it_induces(name: str, seed: int) -> None:
    placed = SYSTEMS[name].place(seed)
    assert placed.output.norm() > 1e-3
    assert placed.residual <= 1e-10
    failed = [check for check in placed.checks if not check.passed]
    assert not failed


@pytest.mark.parametrize("name", SYSTEMS)
def test_axioms_fail_as_declared(name: str) -> None:
    for seed in SEEDS:
        measured = defects(SYSTEMS[name].place(seed).pair)
        for axiom in ("nonnegative", "stochastic"):
            if axiom in SYSTEMS[name].fails:
                assert measured[axiom] > 1e-3, axiom
            else:
                assert measured[axiom] <= ROUNDING, axiom


def test_table_has_a_row_for_every_system(tables: list) -> None:
    for found in tables:
        assert list(found.index) == list(SYSTEMS)
        assert {*CONDITIONS, "residual", "verdict", "paper"} <= set(found.columns)


def test_readme_counts_the_systems_and_its_residual_holds(tables: list) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    assert f"places {len(SYSTEMS)} systems of the literature" in readme and "the two agree to 1e-10" in readme
    assert max(found["residual"].max() for found in tables) <= 1e-10


def test_unknown_system_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of Transformer"):
        place("Transformers")


def _pair(walk) -> Pair:
    maps = torch.zeros(walk.tokens, walk.tokens, walk.d_model, walk.d_model, dtype=torch.float64)
    maps[walk.dst, walk.src] = walk.maps
    return Pair(walk.effective_walk(), maps)


@pytest.mark.parametrize("dropped", [None, "stochastic", "reversible", "isometric", "inverse"])
def test_defects_find_the_condition_that_was_dropped(dropped: str | None) -> None:
    flags = {} if dropped is None else {dropped: False}
    measured = defects(_pair(conditioned_walk(3, random_measure(3, 5), 3, **flags)))
    broken = {
        name for name in ("nonnegative", "stochastic", "reversible", "isometric", "inverse") if measured[name] > 1e-8
    }
    assert broken == ({dropped} if dropped else set())
    assert measured["flat"] > 1e-2 and measured["constant"] > 1e-2


def test_flat_connections_are_found_in_any_frames() -> None:
    frames = random_orthogonal(1, 5, 3) * torch.linspace(0.5, 2, 5, dtype=torch.float64)[:, None, None]
    assert defects(_pair(flat_walk(2, random_measure(2, 5), frames)))["flat"] < 1e-12


@pytest.mark.parametrize("size", [1e-155, 1e-170, 1e155])
def test_defects_do_not_depend_on_the_size_of_maps(size: float) -> None:
    pair = Pair.from_walk(random_walk(0, heads=2, tokens=4, d_model=3, d_head=3))
    assert defects(Pair(pair.weight, size * pair.maps)) == pytest.approx(defects(pair), rel=1e-9)


def test_what_makes_no_sense_is_not_a_number() -> None:
    weight, names = torch.full((3, 3), 1 / 3, dtype=torch.float64), ("isometric", "inverse", "flat", "constant")
    nothing = defects(Pair(weight, torch.zeros(3, 3, 2, 2)))
    assert [name for name, value in nothing.items() if value != value] == list(names)
    eye = torch.eye(2, dtype=torch.float64)
    assert max(defects(Pair.constant(weight, eye))[name] for name in names) < 1e-15
    for least in (1e-9, 0.0):  # a singular map goes along no path back
        assert math.isnan(defects(Pair.constant(weight, torch.diag(torch.tensor([1.0, least]))))["flat"])
    causal = defects(Pair.constant(weight.tril() / weight.tril().sum(1, keepdim=True), eye))
    assert math.isnan(causal["inverse"]) and causal["isometric"] == 0


def test_a_way_back_that_turns_vectors_around_is_no_inverse() -> None:
    turn = torch.tensor([[0.0, -2.0], [2.0, 0.0]], dtype=torch.float64)
    measured = defects(Pair.constant(torch.full((3, 3), 1 / 3, dtype=torch.float64), turn))
    assert measured["inverse"] == 1 and measured["isometric"] < 1e-15


def test_two_kinds_of_token_have_frames_of_their_own() -> None:
    frames = random_orthogonal(3, 5, 2)
    maps = frames[:2, None] @ frames[None, 2:].mT
    weight = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    assert defects(Pair(weight, maps))["flat"] < 1e-14
    maps[0, 0] = -maps[0, 0]
    assert defects(Pair(weight, maps))["flat"] > 1


@pytest.mark.parametrize("size", [0.5, 0.9, 1.1])
def test_a_massive_operator_is_no_connection_laplacian(size: float) -> None:
    pair = SYSTEMS["Gauge equivariant CNN"].place(0).pair
    assert laplacian_checks("as it is", pair)[0].passed
    assert not laplacian_checks("scaled", Pair(pair.weight, size * pair.maps))[0].passed


def test_a_pair_keeps_its_numbers() -> None:
    weight = torch.eye(2, dtype=torch.float64)
    pair = Pair.constant(weight, torch.eye(2, dtype=torch.float64))
    weight.mul_(2)
    assert pair.weight.sum() == 2


@pytest.mark.parametrize("seed", [-1, 1.5, None, "a"])
def test_seeds_that_are_none_are_refused(seed: object, unchecked: None) -> None:
    with pytest.raises(ValueError, match="seed: expected an integer, at least 0, got"):
        place("Transformer", seed)


def test_best_measure_is_the_reversible_one() -> None:
    measure = random_measure(4, 6)
    assert torch.allclose(best_measure(conditioned_walk(4, measure, 2).effective_walk()), measure, atol=1e-12)


def test_constant_transport_and_ranks() -> None:
    walk = random_walk(0, heads=1, tokens=5, d_model=4, d_head=2)
    pair = Pair.from_walk(walk)
    assert defects(pair)["constant"] < 1e-12
    assert ranks(pair) == {"walk_rank": 5, "transport_rank": 2, "schmidt_rank": 1}
    assert defects(Pair.from_walk(random_walk(0)))["constant"] > 1e-2


def test_signed_weights_and_bipartite_pairs_are_measured() -> None:
    weight = torch.tensor([[1.5, -0.5], [0.5, 0.5]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64)
    measured = defects(Pair.constant(weight, eye))
    assert measured["nonnegative"] == pytest.approx(1 / 6) and measured["stochastic"] < 1e-15
    assert measured["reversible"] != measured["reversible"]
    tall = defects(Pair.constant(uniform_measure(3).expand(2, 3), eye))
    assert tall["stochastic"] < 1e-15 and tall["reversible"] != tall["reversible"]


@pytest.mark.parametrize(
    ("weight", "maps", "words"),
    [
        (torch.full((2, 2), torch.nan), torch.ones(2, 2, 1, 1), "weight"),
        (torch.ones(2, 3), torch.ones(2, 2, 1, 1), "a map for each"),
        (torch.zeros(2, 2), torch.ones(2, 2, 1, 1), "an edge that carries weight"),
    ],
)
def test_pair_refuses_what_does_not_fit(weight: torch.Tensor, maps: torch.Tensor, words: str, unchecked: None) -> None:
    with pytest.raises(ValueError, match=words):
        Pair(weight, maps)


def test_pair_computes_in_double_precision_and_refuses_fields_that_do_not_fit(unchecked: None) -> None:
    pair = Pair.constant(torch.full((2, 3), 1 / 3), torch.eye(2))
    assert (pair @ torch.ones(3, 2)).dtype == pair.weight.dtype == pair.maps.dtype == torch.float64
    assert defects(pair)["isometric"] == 0
    with pytest.raises(ValueError, match=r"field: expected shape \(src, d_in\) = \(3, 2\), got \(2, 2\)"):
        pair @ torch.ones(2, 2)
