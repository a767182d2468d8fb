"""The rules of the claims on cases and tables whose verdicts are known."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from cwlib import statistics
from cwlib.catalogue import CATALOGUE
from cwlib.claims import (
    CLAIMS,
    MIXED,
    NOT_SUPPORTED,
    NOT_TESTABLE,
    SUPPORTED,
    Case,
    combine,
    evidence_table,
    judge,
)
from cwlib.metrics import METRICS
from cwlib.statistics import Estimate, Trend
from cwlib.verdicts import markdown, model_groups, scale_table, verdict_table

LAYERS = 6
DEPTH = np.arange(LAYERS)
LATE = np.array([0, 0, 0, 0, 1, 1])
PASSAGES = ("a", "b", "c", "d")
NULL_PASSAGES = ("a", "c")
ON_ALL_PASSAGES = {"trained", "q4_1", "q5_0"}
WEIGHTS_ONLY = {"head_isometry"}
# what a study does not measure, since it would be the trained value again
LACKS = {
    "depth_step": {"gaussian", "shuffled"},
    "spectral_step": {"gaussian", "shuffled"},
    "head_isometry": {"shuffled", "sinkless"},
    "norm_cv": {"shuffled"},
    "angle_correlation": {"shuffled"},
}
T_1, T_2 = 12.7062047, 4.3026527  # Student's t at 97.5% with one and two degrees of freedom

Curve = Callable[[str, str, int], np.ndarray]  # of metric, passage and seed: a value per layer

OUTWARD = {e.metric: e.direction for claim in CLAIMS.values() for e in claim.evidence}  # +1: the claim says it rises
CLAIM_OF = {e.metric: claim.id for claim in CLAIMS.values() for e in claim.evidence}


def shape(values: np.ndarray | list) -> Curve:
    """The same values on every passage, counted in the claimed direction."""
    return lambda metric, _passage, _seed: 1 + OUTWARD[metric] * np.asarray(values)


towards = shape(DEPTH / 6)  # its change is 4/6, its late value 4.5/6
away = shape(-DEPTH / 6)
flat = shape([0, 0.1, 0, 0.1, 0, 0.1])  # no change at all
far_ahead = shape([3, 3.1, 3, 3.1, 3, 3.1])  # nor here, but further out than any layer of `towards`
NULLS = {"init": flat, "gaussian": flat, "shuffled": flat}


@pytest.fixture(autouse=True, scope="module")
def few_resamples() -> Iterator[None]:
    """The verdicts here do not hang on the number of resamples, and the time does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "RESAMPLES", 20)
        yield


def study(
    name: str = "model",
    kind: str = "encoder",
    stored_as: str = "float32",
    passages: tuple[str, ...] = PASSAGES,
    null_passages: tuple[str, ...] = NULL_PASSAGES,
    **curves: Curve | None,
) -> pd.DataFrame:
    """The table of a study of one checkpoint with all evidence of C1 and C2; None leaves a source out."""
    rows = []
    for source, curve in ({"trained": towards} | NULLS | curves).items():
        for evidence in (e for claim in CLAIMS.values() for e in claim.evidence):
            if curve is None or source in LACKS.get(evidence.metric, ()):
                continue
            texts = passages if source in ON_ALL_PASSAGES else null_passages
            for seed in range(3) if source == "init" else (0,):
                for passage in ("-",) if evidence.metric in WEIGHTS_ONLY else texts:
                    for layer, value in enumerate(curve(evidence.metric, passage, seed)):
                        rows.append((source, seed, passage, layer, evidence.metric, evidence.gauge, value))
    table = pd.DataFrame(rows, columns=["source", "seed", "passage", "layer", "metric", "gauge", "value"])
    depth = table["layer"] / (LAYERS - 1)
    return table.assign(checkpoint=name, at="", kind=kind, depth=depth, stored_as=stored_as)


def by_metric(*tables: pd.DataFrame, of: str = "model") -> pd.DataFrame:
    """The evidence of one of the checkpoints."""
    evidence = evidence_table(pd.concat(tables))
    return evidence[evidence["checkpoint"] == of].set_index("metric")


# --- the rule -----------------------------------------------------------------------------------------------------


def ahead(mean: float = 1.0) -> Estimate:
    return Estimate(mean, mean - 0.5, mean + 0.5, 2.0)


WITHIN = Estimate(0.4, -0.1, 0.9, 1.0)  # of zero
TOUCHING = Estimate(0.4, 0.0, 0.8, 1.0)
BELOW = Estimate(-1.0, -1.5, -0.5, -2.0)
UNKNOWN = Estimate(np.nan, np.nan, np.nan, np.nan)
GAINS = {"init 0": ahead(), "init 1": ahead(2.0), "init 2": ahead(3.0), "gaussian": ahead(), "shuffled": ahead()}
BEST = Case(Trend(0.9, 0.6, 1.0, 8), ahead(), GAINS, ahead(), GAINS)

failing = pytest.mark.parametrize("other", [WITHIN, TOUCHING, BELOW, UNKNOWN], ids=["within", "at", "below", "NaN"])


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
@pytest.mark.parametrize(
    "case",
    [
        BEST,
        replace(BEST, sinkless=None),  # encoders
        replace(BEST, gaps={}),  # C1
        replace(BEST, gains={"init 0": ahead()}),  # nulls that would repeat the trained value are not measured
        replace(BEST, trend=Trend(1.0, 1.0, 1.0, 0)),  # weights only
    ],
)
def test_what_passes_every_condition_is_supported(case: Case) -> None:
    assert judge(case) == SUPPORTED


@pytest.mark.claim("C1")
@failing
def test_a_change_that_may_be_none_is_not_supported(other: Estimate) -> None:
    assert judge(replace(BEST, change=other)) == NOT_SUPPORTED


@pytest.mark.claim("C1")
@pytest.mark.parametrize(
    "trend",
    [
        Trend(0.4, -0.1, 0.8, 8),
        Trend(0.4, 0.0, 0.8, 8),
        Trend(-0.9, -1.0, -0.6, 8),
        Trend(-1.0, -1.0, -1.0, 0),
        Trend(np.nan, np.nan, np.nan, 8),  # constant over depth
    ],
)
def test_a_trend_that_may_be_none_is_not_supported(trend: Trend) -> None:
    assert judge(replace(BEST, trend=trend)) == NOT_SUPPORTED


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
@failing
@pytest.mark.parametrize("null", GAINS)
def test_a_single_null_that_is_not_beaten_makes_it_mixed(null: str, other: Estimate) -> None:
    assert judge(replace(BEST, gains=GAINS | {null: other})) == MIXED
    assert judge(replace(BEST, gaps=GAINS | {null: other})) == MIXED


@pytest.mark.claim("C1")
@failing
def test_a_change_that_needs_the_sink_is_mixed(other: Estimate) -> None:
    assert judge(replace(BEST, sinkless=other)) == MIXED


def test_without_nulls_it_is_at_best_mixed() -> None:
    assert judge(replace(BEST, gains={}, gaps={}, sinkless=None)) == MIXED
    assert judge(replace(BEST, gains={}, gaps={}, change=BELOW)) == NOT_SUPPORTED


@pytest.mark.parametrize("change", [ahead(), BELOW])
def test_one_passage_says_nothing_of_others(change: Estimate) -> None:
    assert judge(replace(BEST, trend=Trend(0.9, np.nan, np.nan, 1), change=change)) == NOT_TESTABLE


def test_the_hardest_null_is_the_one_with_the_least_gain() -> None:
    assert replace(BEST, gains=GAINS | {"init 1": ahead(0.9)}).hardest == "init 1"
    assert replace(BEST, gains=GAINS | {"gaussian": BELOW, "shuffled": ahead(0.1)}).hardest == "gaussian"


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
            assert (evidence.metric in WEIGHTS_ONLY) == METRICS[evidence.metric].weights_only
    assert list(CLAIMS) == ["C1", "C2", "C3"]


# --- C1 and C2 on tables, whose metrics are claimed to rise or to fall --------------------------------------------


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
@pytest.mark.parametrize(
    ("curves", "c1", "c2"),
    [
        ({}, SUPPORTED, SUPPORTED),
        ({"trained": away}, NOT_SUPPORTED, NOT_SUPPORTED),
        ({"trained": away, "init": shape(-2 * DEPTH / 6)}, NOT_SUPPORTED, NOT_SUPPORTED),
        ({"init": towards}, MIXED, MIXED),  # what untrained weights do as well
        ({"init": away}, SUPPORTED, SUPPORTED),
        ({"init": far_ahead}, SUPPORTED, MIXED),  # C1 asks for a gain only
    ],
)
def test_each_verdict_is_reached_on_a_table(curves: dict, c1: str, c2: str) -> None:
    table = study(**curves)
    evidence = evidence_table(table)
    for claim, verdict in (("C1", c1), ("C2", c2)):
        mine = evidence[evidence["claim"] == claim]
        assert sorted(mine["metric"]) == sorted(e.metric for e in CLAIMS[claim].evidence)
        assert set(mine["verdict"]) == {verdict}
    verdicts = verdict_table(evidence, scale_table(table, evidence, {"model": 10**6}))
    assert verdicts.loc[["C1", "C2", "C3"], "overall"].tolist() == [c1, c2, NOT_TESTABLE]
    assert verdicts["statement"].tolist() == [claim.statement for claim in CLAIMS.values()]


@pytest.mark.claim("C1")
@pytest.mark.parametrize(
    ("values", "rho", "change"),
    [
        ([1, 9, 9.1, 9.2, 0.1, 9.3], 1 - 6 * 20 / 210, -0.3),  # most layers climb, the last third does not
        ([3, 4, 2, 1, 0, 100], 1 - 6 * 38 / 210, 46.5),  # one layer far out, the others fall
    ],
)
def test_a_trend_in_rank_and_a_change_in_size_are_both_needed(values: list, rho: float, change: float) -> None:
    for _, line in by_metric(study(trained=shape(values))).iterrows():
        assert (line["rho"], line["change"]) == (pytest.approx(rho), pytest.approx(change))
        assert line["verdict"] == NOT_SUPPORTED


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
@pytest.mark.parametrize("source", ["init", "gaussian", "shuffled", "sinkless"])
def test_each_null_alone_can_make_a_metric_mixed(source: str) -> None:
    # what a null does as well, and what is gone without token 0
    worse = {"init": towards, "gaussian": towards, "shuffled": towards, "sinkless": flat}[source]

    def seed_2(metric: str, passage: str, seed: int) -> np.ndarray:
        return (worse if seed == 2 or source != "init" else flat)(metric, passage, seed)

    for metric, line in by_metric(study(kind="decoder", **{source: seed_2})).iterrows():
        assert line["verdict"] == (SUPPORTED if source in LACKS.get(metric, ()) else MIXED), metric


@pytest.mark.claim("C2")
@pytest.mark.parametrize("null", ["init", "gaussian", "shuffled"])
def test_only_c2_asks_that_deep_layers_lie_beyond_a_null(null: str) -> None:
    for metric, line in by_metric(study(**{null: far_ahead})).iterrows():
        behind = CLAIM_OF[metric] == "C2" and null not in LACKS.get(metric, ())
        assert line["verdict"] == (MIXED if behind else SUPPORTED), metric
        assert np.isnan(line["gap"]) == (CLAIM_OF[metric] == "C1")
        if behind:
            assert line["gap"] == pytest.approx(4.5 / 6 - 3.05)


@pytest.mark.claim("C1")
def test_passages_that_disagree_do_not_support() -> None:
    def torn(metric: str, passage: str, seed: int) -> np.ndarray:
        return (towards if passage in "ab-" else away)(metric, passage, seed) + flat(metric, passage, seed)

    for metric, line in by_metric(study(trained=torn)).drop(index="head_isometry").iterrows():
        assert line["rho_low"] < 0 < line["rho_high"] and line["change_low"] < 0 < line["change_high"]
        assert line["verdict"] == NOT_SUPPORTED, metric


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
def test_trained_values_are_compared_on_the_passages_of_the_null() -> None:
    def uneven(metric: str, passage: str, _seed: int) -> np.ndarray:
        return 1 + OUTWARD[metric] * DEPTH / 6 * (1.5 if passage in ("b", "d") else 1)

    for metric, line in by_metric(study(trained=uneven, init=shape(DEPTH / 5))).iterrows():
        assert line["gain"] == pytest.approx(4 / 6 - 4 / 5)
        if CLAIM_OF[metric] == "C2":
            assert line["gap"] == pytest.approx(4.5 / 6 - 4.5 / 5)
        assert line["change"] == pytest.approx(4 / 6 if metric in WEIGHTS_ONLY else 4 / 6 * 1.25)
        assert line["verdict"] == MIXED


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
def test_evidence_shows_the_numbers_it_is_judged_by() -> None:
    pace = {"a": 1.0, "b": 1.2, "c": 1.4, "d": 1.6, "-": 1.0}  # changes are four times that
    hindrance = {0: 0.1, 1: 0.3, 2: 0.2}

    def trained(metric: str, passage: str, _seed: int) -> np.ndarray:
        return 1 + OUTWARD[metric] * DEPTH * pace[passage]

    def init(metric: str, _passage: str, seed: int) -> np.ndarray:
        return 1 + OUTWARD[metric] * DEPTH * hindrance[seed]

    nulls = {"init": init, "gaussian": flat, "shuffled": flat}
    evidence = by_metric(study(kind="decoder", trained=trained, sinkless=shape(DEPTH * 0.5), **nulls))
    assert sorted(evidence.index) == sorted(OUTWARD)
    for metric, line in evidence.iterrows():
        assert line["expected"] == {1: "rises", -1: "falls"}[OUTWARD[metric]]
        assert line["kind"] == "decoder" and not line["fragile"] and np.isnan(line["shift"])
        assert (line["rho"], line["rho_low"], line["rho_high"]) == pytest.approx((1, 1, 1))
        assert line["null"] == "init 1"
        if metric in WEIGHTS_ONLY:
            assert line["passages"] == 0
            assert (line["change"], line["change_low"], line["change_high"]) == pytest.approx((4, 4, 4))
            assert (line["gain"], line["gain_low"], line["gain_high"]) == pytest.approx((2.8, 2.8, 2.8))
            assert (line["gap"], line["gap_low"], line["gap_high"]) == pytest.approx((3.15, 3.15, 3.15))
            assert np.isnan([line["sinkless"], line["effect"]]).all()
            continue
        assert line["passages"] == 4
        changes = np.array([4.0, 4.8, 5.6, 6.4])
        margin = 3.1824463 * changes.std(ddof=1) / 2  # t with three degrees of freedom, four passages
        assert (line["change"], line["change_low"]) == pytest.approx((5.2, 5.2 - margin))
        assert line["change_high"] == pytest.approx(5.2 + margin)
        # a and c: 4 - 1.2 and 5.6 - 1.2
        assert (line["gain"], line["gain_low"]) == pytest.approx((3.6, 3.6 - T_1 * 0.8))
        assert line["gain_high"] == pytest.approx(3.6 + T_1 * 0.8)
        assert line["effect"] == pytest.approx(3.6 / (0.8 * 2**0.5))
        assert line["sinkless"] == pytest.approx(2.0)
        if CLAIM_OF[metric] == "C2":
            # last third: layers 4 and 5
            assert (line["gap"], line["gap_low"]) == pytest.approx((4.5 * 0.9, 4.5 * 0.9 - T_1 * 0.9))


@pytest.mark.claim("C2")
def test_weights_have_no_passages_to_disagree() -> None:
    evidence = by_metric(study(passages=("a",), null_passages=("a",)))
    assert evidence.loc["head_isometry", "verdict"] == SUPPORTED
    assert set(evidence.drop(index="head_isometry")["verdict"]) == {NOT_TESTABLE}


@pytest.mark.claim("C1")
def test_a_null_on_a_single_passage_cannot_be_beaten() -> None:
    evidence = by_metric(study(null_passages=("c",)))
    assert evidence.loc["head_isometry", "verdict"] == SUPPORTED
    assert set(evidence.drop(index="head_isometry")["verdict"]) == {MIXED}


def test_a_checkpoint_without_nulls_is_mixed() -> None:
    evidence = by_metric(study(init=None, gaussian=None, shuffled=None))
    assert set(evidence["verdict"]) == {MIXED}
    assert set(evidence["null"]) == {""} and evidence["gain"].isna().all() and evidence["effect"].isna().all()


@pytest.mark.claim("C1")
def test_metrics_that_a_checkpoint_lacks_are_left_out() -> None:
    exactness = study("other").query("metric == 'depth_step'").assign(metric="t2_residual", gauge="")
    shallow = study("shallow").query("layer < 2")
    evidence = evidence_table(pd.concat([study(), exactness, shallow]))
    assert set(evidence["checkpoint"]) == {"model"}


def test_other_gauges_of_a_metric_are_no_evidence() -> None:
    flow = study(trained=away).query("gauge == 'mean'").assign(gauge="norm")
    assert set(by_metric(study(), flow)["verdict"]) == {SUPPORTED}


# --- verdicts that rounding could change --------------------------------------------------------------------------


def rounded_by(shift: float, where: np.ndarray = LATE) -> Curve:
    return lambda metric, passage, seed: towards(metric, passage, seed) + shift * where


def control(shift: float, where: np.ndarray = LATE) -> pd.DataFrame:
    """A checkpoint whose values the coarser format moves by ``shift``, and the finer one by half of it."""
    return study("control", q4_1=rounded_by(shift, where), q5_0=rounded_by(shift / 2, where))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("four_bit", "metric", "flips_at"),
    [
        ({}, "depth_step", 4 / 6),  # its change, and its gain over nulls that do not change
        ({}, "edge_isometry", 4 / 6),
        ({"sinkless": shape(DEPTH / 40)}, "spectral_step", 0.1),
        ({"gaussian": shape(DEPTH / 4)}, "operator_cosine", 1 / 3),  # mixed, but could beat the null
        ({"gaussian": shape(DEPTH / 4)}, "edge_isometry", 0.375),  # likewise, once late layers lie beyond it
        ({"gaussian": shape(DEPTH / 4)}, "depth_step", 4 / 6),
        # rising in rank, but not in size: its change is -4/6
        ({"trained": shape([0, 9, 9.1, 9.2, 9 - 9.3 - 8 / 6, 9.3])}, "norm_cv", 4 / 6),
    ],
)
def test_a_verdict_is_fragile_if_rounding_shifts_by_enough_to_change_it(
    four_bit: dict, metric: str, flips_at: float, sign: int
) -> None:
    for shift, fragile in ((flips_at - 1e-3, False), (flips_at + 1e-3, True)):
        tables = study(stored_as="Q4_K_M", **four_bit), control(sign * shift)
        line = by_metric(*(table[table["metric"] == metric] for table in tables)).loc[metric]
        assert line["shift"] == pytest.approx(shift)
        assert line["fragile"] == fragile, shift


@pytest.mark.parametrize("turned", [False, True])
def test_a_rank_correlation_that_rounding_could_turn_is_fragile(turned: bool) -> None:
    against = shape(np.array([8, 0, 7, 6, 3, 5.5]))  # larger at the end, but falling in rank
    faint = 1e-6 * DEPTH  # of a control whose ranks turn round, and whose sizes hardly move
    other = study("control", trained=shape(faint), q4_1=shape(-faint if turned else faint), q5_0=shape(faint))
    line = by_metric(study(stored_as="Q4_1", trained=against), other).loc["edge_isometry"]
    assert line["rho"] < 0 < line["change_low"] and line["verdict"] == NOT_SUPPORTED
    assert line["fragile"] == turned


@pytest.mark.claim("C2")
def test_rounding_that_moves_late_layers_without_a_change_matters_to_c2_alone() -> None:
    everywhere = np.ones(LAYERS)
    for shift, fragile in ((0.69, False), (0.71, True)):  # late layers are ahead of the nulls' by 4.5/6 - 0.05
        for metric, line in by_metric(study(stored_as="Q4_1"), control(shift, everywhere)).iterrows():
            assert line["shift"] == pytest.approx(0, abs=1e-12)
            assert line["fragile"] == (fragile and CLAIM_OF[metric] == "C2"), metric


def test_the_largest_shift_of_any_checkpoint_of_the_control_counts() -> None:
    other = study("other control", q5_0=rounded_by(-0.7))
    assert by_metric(study(stored_as="Q4_1"), control(0.1), other)["fragile"].all()
    assert not by_metric(study(stored_as="Q4_1"), control(0.1))["fragile"].any()


@pytest.mark.parametrize("stored_as", ["float32", "float16", "bfloat16"])
def test_weights_that_were_not_rounded_are_not_fragile(stored_as: str) -> None:
    evidence = by_metric(study(stored_as=stored_as), control(100.0))
    assert not evidence["fragile"].any() and evidence["shift"].isna().all()


def test_without_a_control_nothing_is_known_to_be_fragile() -> None:
    evidence = by_metric(study(stored_as="Q4_1"))
    assert not evidence["fragile"].any() and evidence["shift"].isna().all()


@pytest.mark.parametrize(("q4_1", "q5_0"), [(away, towards), (towards, away), (away, away), (towards, towards)])
def test_a_verdict_of_the_control_is_fragile_if_rounded_weights_get_another(q4_1: Curve, q5_0: Curve) -> None:
    evidence = by_metric(study(q4_1=q4_1, q5_0=q5_0))
    assert set(evidence["verdict"]) == {SUPPORTED}
    assert set(evidence["fragile"]) == {away in (q4_1, q5_0)}


# --- C3 -----------------------------------------------------------------------------------------------------------

SIZES = {"tiny": 10**6, "small": 2 * 10**7, "large": 10**8, "huge": 3 * 10**9}
WOBBLE = {"a": 0.3, "b": -0.1, "c": -0.2, "d": 0.1, "-": 0.0}


def pace(strength: float, wobble: float = 0.0) -> Curve:
    """The change, and the gain over nulls without one: ``strength`` plus ``wobble`` times what a passage adds."""

    def curve(metric: str, passage: str, _seed: int) -> np.ndarray:
        return 1 + OUTWARD[metric] * DEPTH / 4 * (strength + wobble * WOBBLE[passage])

    return curve


def encoders(*strengths: float, **common: object) -> pd.DataFrame:
    """Encoders of growing size."""
    named = zip(SIZES, strengths, strict=False)
    return pd.concat([study(name, trained=pace(strength), **common) for name, strength in named])


def scaled(table: pd.DataFrame, sizes: dict[str, int] = SIZES) -> pd.DataFrame:
    return scale_table(table, evidence_table(table), sizes)


def log_sizes(count: int) -> np.ndarray:
    return np.log10(list(SIZES.values())[:count])


@pytest.mark.claim("C3")
@pytest.mark.parametrize(
    ("strengths", "verdict"),
    [
        ((0.1, 0.23, 0.3), SUPPORTED),  # 0.1 per tenfold size
        ((0.3, 0.17, 0.1), NOT_SUPPORTED),
        ((0.1, 0.9, 0.3), MIXED),  # larger is stronger on the whole, but three points do not show it
        ((0.1, 0.23, 0.3, 0.45), SUPPORTED),
        ((0.1, 0.9, 0.3, 0.8), MIXED),
    ],
)
def test_three_checkpoints_of_a_kind_decide(strengths: tuple, verdict: str) -> None:
    table = encoders(*strengths)
    evidence = evidence_table(table)
    scale = scale_table(table, evidence, SIZES)
    assert scale[["rests on", "metric"]].apply(tuple, axis=1).tolist() == sorted((c, m) for m, c in CLAIM_OF.items())
    assert set(scale["group"]) == {"encoder"} and set(scale["models"]) == {len(strengths)}
    assert set(scale["verdict"]) == {verdict}
    x = log_sizes(len(strengths))
    slope, offset = np.polyfit(x, strengths, 1)
    residual = np.asarray(strengths) - offset - slope * x
    error = np.sqrt((residual**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    margin = {3: T_1, 4: T_2}[len(x)] * error
    assert np.allclose(scale["slope"], slope)
    assert np.allclose(scale["low"], slope - margin) and np.allclose(scale["high"], slope + margin)
    # every passage says the same
    assert np.allclose(scale["text_low"], slope) and np.allclose(scale["text_high"], slope)
    verdicts = verdict_table(evidence, scale)
    assert verdicts.loc["C3", "overall"] == verdict
    assert verdicts.loc["C3", list(SIZES)[: len(strengths)]].tolist() == [verdict] * len(strengths)


@pytest.mark.claim("C3")
def test_checkpoints_of_one_strength_do_not_show_growth() -> None:
    scale = scaled(encoders(0.5, 0.5, 0.5))
    assert np.allclose(scale["slope"], 0) and set(scale["verdict"]) == {NOT_SUPPORTED}


@pytest.mark.claim("C3")
def test_the_interval_over_texts_is_that_of_the_slopes_on_the_passages_all_share() -> None:
    strengths, wobbles, x = (0.5, 0.8, 1.2), (1.0, -1.0, 2.0), log_sizes(3)
    texts = (("a", "c"), PASSAGES, ("a", "b", "c"))
    measured = zip(SIZES, strengths, wobbles, texts, strict=False)
    parts = [study(name, trained=pace(s, w), null_passages=own) for name, s, w, own in measured]
    slopes = [np.polyfit(x, [s + w * WOBBLE[t] for s, w in zip(strengths, wobbles, strict=True)], 1)[0] for t in "ac"]
    margin = T_1 * abs(slopes[0] - slopes[1]) / 2
    means = [s + w * np.mean([WOBBLE[t] for t in own]) for s, w, own in zip(strengths, wobbles, texts, strict=True)]
    for line in scaled(pd.concat(parts)).itertuples():
        found = (line.slope, line.text_low, line.text_high)
        if line.metric in WEIGHTS_ONLY:
            slope = np.polyfit(x, strengths, 1)[0]
            assert found == pytest.approx((slope, slope, slope))
        else:
            middle = np.mean(slopes)
            assert found == pytest.approx((np.polyfit(x, means, 1)[0], middle - margin, middle + margin))


@pytest.mark.claim("C3")
def test_strength_is_the_gain_over_each_checkpoints_hardest_null() -> None:
    def second_init(metric: str, _passage: str, seed: int) -> np.ndarray:
        return 1 + OUTWARD[metric] * DEPTH / 4 * (0.4 if seed == 1 else 0.1)

    nulls = ({"init": second_init}, {"gaussian": pace(0.6)}, {})
    named = zip(SIZES, nulls, strict=False)
    table = pd.concat([study(name, trained=pace(1.0, 0.2), **own) for name, own in named])
    for line in scaled(table).itertuples():
        unseen = "gaussian" in LACKS.get(line.metric, ())
        slope = np.polyfit(log_sizes(3), [1 - 0.4, 1 if unseen else 1 - 0.6, 1], 1)[0]
        assert line.slope == pytest.approx(slope)  # what the passages add to all alike does not tilt it
        assert (line.text_low + line.text_high) / 2 == pytest.approx(slope)


@pytest.mark.claim("C3")
def test_two_checkpoints_have_a_slope_and_no_verdict() -> None:
    table = pd.concat([encoders(0.2, 0.9), study("large", kind="decoder")])
    evidence = evidence_table(table)
    scale = scale_table(table, evidence, SIZES)
    assert set(scale["verdict"]) == {NOT_TESTABLE} and scale[["low", "high"]].isna().all(axis=None)
    two, one = scale[scale["group"] == "encoder"], scale[scale["group"] == "decoder"]
    assert set(two["models"]) == {2} and np.allclose(two["slope"], 0.7 / np.log10(20))
    assert np.allclose(two["text_low"], two["slope"])
    assert set(one["models"]) == {1} and one[["slope", "text_low", "text_high"]].isna().all(axis=None)
    assert verdict_table(evidence, scale).loc["C3", "overall"] == NOT_TESTABLE


@pytest.mark.claim("C3")
def test_a_checkpoint_without_nulls_has_no_strength() -> None:
    bare = study("huge", trained=pace(2.0), init=None, gaussian=None, shuffled=None)
    scale = scaled(pd.concat([encoders(0.1, 0.2, 0.3), bare]))
    assert set(scale["verdict"]) == {NOT_TESTABLE} and scale["slope"].isna().all()


@pytest.mark.claim("C3")
def test_the_two_qwens_are_compared_as_a_family_without_a_say_in_the_verdict() -> None:
    small, large = "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"
    # the larger is weaker, and comes first by name of the others
    qwens = [study(large, kind="decoder", trained=pace(0.4)), study(small, kind="decoder", trained=pace(1.0))]
    table = pd.concat([encoders(0.1, 0.23, 0.3), *qwens, study("minilm-l6", trained=pace(0.35))])
    evidence = evidence_table(table)
    assert model_groups(evidence) == {
        "encoder": sorted(["tiny", "small", "large", "minilm-l6"]),
        "decoder": [small, large],
        "family qwen2": [small, large],
    }
    parameters = SIZES | {name: CATALOGUE[name].parameters for name in (small, large)} | {"minilm-l6": 3 * 10**8}
    scale = scale_table(table, evidence, parameters)
    family = scale[scale["group"] == "family qwen2"]
    assert len(family) == len(OUTWARD) and set(family["models"]) == {2} and set(family["verdict"]) == {NOT_TESTABLE}
    assert np.allclose(family["slope"], -0.6 / np.log10(1543714304 / 494032768))
    verdicts = verdict_table(evidence, scale)
    assert verdicts.loc["C3", ["minilm-l6", small, large, "overall"]].tolist() == [
        SUPPORTED, NOT_TESTABLE, NOT_TESTABLE, SUPPORTED,
    ]  # fmt: skip


@pytest.mark.claim("C3")
def test_kinds_are_judged_apart_and_an_untestable_one_does_not_count() -> None:
    table = pd.concat([encoders(0.1, 0.23, 0.3), study("decoder", kind="decoder", trained=pace(-1.0))])
    evidence = evidence_table(table)
    verdicts = verdict_table(evidence, scale_table(table, evidence, SIZES | {"decoder": 10**9}))
    assert list(verdicts.columns) == ["statement", "large", "small", "tiny", "decoder", "overall"]  # encoders first
    assert verdicts.loc["C3"].tolist()[1:] == [SUPPORTED, SUPPORTED, SUPPORTED, NOT_TESTABLE, SUPPORTED]


# --- the table of verdicts ----------------------------------------------------------------------------------------


@pytest.mark.claim("C1")
@pytest.mark.claim("C2")
def test_checkpoints_that_differ_make_a_claim_mixed() -> None:
    table = pd.concat([study("good"), study("bad", trained=away)])
    evidence = evidence_table(table)
    verdicts = verdict_table(evidence, scale_table(table, evidence, {"good": 10**6, "bad": 10**7}))
    for claim in ("C1", "C2"):
        assert verdicts.loc[claim, ["good", "bad", "overall"]].tolist() == [SUPPORTED, NOT_SUPPORTED, MIXED]


@pytest.mark.claim("C1")
def test_metrics_that_differ_make_a_checkpoint_mixed() -> None:
    def torn(metric: str, passage: str, seed: int) -> np.ndarray:
        return (away if metric == "depth_step" else towards)(metric, passage, seed)

    table = study(trained=torn)
    evidence = evidence_table(table)
    verdicts = verdict_table(evidence, scale_table(table, evidence, {"model": 10**6}))
    assert verdicts["model"].tolist() == [MIXED, SUPPORTED, NOT_TESTABLE]


def test_the_markdown_table_holds_every_verdict() -> None:
    table = study()
    evidence = evidence_table(table)
    verdicts = verdict_table(evidence, scale_table(table, evidence, {"model": 10**6}))
    head, rule, *lines = markdown(verdicts).splitlines()
    assert head == "| claim | statement | model | overall |"
    assert set(rule) == {"|", "-", " "}
    for claim, line in zip(CLAIMS.values(), lines, strict=True):
        expected = [claim.id, claim.statement, verdicts.loc[claim.id, "model"], verdicts.loc[claim.id, "overall"]]
        assert [cell.strip() for cell in line.strip("|").split("|")] == expected
