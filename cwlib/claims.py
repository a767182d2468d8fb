"""The paper's three empirical claims, the rules that decide them, and the verdicts on a study.

The rules were fixed before this study was run; an earlier study, of four of the six checkpoints and with rules on rank
correlations alone, had been seen. C1 and C2 are judged per checkpoint and metric, by direction and by size. *Change* is
the mean over the last third of layers minus that over the first third, per passage; *gain* is the change of the trained
weights minus that of a null, on the same passages.

``supported``       the metric moves the claimed way over depth: the interval over passages of its Spearman correlation
                    with depth, and that of its change, lie on the claimed side of zero; its gain over every null does,
                    too (three random initialisations, and Gaussian maps and shuffled heads unless they leave the
                    metric as it is); for decoders its change does so still once token 0 is removed; and for C2 the
                    last third lies beyond that of every null
``mixed``           it moves the claimed way, but one of the other conditions fails
``not supported``   it does not move the claimed way

A verdict on weights that are stored in a few bits is marked *fragile* if it could change when the rank correlation, and
every change and every late value, are moved up or down by the largest shift that rounding causes in the control; one on
a checkpoint of the control, if the rounded weights get another.

C3 fits, within encoders and within decoders, the slope of the gain over the null that is hardest to beat against log10
parameters: supported if its interval over models is above zero, mixed if only the slope is, and not testable here with
fewer than three checkpoints. Two checkpoints of one family give a difference, which is reported without a verdict.

A checkpoint, and then the claim, takes the verdict its parts agree on, and is mixed if they differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pandas as pd

from cwlib.effects import CASE, rounding_table
from cwlib.quantise import SCHEMES
from cwlib.statistics import Estimate, Trend, depth_trend, estimate, thirds

SUPPORTED, MIXED, NOT_SUPPORTED, NOT_TESTABLE = "supported", "mixed", "not supported", "not testable here"
NULLS = ("init", "gaussian", "shuffled")  #: that must be beaten
EXACT = ("float64", "float32", "float16", "bfloat16")  #: precisions of weights that were not rounded to a few bits


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


@dataclass(frozen=True)
class Case:
    """What the rule looks at, for one metric of one checkpoint; every number is positive if it is as claimed.

    Attributes
    ----------
    trend : Trend
        Spearman correlation with depth.
    change : Estimate
        Late minus early layers.
    gains : dict of str to Estimate
        Change minus that of each null, by its name.
    sinkless : Estimate, optional
        Change once token 0 is removed.
    gaps : dict of str to Estimate
        Late layers minus those of each null that they must lie beyond.
    """

    trend: Trend
    change: Estimate
    gains: dict[str, Estimate]
    sinkless: Estimate | None
    gaps: dict[str, Estimate]

    @property
    def hardest(self) -> str:
        """The null with the least gain."""
        return min(self.gains, key=lambda null: self.gains[null].mean)

    def moved(self, rho: float, change: float, late: float) -> "Case":
        """The same after the rank correlation, every change and every late value moved."""
        trend = self.trend
        return Case(
            Trend(trend.rho + rho, trend.low + rho, trend.high + rho, trend.passages),
            self.change.moved(change),
            {null: gain.moved(change) for null, gain in self.gains.items()},
            self.sinkless and self.sinkless.moved(change),
            {null: gap.moved(late) for null, gap in self.gaps.items()},
        )


def judge(case: Case) -> str:
    """Apply the rule of C1 and C2.

    Parameters
    ----------
    case : Case
        Of one metric of one checkpoint. Without any null to compare with, it is at best mixed.
    """
    if case.trend.passages == 1:
        return NOT_TESTABLE
    if not (case.trend.low > 0 and case.change.low > 0):
        return NOT_SUPPORTED
    others = [*case.gains.values(), *case.gaps.values(), *([case.sinkless] if case.sinkless else [])]
    return SUPPORTED if case.gains and all(other.low > 0 for other in others) else MIXED


def combine(verdicts: Iterable[str]) -> str:
    """The verdict that all parts share, else mixed; parts that are not testable do not count unless all are."""
    parts = {v for v in verdicts if v != NOT_TESTABLE}
    if not parts:
        return NOT_TESTABLE
    return parts.pop() if len(parts) == 1 else MIXED


def _case(rows: pd.DataFrame, evidence: Evidence, beyond_nulls: bool, source: str = "trained") -> Case:
    """Of one metric of one checkpoint: all its rows."""
    sign = evidence.direction
    trend = depth_trend(rows[rows["source"] == source])
    oriented = Trend(sign * trend.rho, *sorted((sign * trend.low, sign * trend.high)), trend.passages)
    parts = thirds(rows, CASE)
    own, gains, gaps, removed = parts.loc[source, 0], {}, {}, None
    for null, seed in parts.index.droplevel("passage").unique():
        other = parts.loc[null, seed]
        if null in NULLS:
            # like with like: nulls are measured on some of the passages
            difference = own.loc[own.index.isin(other.index)] - other
            name = f"{null} {seed}" if null == "init" else null
            gains[name] = estimate(difference["change"]).times(sign)
            if beyond_nulls:
                gaps[name] = estimate(difference["late"]).times(sign)
        if null == "sinkless":
            removed = estimate(other["change"]).times(sign)
    return Case(oriented, estimate(own["change"]).times(sign), gains, removed, gaps)


def evidence_table(table: pd.DataFrame) -> pd.DataFrame:
    """One line per claim, checkpoint and metric: trend, change, nulls and verdict (C1, C2).

    Parameters
    ----------
    table : pandas.DataFrame
        A study as `cwlib.study.load` returns it.

    Returns
    -------
    pandas.DataFrame
        Columns claim, checkpoint, kind, metric, gauge, expected (rises or falls); rho, change, sinkless, gain and gap
        with their intervals, all counted positive in the claimed direction, gain and gap for the null that is hardest
        to beat; effect, the standardised gain; passages; shift, what rounding may move a change by; verdict; fragile.
        The module's text defines each.
    """
    named = {evidence.metric for claim in CLAIMS.values() for evidence in claim.evidence}
    shifts = rounding_table(table[table["metric"].isin(named)])
    lines = []
    for claim in (CLAIMS["C1"], CLAIMS["C2"]):
        for evidence in claim.evidence:
            chosen = (table["metric"] == evidence.metric) & (table["gauge"] == evidence.gauge)
            rank = _rank_shift(table[chosen])
            for checkpoint, rows in table[chosen].groupby("checkpoint"):
                if rows[rows["source"] == "trained"]["layer"].nunique() >= 3:
                    try:
                        lines.append(_line(claim, evidence, checkpoint, rows, shifts, rank))
                    except ValueError as error:
                        raise ValueError(f"table: {evidence.metric} of {checkpoint}: {error}") from error
    if not lines:
        raise ValueError("table: expected at least three layers of a metric that a claim rests on, found none")
    return pd.DataFrame(lines)


def _rank_shift(rows: pd.DataFrame) -> float:
    """The most that rounding moves the rank correlation of a metric, over the checkpoints of the control."""
    shifts = [0.0]
    for _, mine in rows[rows["source"].isin(("trained", *SCHEMES))].groupby("checkpoint"):
        if mine["source"].nunique() > 1 and mine["layer"].nunique() >= 3:
            rho = {source: depth_trend(group).rho for source, group in mine.groupby("source")}
            shifts += [abs(rho[scheme] - rho["trained"]) for scheme in SCHEMES if scheme in rho]
    return float(np.nanmax(shifts))


def _line(
    claim: Claim, evidence: Evidence, checkpoint: str, rows: pd.DataFrame, shifts: pd.DataFrame, rank: float
) -> dict:
    case = _case(rows, evidence, claim.beyond_nulls)
    verdict, shift, fragile = judge(case), np.nan, False
    rounded = [scheme for scheme in SCHEMES if scheme in set(rows["source"])]
    if rounded:
        fragile = any(judge(_case(rows, evidence, claim.beyond_nulls, scheme)) != verdict for scheme in rounded)
    elif len(shifts) and rows["stored_as"].iloc[0] not in EXACT:
        mine = shifts[(shifts["metric"] == evidence.metric) & (shifts["gauge"] == evidence.gauge)]
        if len(mine):
            shift, late = mine["change_shift"].abs().max(), mine["late_shift"].abs().max()
            ways = product((rank, -rank), ((shift, late), (-shift, -late)))
            fragile = any(judge(case.moved(rho, *size)) != verdict for rho, size in ways)
    nothing = Estimate(np.nan, np.nan, np.nan, np.nan)
    gain = case.gains[case.hardest] if case.gains else nothing
    gap = min(case.gaps.values(), key=lambda gap: gap.mean, default=nothing)
    intervals = {"change": case.change, "sinkless": case.sinkless or nothing, "gain": gain, "gap": gap}
    line = {
        "claim": claim.id,
        "checkpoint": checkpoint,
        "kind": rows["kind"].iloc[0],
        "metric": evidence.metric,
        "gauge": evidence.gauge,
        "expected": "rises" if evidence.direction > 0 else "falls",
        "passages": case.trend.passages,
        "rho": case.trend.rho,
        "rho_low": case.trend.low,
        "rho_high": case.trend.high,
    }
    for name, found in intervals.items():
        line |= {name: found.mean, f"{name}_low": found.low, f"{name}_high": found.high}
    hardest = case.hardest if case.gains else ""
    return line | {
        "null": hardest,
        "effect": gain.effect,
        "shift": shift,
        "verdict": verdict,
        "fragile": fragile,
    }
