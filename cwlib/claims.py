"""The paper's three empirical claims, the rules that decide them, and the verdicts on a study.

The rules were fixed before the study was run. C1 and C2 are judged per checkpoint and metric:

``supported``       the trend over depth points the claimed way, its bootstrap interval over passages stays on that side
                    of zero, and it is stronger than in each random-initialisation null; for C2 the deep layers (last
                    third) must also lie beyond both nulls in the claimed direction
``mixed``           the trend points the claimed way with an interval beyond zero, but a null does as well or better
``not supported``   anything else

C3 fits, within encoders and within decoders, the slope of those trends over log10 parameters: supported if its interval
is above zero, mixed if only the slope is, and not testable here with fewer than three checkpoints of one kind.

A checkpoint, and then the claim, takes the verdict its parts agree on, and is mixed if they differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import linregress
from scipy.stats import t as student_t

from cwlib.statistics import Trend, depth_trend, early_and_late

SUPPORTED, MIXED, NOT_SUPPORTED, NOT_TESTABLE = "supported", "mixed", "not supported", "not testable here"
MINIMUM_MODELS = 3  #: checkpoints of one kind without which a trend over scale is not tested


@dataclass(frozen=True)
class Evidence:
    """A metric that a claim rests on: its direction (+1 grows, -1 falls) and token walk."""

    metric: str
    direction: int
    gauge: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper's abstract in this artifact's reading."""

    id: str
    statement: str
    evidence: tuple[Evidence, ...]
    beyond_nulls: bool


CLAIMS: dict[str, Claim] = {
    "C1": Claim(
        "C1",
        "attention graphs settle with depth",
        (
            Evidence("depth_step", -1, "mean"),
            Evidence("spectral_step", -1, "mean"),
            Evidence("operator_cosine", +1),
        ),
        beyond_nulls=False,
    ),
    "C2": Claim(
        "C2",
        "transports approach scaled isometries with depth, and more than the nulls",
        (
            Evidence("head_isometry", +1),
            Evidence("edge_isometry", +1),
            Evidence("norm_cv", -1),
            Evidence("angle_correlation", +1),
        ),
        beyond_nulls=True,
    ),
    "C3": Claim("C3", "both strengthen with scale", (), beyond_nulls=False),
}


def _select(table: pd.DataFrame, checkpoint: str, evidence: Evidence, source: str) -> pd.DataFrame:
    return table[
        (table["checkpoint"] == checkpoint)
        & (table["metric"] == evidence.metric)
        & (table["gauge"] == evidence.gauge)
        & (table["source"] == source)
    ]


def judge(trend: Trend, null_trends: Iterable[float], deep: float, null_deep: Iterable[float], direction: int) -> str:
    """Apply the rule of C1 and C2 to one metric of one checkpoint.

    Parameters
    ----------
    trend : Trend
        Over depth, of the trained checkpoint.
    null_trends : iterable of float
        The same correlation in each null.
    deep, null_deep : float, iterable of float
        Mean over the last third of the layers, trained and in each null that must be beaten (none for C1).
    direction : int
        +1 if the claim says that the quantity grows, -1 if it falls.
    """
    if trend.passages == 1:
        return NOT_TESTABLE
    edge = trend.low if direction > 0 else trend.high
    if not direction * edge > 0:
        return NOT_SUPPORTED
    beats = all(direction * trend.rho > direction * null for null in null_trends)
    beyond = all(direction * deep > direction * null for null in null_deep)
    return SUPPORTED if beats and beyond else MIXED


def combine(verdicts: Iterable[str]) -> str:
    """The verdict that all parts share, else mixed; parts that are not testable do not count unless all are."""
    parts = {v for v in verdicts if v != NOT_TESTABLE}
    if not parts:
        return NOT_TESTABLE
    return parts.pop() if len(parts) == 1 else MIXED


def evidence_table(table: pd.DataFrame) -> pd.DataFrame:
    """One line per claim, checkpoint and metric: trend, interval, nulls and verdict (C1, C2).

    Parameters
    ----------
    table : pandas.DataFrame
        A study as `cwlib.study.load` returns it.

    Returns
    -------
    pandas.DataFrame
        Columns claim, checkpoint, kind, metric, expected (rises or falls), rho, low, high, passages, null_rho (the
        strongest random-initialisation trend in the claimed direction), deep, null_deep (the best null), verdict.
    """
    lines = []
    for claim in (CLAIMS["C1"], CLAIMS["C2"]):
        for evidence in claim.evidence:
            for checkpoint in sorted(table["checkpoint"].unique()):
                rows = _select(table, checkpoint, evidence, "trained")
                if rows["layer"].nunique() < 3:
                    continue
                lines.append(_line(table, claim, checkpoint, evidence, rows))
    return pd.DataFrame(lines)


def _line(table: pd.DataFrame, claim: Claim, checkpoint: str, evidence: Evidence, rows: pd.DataFrame) -> dict:
    sign = evidence.direction
    initial = _select(table, checkpoint, evidence, "init")
    gaussian = _select(table, checkpoint, evidence, "gaussian")
    trend = depth_trend(rows)
    null_trends = [depth_trend(group).rho for _, group in initial.groupby("seed")]
    nulls = [*initial.groupby("seed"), *gaussian.groupby("seed")] if claim.beyond_nulls else []
    # Like with like: nulls are measured on some of the passages.
    shared = rows[rows["passage"].isin(initial["passage"].unique())]
    deep, null_deep = early_and_late(shared)[1], [early_and_late(group)[1] for _, group in nulls]
    return {
        "claim": claim.id,
        "checkpoint": checkpoint,
        "kind": rows["kind"].iloc[0],
        "metric": evidence.metric,
        "expected": "rises" if sign > 0 else "falls",
        "rho": trend.rho,
        "low": trend.low,
        "high": trend.high,
        "passages": trend.passages,
        "null_rho": sign * max(sign * r for r in null_trends),
        "deep": deep,
        "null_deep": sign * max(sign * d for d in null_deep) if null_deep else float("nan"),
        "verdict": judge(trend, null_trends, deep, null_deep, sign),
    }


def scale_table(evidence: pd.DataFrame, parameters: dict[str, int]) -> pd.DataFrame:
    r"""Does the evidence for C1 and C2 grow with scale? One line per kind and metric (C3).

    The strength of a checkpoint is its trend over depth, counted positive in the claimed direction; its slope over
    :math:`\log_{10}` parameters is fitted within encoders and within decoders, with a 95% t-interval.

    Parameters
    ----------
    evidence : pandas.DataFrame
        From `evidence_table`.
    parameters : dict of str to int
        Parameter count by checkpoint.
    """
    lines = []
    for (kind, claim, metric), group in evidence.groupby(["kind", "claim", "metric"]):
        line = {"kind": kind, "rests on": claim, "metric": metric, "models": len(group)}
        slope = low = high = float("nan")
        verdict = NOT_TESTABLE
        if len(group) >= MINIMUM_MODELS:
            sign = group["expected"].map({"rises": 1, "falls": -1})
            fit = linregress(np.log10([parameters[c] for c in group["checkpoint"]]), sign * group["rho"])
            margin = fit.stderr * student_t.ppf(0.975, len(group) - 2)
            slope, low, high = fit.slope, fit.slope - margin, fit.slope + margin
            verdict = SUPPORTED if low > 0 else MIXED if slope > 0 else NOT_SUPPORTED
        lines.append(line | {"slope": slope, "low": low, "high": high, "verdict": verdict})
    return pd.DataFrame(lines)


def verdict_table(evidence: pd.DataFrame, scale: pd.DataFrame) -> pd.DataFrame:
    """Verdicts: one line per claim, one column per checkpoint, and the overall verdict.

    Parameters
    ----------
    evidence, scale : pandas.DataFrame
        From `evidence_table` and `scale_table`.
    """
    order = evidence[["kind", "checkpoint"]].drop_duplicates().sort_values(["kind", "checkpoint"])
    lines = []
    for claim in CLAIMS.values():
        per = {}
        for kind, checkpoint in order.itertuples(index=False):
            if claim.id == "C3":
                parts = scale[scale["kind"] == kind]
            else:
                parts = evidence[(evidence["claim"] == claim.id) & (evidence["checkpoint"] == checkpoint)]
            per[checkpoint] = combine(parts["verdict"])
        lines.append({"claim": claim.id, "statement": claim.statement, **per, "overall": combine(per.values())})
    return pd.DataFrame(lines).set_index("claim")


def markdown(verdicts: pd.DataFrame) -> str:
    """The verdict table in Markdown, as README quotes it.

    Parameters
    ----------
    verdicts : pandas.DataFrame
        From `verdict_table`.
    """
    frame = verdicts.reset_index()
    lines = [list(frame.columns), ["---"] * frame.shape[1], *frame.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
