"""Residuals, tolerances and tables of checks."""

import math

import pandas as pd
import pytest
import torch

from cwlib.checks import TOLERANCE, Check, check_table, compare, relative_residual, tolerance

NAN, INF = float("nan"), float("inf")


# --- tolerance and residual ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tolerance_leaves_room_above_rounding(dtype: torch.dtype) -> None:
    epsilon = torch.finfo(dtype).eps
    assert 4 * epsilon < tolerance(dtype) < 1e4 * epsilon


def test_tolerance_of_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype: expected one of float64, float32.*got torch.int64; cast"):
        tolerance(torch.int64)


def test_residual_is_relative_to_the_larger_side() -> None:
    left, right = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 14.0])
    expected = 10 / math.sqrt(9 + 196)
    assert relative_residual(left, right) == pytest.approx(expected, rel=1e-14)
    assert relative_residual(right, left) == pytest.approx(expected, rel=1e-14)
    assert relative_residual(1e-30 * left.double(), 1e-30 * right.double()) == pytest.approx(expected, rel=1e-14)


def test_residual_of_equal_opposite_and_vanishing_sides() -> None:
    x = torch.arange(1.0, 7.0).reshape(2, 3)
    assert relative_residual(x, x) == 0
    assert relative_residual(x, -x) == pytest.approx(2)
    assert relative_residual(x, 0 * x) == relative_residual(0 * x, x) == pytest.approx(1)
    assert relative_residual(0 * x, 0 * x) == 0
    assert relative_residual(torch.tensor(2.0), torch.tensor(1.0)) == pytest.approx(0.5)


def test_residual_is_accumulated_in_float64() -> None:
    # 300^2 overflows float16, and 1 + 2^-11 is not a float16
    x = torch.full((400,), 300.0, dtype=torch.float16)
    assert relative_residual(x, x.double() * (1 + 2**-11)) == pytest.approx(2**-11, rel=1e-3)
    assert relative_residual(torch.tensor([1.0]), torch.tensor([1.0 + 1e-9], dtype=torch.float64)) > 0


@pytest.mark.parametrize("bad", [NAN, INF])
def test_residual_of_numbers_that_are_not_finite_is_not_a_number(bad: float) -> None:
    good, spoilt = torch.ones(3), torch.tensor([1.0, bad, 1.0])
    for pair in ((good, spoilt), (spoilt, good), (spoilt, spoilt)):
        assert math.isnan(relative_residual(*pair))


def test_residual_does_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"equal shapes, got \(3, 1\) and \(3,\)"):
        relative_residual(torch.ones(3, 1), torch.ones(3))


# --- one check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("residual", "holds", "passed"),
    [(1e-13, True, True), (1e-12, True, True), (1e-11, True, False), (0.0, True, True),
     (1e-13, False, False), (1e-12, False, True), (0.5, False, True)],
)  # fmt: skip
def test_check_passes_on_the_right_side_of_its_tolerance(residual: float, holds: bool, passed: bool) -> None:
    assert Check("name", "a", "b", residual, 1e-12, holds).passed is passed


@pytest.mark.parametrize("holds", [True, False])
def test_not_a_number_never_passes(holds: bool) -> None:
    assert not Check("name", "a", "b", NAN, 1e-12, holds).passed
    assert not compare("name", ("a", torch.tensor([1.0, NAN])), ("b", torch.ones(2)), holds=holds).passed
    assert not Check("name", "a", "b", 0.0, NAN, holds).passed


def test_infinite_residual_fails_an_identity() -> None:
    assert not Check("name", "a", "b", INF, 1e-12).passed


def test_compare_measures_the_distance() -> None:
    check = compare("T0", ("left", torch.tensor([1.0, 0.0])), ("right", torch.tensor([1.0, 0.5])))
    assert (check.name, check.lhs, check.rhs, check.holds) == ("T0", "left", "right", True)
    assert check.residual == pytest.approx(0.5 / math.sqrt(1.25))
    assert not check.passed
    with pytest.raises(ValueError, match="equal shapes"):
        compare("T0", ("left", torch.ones(2)), ("right", torch.ones(2, 1)))


def test_compare_takes_the_tolerance_of_the_coarser_side() -> None:
    for left in TOLERANCE:
        for right in TOLERANCE:
            check = compare("T0", ("a", torch.ones(2, dtype=left)), ("b", torch.ones(2, dtype=right)))
            assert check.tolerance == max(TOLERANCE[left], TOLERANCE[right])
    ones = torch.ones(2, dtype=torch.float64)
    assert compare("T0", ("a", ones), ("b", ones), bound=1e-3).tolerance == 1e-3
    assert compare("T0", ("a", ones), ("b", ones), bound=0.0).passed


def test_a_counterexample_must_fail_visibly() -> None:
    ones = torch.ones(2, dtype=torch.float64)
    near = compare("T0", ("a", ones), ("b", ones * 1.001), holds=False)
    far = compare("T0", ("a", ones), ("b", ones * 1.1), holds=False)
    assert near.tolerance == far.tolerance == 1e-2
    assert not near.passed and far.passed


# --- tables ----------------------------------------------------------------------------------------------------------


def check(residual: float, bound: float = 1e-12, name: str = "T0", holds: bool = True) -> Check:
    return Check(name, "a", "b", residual, bound, holds)


def test_table_folds_repetitions_of_a_check() -> None:
    table = check_table([check(1e-16), check(0.5, 1e-2, holds=False, name="T0 broken"), check(1e-15), check(0.0)])
    assert list(table.columns) == ["instances", "compares", "residual", "bound", "passed"]
    assert table.index.name == "check" and list(table.index) == ["T0", "T0 broken"]
    assert table.loc["T0"].to_dict() == {
        "instances": 3, "compares": "a = b", "residual": "<= 1e-12", "bound": "<= 1e-12", "passed": True,
    }  # fmt: skip
    broken = table.loc["T0 broken"]
    assert (broken["instances"], broken["compares"], broken["bound"]) == (1, "a != b", ">= 1e-02")
    assert broken["passed"] and float(broken["residual"].removeprefix(">= ")) == pytest.approx(0.5)


def test_table_keeps_an_identity_and_its_counterexample_apart() -> None:
    table = check_table([check(0.0), check(0.7, 1e-2, holds=False)])
    assert table["instances"].tolist() == [1, 1] and table["passed"].all()


def test_one_failure_fails_the_line_and_shows_the_worst() -> None:
    table = check_table([check(1e-16), check(3e-4), check(1e-5)])
    assert not table["passed"].item() and table["residual"].item() == "3.0e-04"
    table = check_table([check(r, 1e-2, holds=False) for r in (0.5, 2e-3, 0.1)])
    assert not table["passed"].item() and table["residual"].item() == "2.0e-03"


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("residuals", [(NAN, 0.5e-12, 1.0), (0.5e-12, NAN, 1.0), (0.5e-12, 1.0, NAN)])
def test_table_shows_not_a_number_wherever_it_stands(residuals: tuple[float, ...], holds: bool) -> None:
    table = check_table([check(r, 2.0 if holds else 1e-13, holds=holds) for r in residuals])
    assert not table["passed"].item() and table["residual"].item() == "nan"


def test_table_does_not_claim_a_bound_that_a_member_missed() -> None:
    """Two precisions under one name: the float64 one fails, though within the bound of the other."""
    table = check_table([check(1e-7, 1e-12), check(1e-8, 1e-5)])
    assert not table["passed"].item() and not table["residual"].item().startswith("<=")


def test_table_is_text_that_does_not_depend_on_the_last_digits() -> None:
    tables = [check_table([check(r), check(0.3, 1e-2, "T0 broken", False)]) for r in (1.1e-16, 2.3e-15)]
    pd.testing.assert_frame_equal(*tables)


def test_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one Check"):
        check_table([])


def test_table_takes_any_iterable() -> None:
    assert check_table(check(r) for r in (0.0, 1e-16, 1e-15))["instances"].item() == 3
