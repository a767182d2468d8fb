"""The rules of the claims on tables whose verdicts are known."""

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import pytest

from cwlib import statistics
from cwlib.claims import (
    CLAIMS,
    MIXED,
    NOT_SUPPORTED,
    NOT_TESTABLE,
    SUPPORTED,
    combine,
    evidence_table,
    judge,
    markdown,
    scale_table,
    verdict_table,
)
from cwlib.metrics import METRICS
from cwlib.statistics import Trend

LAYERS = 6
PASSAGES = ("a", "b", "c", "d")
NULL_PASSAGES = ("a", "c")
ZIGZAG = np.array([0, 1, 0, 1, 0, 1]) / 10  # a trend over depth, but a weak one
WEIGHTS_ONLY = {"head_isometry"}

Curve = Callable[[str, str, int], np.ndarray]  # of metric, passage and seed: a value per layer


def outward(metric: str) -> int:
    """+1 if the claim says that a metric rises."""
    return next(e.direction for claim in CLAIMS.values() for e in claim.evidence if e.metric == metric)


def towards(metric: str, _passage: str = "", _seed: int = 0) -> np.ndarray:
    return 1 + outward(metric) * np.arange(LAYERS) / LAYERS


def away(metric: str, _passage: str = "", _seed: int = 0) -> np.ndarray:
    return 1 - outward(metric) * np.arange(LAYERS) / LAYERS


def flat(metric: str, _passage: str = "", _seed: int = 0) -> np.ndarray:
    return 1 + outward(metric) * ZIGZAG


def far_ahead(metric: str, _passage: str = "", _seed: int = 0) -> np.ndarray:
    """No trend of note, but further in the claimed direction than any layer of `towards`."""
    return 1 + outward(metric) * (3 + ZIGZAG)


@pytest.fixture(autouse=True, scope="module")
def few_resamples() -> Iterator[None]:
    """The verdicts here do not hang on the number of resamples, and the time does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "RESAMPLES", 20)
        yield


def study(
    name: str = "model", trained: Curve = towards, init: Curve = flat, gaussian: Curve = flat, kind: str = "encoder"
) -> pd.DataFrame:
    """The table of a study of one checkpoint with all evidence of C1 and C2."""
    rows = []
    sources = [("trained", 0, trained), ("gaussian", 0, gaussian), *(("init", seed, init) for seed in range(3))]
    for evidence in (e for claim in CLAIMS.values() for e in claim.evidence):
        for source, seed, curve in sources:
            passages = PASSAGES if source == "trained" else NULL_PASSAGES
            for passage in ("-",) if evidence.metric in WEIGHTS_ONLY else passages:
                for layer, value in enumerate(curve(evidence.metric, passage, seed)):
                    rows.append((name, source, seed, passage, layer, evidence.metric, evidence.gauge, value))
    columns = ["checkpoint", "source", "seed", "passage", "layer", "metric", "gauge", "value"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(kind=kind, depth=table["layer"] / (LAYERS - 1))


# --- the rules ----------------------------------------------------------------------------------------------------

STRONG = Trend(0.9, 0.6, 1.0, 8)


@pytest.mark.claim("C1")
@pytest.mark.parametrize(
    ("trend", "null_trends", "deep", "null_deep", "verdict"),
    [
        (STRONG, [0.1, -0.5], 1.0, [], SUPPORTED),
        (STRONG, [0.1, 0.95], 1.0, [], MIXED),  # one null does better
        (STRONG, [0.9], 1.0, [], MIXED),  # or as well
        (Trend(0.4, -0.1, 0.8, 8), [0.0], 1.0, [], NOT_SUPPORTED),  # the interval holds zero
        (Trend(0.4, 0.0, 0.8, 8), [-0.9], 1.0, [], NOT_SUPPORTED),
        (Trend(-0.9, -1.0, -0.6, 8), [-0.95], 1.0, [], NOT_SUPPORTED),
        (Trend(1.0, 1.0, 1.0, 0), [0.99], 1.0, [], SUPPORTED),  # weights only
    ],
)
@pytest.mark.parametrize("direction", [1, -1])
def test_a_trend_is_judged_by_its_interval_and_its_nulls(
    trend: Trend, null_trends: list, deep: float, null_deep: list, verdict: str, direction: int
) -> None:
    if direction < 0:
        trend = Trend(-trend.rho, -trend.high, -trend.low, trend.passages)
    assert judge(trend, [direction * n for n in null_trends], direction * deep, null_deep, direction) == verdict


@pytest.mark.claim("C2")
@pytest.mark.parametrize(
    ("deep", "null_deep", "verdict"),
    [(0.9, [0.7, 0.8], SUPPORTED), (0.9, [0.7, 0.95], MIXED), (0.9, [0.9], MIXED), (0.5, [0.9, 0.8], MIXED)],
)
@pytest.mark.parametrize("direction", [1, -1])
def test_deep_layers_must_lie_beyond_every_null(deep: float, null_deep: list, verdict: str, direction: int) -> None:
    trend = Trend(direction * 0.9, *sorted((direction * 0.6, direction * 1.0)), 8)
    assert judge(trend, [0.0], direction * deep, [direction * n for n in null_deep], direction) == verdict


@pytest.mark.parametrize("null_trends", [[], [0.1]])
def test_an_undefined_trend_supports_nothing(null_trends: list) -> None:
    undefined = Trend(float("nan"), float("nan"), float("nan"), 4)  # as of a quantity that is constant over depth
    assert judge(undefined, null_trends, 1.0, [], +1) == NOT_SUPPORTED


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([SUPPORTED], SUPPORTED),
        ([SUPPORTED, SUPPORTED], SUPPORTED),
        ([SUPPORTED, NOT_SUPPORTED], MIXED),
        ([SUPPORTED, MIXED], MIXED),
        ([NOT_SUPPORTED, NOT_SUPPORTED], NOT_SUPPORTED),
        ([MIXED, MIXED], MIXED),
        ([NOT_TESTABLE, SUPPORTED], SUPPORTED),
        ([NOT_TESTABLE, NOT_TESTABLE], NOT_TESTABLE),
        ([], NOT_TESTABLE),
    ],
)
def test_a_claim_takes_the_verdict_its_parts_agree_on(parts: list, whole: str) -> None:
    assert combine(parts) == whole
    assert combine(reversed(parts)) == whole


def test_claims_rest_on_metrics_that_exist_in_the_gauge_they_name() -> None:
    for claim in CLAIMS.values():
        for evidence in claim.evidence:
            assert evidence.direction in (1, -1)
            assert (evidence.gauge != "") == (METRICS[evidence.metric].about == "graph")
    assert list(CLAIMS) == ["C1", "C2", "C3"]


# --- C1 and C2 on tables ------------------------------------------------------------------------------------------


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
@pytest.mark.parametrize(
    ("curves", "c1", "c2"),
    [
        ({}, SUPPORTED, SUPPORTED),
        ({"trained": away}, NOT_SUPPORTED, NOT_SUPPORTED),
        ({"init": towards}, MIXED, MIXED),  # what untrained weights do as well
        ({"init": away}, SUPPORTED, SUPPORTED),
        ({"gaussian": far_ahead}, SUPPORTED, MIXED),  # C1 asks for a trend only
        ({"init": far_ahead}, SUPPORTED, MIXED),
        ({"gaussian": towards}, SUPPORTED, MIXED),  # deep layers no further than the null's
    ],
)
def test_each_verdict_is_reached_on_a_table(curves: dict, c1: str, c2: str) -> None:
    evidence = evidence_table(study(**curves))
    for claim, verdict in (("C1", c1), ("C2", c2)):
        mine = evidence[evidence["claim"] == claim]
        assert sorted(mine["metric"]) == sorted(e.metric for e in CLAIMS[claim].evidence)
        assert set(mine["verdict"]) == {verdict}
    table = verdict_table(evidence, scale_table(evidence, {"model": 10**6}))
    assert table.loc[["C1", "C2", "C3"], "overall"].tolist() == [c1, c2, NOT_TESTABLE]
    assert table["statement"].tolist() == [claim.statement for claim in CLAIMS.values()]


@pytest.mark.claim("C1")
def test_passages_that_disagree_do_not_support() -> None:
    def torn(metric: str, passage: str, seed: int) -> np.ndarray:
        return (towards if passage in "ab" else away)(metric, passage, seed) + flat(metric)

    evidence = evidence_table(study(trained=torn)).set_index("metric")
    for metric in ("depth_step", "spectral_step", "operator_cosine"):
        assert evidence.loc[metric, "low"] < 0 < evidence.loc[metric, "high"]
        assert evidence.loc[metric, "verdict"] == NOT_SUPPORTED


@pytest.mark.claim("C2")
def test_deep_layers_are_compared_on_the_passages_of_the_nulls() -> None:
    def uneven(metric: str, passage: str, seed: int) -> np.ndarray:
        lift = 0 if passage in (*NULL_PASSAGES, "-") else 10
        return towards(metric, passage, seed) + outward(metric) * lift

    line = evidence_table(study(trained=uneven, gaussian=far_ahead)).set_index("metric").loc["edge_isometry"]
    assert line["deep"] == pytest.approx(1 + 4.5 / LAYERS)  # last third: layers 4 and 5
    assert line["null_deep"] == pytest.approx(4.05)
    assert line["verdict"] == MIXED


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
def test_evidence_shows_the_numbers_it_is_judged_by() -> None:
    def spread(metric: str, passage: str, seed: int) -> np.ndarray:
        """Nulls of which seed 1 trends most in the claimed direction, with the correlation 0.6."""
        order = [[5, 4, 3, 2, 1, 0], [0, 1, 3, 5, 4, 2], [0, 5, 1, 4, 2, 3]][seed]
        return outward(metric) * np.array(order) / 100

    evidence = evidence_table(study(init=spread, gaussian=spread)).set_index("metric")
    for metric, line in evidence.iterrows():
        sign = outward(metric)
        assert line["expected"] == {1: "rises", -1: "falls"}[sign]
        assert (line["rho"], line["low"], line["high"]) == (sign, sign, sign)
        assert line["null_rho"] == pytest.approx(sign * (1 - 6 * 14 / (6 * 35)))
        assert line["passages"] == (0 if metric in WEIGHTS_ONLY else len(PASSAGES))
        assert line["kind"] == "encoder"
        if line["claim"] == "C2":
            assert line["null_deep"] == pytest.approx(sign * 0.03)  # the best: layers 4 and 5 of seed 1
        else:
            assert np.isnan(line["null_deep"])


@pytest.mark.claim("C1")
def test_metrics_that_a_checkpoint_lacks_are_left_out() -> None:
    exactness = study("other").query("metric == 'depth_step'").assign(metric="t2_residual", gauge="")
    evidence = evidence_table(pd.concat([study(), exactness]))
    assert set(evidence["checkpoint"]) == {"model"}


# --- C3 -----------------------------------------------------------------------------------------------------------

SIZES = {"tiny": 10**6, "small": 10**7, "large": 10**8}
# orders of six layers by their Spearman correlation with depth
ORDERS = {0.2: [0, 2, 5, 4, 3, 1], 0.6: [0, 1, 3, 5, 4, 2], 1.0: [0, 1, 2, 3, 4, 5]}


def with_trend(rho: float) -> Curve:
    def curve(metric: str, _passage: str, _seed: int) -> np.ndarray:
        return outward(metric) * np.array(ORDERS[rho], dtype=float)

    return curve


@pytest.fixture(scope="module")
def evidence_by_trend(few_resamples: None) -> dict[float, pd.DataFrame]:
    """The evidence of a checkpoint with each trend."""
    return {rho: evidence_table(study(trained=with_trend(rho))) for rho in ORDERS}


@pytest.fixture
def family(evidence_by_trend: dict) -> Callable:
    """Evidence of encoders of growing size with given trends."""

    def build(*trends: float) -> pd.DataFrame:
        found = zip(SIZES, trends, strict=False)
        return pd.concat([evidence_by_trend[rho].assign(checkpoint=name) for name, rho in found])

    return build


def strengths(evidence: pd.DataFrame) -> pd.Series:
    """Correlations with depth, positive in the claimed direction."""
    return evidence["rho"] * evidence["expected"].map({"rises": 1, "falls": -1})


def test_the_orders_have_the_correlations_they_are_filed_under(evidence_by_trend: dict) -> None:
    for rho, evidence in evidence_by_trend.items():
        assert np.allclose(strengths(evidence), rho)


@pytest.mark.claim("C3")
@pytest.mark.parametrize(
    ("trends", "verdict"),
    [
        ((0.2, 0.6, 1.0), SUPPORTED),
        ((0.6, 0.6, 0.6), NOT_SUPPORTED),
        ((1.0, 0.6, 0.2), NOT_SUPPORTED),
        ((0.2, 1.0, 0.6), MIXED),  # larger is stronger on the whole, but three points do not show it
    ],
)
def test_three_checkpoints_of_a_kind_decide(trends: tuple, verdict: str, family: Callable) -> None:
    evidence = family(*trends)
    scale = scale_table(evidence, SIZES)
    assert len(scale) == 7
    assert set(scale["models"]) == {3}
    assert set(scale["verdict"]) == {verdict}
    assert np.allclose(scale["slope"], (trends[2] - trends[0]) / 2)  # per tenfold size; the middle has no leverage
    table = verdict_table(evidence, scale)
    assert table.loc["C3", "overall"] == verdict
    assert table.loc["C3", list(SIZES)].tolist() == [verdict] * 3


@pytest.mark.claim("C3")
def test_the_interval_is_students(family: Callable) -> None:
    # about the line 0.6 + 0.2 x, residuals -0.2, 0.4, -0.2 at x = -1, 0, 1; one degree of freedom
    error = (0.24 / 1 / 2) ** 0.5
    for line in scale_table(family(0.2, 1.0, 0.6), SIZES).itertuples():
        assert line.slope == pytest.approx(0.2)
        assert line.high - line.slope == pytest.approx(12.7062047 * error)  # the t quantile at 97.5%
        assert line.slope - line.low == pytest.approx(12.7062047 * error)


@pytest.mark.claim("C3")
def test_two_checkpoints_of_a_kind_do_not_decide(family: Callable, evidence_by_trend: dict) -> None:
    decoder = evidence_by_trend[1.0].assign(checkpoint="large", kind="decoder")
    evidence = pd.concat([family(0.2, 1.0), decoder])
    scale = scale_table(evidence, SIZES)
    assert sorted(scale["models"].unique()) == [1, 2]
    assert set(scale["verdict"]) == {NOT_TESTABLE}
    assert scale["slope"].isna().all()
    assert verdict_table(evidence, scale).loc["C3", "overall"] == NOT_TESTABLE


@pytest.mark.claim("C3")
def test_kinds_are_judged_apart_and_an_untestable_one_does_not_count(family: Callable, evidence_by_trend: dict) -> None:
    decoder = evidence_by_trend[1.0].assign(checkpoint="decoder", kind="decoder")
    evidence = pd.concat([family(0.2, 0.6, 1.0), decoder])
    table = verdict_table(evidence, scale_table(evidence, SIZES | {"decoder": 10**9}))
    assert list(table.columns) == ["statement", "decoder", "large", "small", "tiny", "overall"]
    assert table.loc["C3"].tolist()[1:] == [NOT_TESTABLE, SUPPORTED, SUPPORTED, SUPPORTED, SUPPORTED]


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
def test_checkpoints_that_differ_make_a_claim_mixed() -> None:
    evidence = evidence_table(pd.concat([study("good"), study("bad", trained=away)]))
    table = verdict_table(evidence, scale_table(evidence, {"good": 10**6, "bad": 10**7}))
    for claim in ("C1", "C2"):
        assert table.loc[claim, ["good", "bad", "overall"]].tolist() == [SUPPORTED, NOT_SUPPORTED, MIXED]


def test_the_markdown_table_holds_every_verdict() -> None:
    evidence = evidence_table(study())
    table = verdict_table(evidence, scale_table(evidence, {"model": 10**6}))
    head, rule, *lines = markdown(table).splitlines()
    assert head == "| claim | statement | model | overall |"
    assert set(rule) == {"|", "-", " "}
    for claim, line in zip(CLAIMS.values(), lines, strict=True):
        expected = [claim.id, claim.statement, table.loc[claim.id, "model"], table.loc[claim.id, "overall"]]
        assert [cell.strip() for cell in line.strip("|").split("|")] == expected
