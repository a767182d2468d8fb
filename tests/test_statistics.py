"""Trends over depth: known answers, intervals over passages, and the same numbers every time."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from cwlib.statistics import FEW, Estimate, Trend, depth_trend, estimate, thirds, thirds_table


def rows(values: np.ndarray | list, names: list[str] | None = None) -> pd.DataFrame:
    """Rows of a study from one line of values per passage, shuffled."""
    values = np.atleast_2d(values)
    names = names or [f"passage {n}" for n in range(len(values))]
    found = [(name, layer, v) for name, line in zip(names, values, strict=True) for layer, v in enumerate(line)]
    return pd.DataFrame(found, columns=["passage", "layer", "value"]).sample(frac=1.0, random_state=0)


RISING = np.arange(6.0) ** 3


@pytest.mark.parametrize("sign", [1, -1])
def test_a_monotone_quantity_has_a_trend_of_one_and_no_width(sign: int) -> None:
    noise = np.random.default_rng(0).uniform(0, 0.4, (5, 6))  # less than the smallest step
    assert depth_trend(rows(sign * (RISING + noise))) == Trend(float(sign), float(sign), float(sign), 5)


@pytest.mark.parametrize(
    ("values", "rho"),
    [
        ([1, 3, 2, 4], 0.8),  # 1 - 6 sum d^2 / n (n^2 - 1)
        ([4, 3, 2, 1], -1.0),
        ([2, 1, 4, 3, 5], 0.8),
        ([1, 2, 2], 3**0.5 / 2),  # a tie: Pearson's correlation of the ranks 1, 2.5, 2.5
    ],
)
def test_the_trend_is_spearmans(values: list, rho: float) -> None:
    trend = depth_trend(rows(values, ["-"]))
    assert trend.rho == pytest.approx(rho)
    assert (trend.low, trend.high, trend.passages) == (trend.rho, trend.rho, 0)  # weights only: nothing to resample


def test_the_trend_is_that_of_the_mean_over_passages() -> None:
    # each passage alone has the correlation 0.8, their mean rises throughout
    assert depth_trend(rows([[1, 3, 2, 4], [2, 1, 4, 3.5]])).rho == pytest.approx(1.0)


def test_the_interval_over_two_opposite_passages_is_known() -> None:
    # resamples draw both, or one of them twice, each of these with probability 1/4
    trend = depth_trend(rows([RISING, -2 * RISING]))
    assert trend == Trend(-1.0, -1.0, 1.0, 2)


def test_the_interval_of_noise_covers_zero() -> None:
    noise = np.random.default_rng(3).normal(size=(12, 10))
    trend = depth_trend(rows(noise))
    assert trend.low < -0.2 < 0.2 < trend.high
    assert trend.low <= trend.rho <= trend.high


def test_the_interval_narrows_as_passages_agree() -> None:
    noise = np.random.default_rng(1).normal(size=(8, 6))
    widths = [(t := depth_trend(rows(np.arange(6.0) + scale * noise))).high - t.low for scale in (0.5, 2.0, 8.0)]
    assert widths == sorted(widths) and widths[0] < widths[-1]


def test_the_same_seed_gives_the_same_interval_and_touches_no_global_state() -> None:
    table = rows(np.random.default_rng(2).normal(size=(5, 7)))
    before = np.random.get_state()[1].copy()
    first = depth_trend(table, seed=1)
    assert np.array_equal(np.random.get_state()[1], before)
    assert depth_trend(table.iloc[::-1], seed=1) == first
    others = [depth_trend(table, seed=seed) for seed in range(2, 5)]
    assert any((other.low, other.high) != (first.low, first.high) for other in others)
    assert {other.rho for other in others} == {first.rho}


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="rows: expected at least three layers for a trend over depth, got 2"):
        depth_trend(rows([[1, 2], [2, 3]]))


def test_a_gap_is_refused() -> None:
    table = rows([RISING, RISING])
    broken = table[~((table["passage"] == "passage 1") & (table["layer"] == 2))]
    with pytest.raises(ValueError, match="rows: expected every passage to have every layer, got 1 gaps"):
        depth_trend(broken)


# --- means and their intervals ------------------------------------------------------------------------------------


def per_passage(values: np.ndarray | list) -> pd.Series:
    return pd.Series(values, index=[f"passage {n}" for n in range(len(values))], dtype=float)


@pytest.mark.parametrize("count", range(2, FEW))
def test_the_interval_of_few_passages_is_students(count: int) -> None:
    values = np.random.default_rng(count).normal(3, 2, count)
    found = estimate(per_passage(values))
    low, high = stats.t.interval(0.95, count - 1, values.mean(), stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((values.mean(), low, high))
    assert found.effect == pytest.approx(values.mean() / values.std(ddof=1))


@pytest.mark.parametrize("count", [FEW, 40, 400])
def test_the_interval_of_many_passages_is_near_that_of_normal_theory(count: int) -> None:
    values = np.random.default_rng(count).normal(3, 2, count)
    found = estimate(per_passage(values))
    margin = stats.norm.ppf(0.975) * values.std(ddof=0) / count**0.5  # resamples vary as the values do
    assert found.mean == pytest.approx(values.mean())
    for distance in (found.mean - found.low, found.high - found.mean):
        assert distance == pytest.approx(margin, rel=0.15)
    assert found.effect == pytest.approx(values.mean() / values.std(ddof=1))


def test_a_bootstrapped_interval_stays_within_the_values() -> None:
    # Student's would reach below zero
    values = per_passage([0.0] * (FEW - 1) + [100.0])
    assert 0 <= estimate(values).low < estimate(values).high <= 100


def test_the_bootstrap_is_seeded_and_touches_no_global_state() -> None:
    values = per_passage(np.random.default_rng(0).normal(size=FEW))
    before = np.random.get_state()[1].copy()
    assert estimate(values, seed=1) == estimate(values, seed=1)
    assert np.array_equal(np.random.get_state()[1], before)
    assert len({estimate(values, seed=seed).low for seed in range(4)}) > 1


def test_what_depends_on_weights_only_has_no_width() -> None:
    found = estimate(pd.Series([2.5], index=["-"]))
    assert (found.mean, found.low, found.high) == (2.5, 2.5, 2.5) and np.isnan(found.effect)


def test_a_single_passage_has_a_mean_and_no_interval() -> None:
    found = estimate(per_passage([2.5]))
    assert found.mean == 2.5 and np.isnan([found.low, found.high, found.effect]).all()


def test_no_passage_has_no_mean() -> None:
    found = estimate(per_passage([]))
    assert np.isnan([found.mean, found.low, found.high, found.effect]).all()


@pytest.mark.parametrize("count", [3, FEW])
def test_passages_that_agree_leave_no_width_and_no_standardised_size(count: int) -> None:
    found = estimate(per_passage([0.5] * count))
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5) and np.isnan(found.effect)


def test_an_estimate_is_mirrored_and_moved() -> None:
    found = Estimate(1.0, -0.5, 3.0, 0.7)
    assert found.times(1) == found
    assert found.times(-1) == Estimate(-1.0, -3.0, 0.5, -0.7)
    assert found.moved(-2.0) == Estimate(-1.0, -2.5, 1.0, 0.7)


@pytest.mark.parametrize("count", [4, FEW])
def test_the_mirror_image_is_the_estimate_of_the_negated_values(count: int) -> None:
    values = per_passage(np.random.default_rng(1).normal(1, 1, count))
    mirrored, negated = estimate(values).times(-1), estimate(-values)
    assert (mirrored.mean, mirrored.effect) == pytest.approx((negated.mean, negated.effect))
    # resampled, the tails of a percentile interval differ a little
    assert (mirrored.low, mirrored.high) == pytest.approx((negated.low, negated.high), abs=0.1)


# --- early and late layers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "third"), [(1, 1), (2, 1), (3, 1), (5, 1), (6, 2), (8, 2), (9, 3)])
def test_thirds_are_the_first_and_last_layers_rounded_down(count: int, third: int) -> None:
    values = np.random.default_rng(count).normal(size=(3, count))
    found = thirds(rows(values)).loc[[f"passage {n}" for n in range(3)]]
    early = [sum(line[:third]) / third for line in values.tolist()]
    late = [sum(line[count - third :]) / third for line in values.tolist()]
    assert found["early"].tolist() == pytest.approx(early)
    assert found["late"].tolist() == pytest.approx(late)
    assert found["change"].tolist() == pytest.approx(np.subtract(late, early))


def test_thirds_are_of_the_layers_that_a_quantity_has() -> None:
    steps = rows([[9.0, 1, 2, 3, 4, 5, 6]]).query("layer > 0")  # a step has no value at the first layer
    assert thirds(steps).loc["passage 0"].to_dict() == {"early": 1.5, "late": 5.5, "change": 4.0}


def test_thirds_stand_beside_the_late_thirds_of_the_nulls() -> None:
    parts = [
        rows(np.arange(6.0) + shift).assign(checkpoint="a", source=source, metric=metric, gauge="")
        for source, shift, metric in (
            ("trained", 0, "m"),
            ("init", 10, "m"),
            ("gaussian", 20, "m"),
            ("trained", 30, "n"),
        )
    ]
    found = thirds_table(pd.concat(parts), "m")
    assert found["m"].loc["a"].to_dict() == {"early": 0.5, "late": 4.5, "late init": 14.5, "late gaussian": 24.5}
    assert list(found["m"]) == ["early", "late", "late gaussian", "late init"]


def test_thirds_are_averaged_over_passages() -> None:
    table = rows([np.arange(6.0), np.arange(6.0) + 4]).assign(checkpoint="a", source="trained", metric="m", gauge="")
    assert thirds_table(table, "m")["m"].loc["a"].to_dict() == {"early": 2.5, "late": 6.5}
