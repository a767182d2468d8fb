"""Trends over depth and their uncertainty over passages."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import bootstrap, rankdata
from scipy.stats import t as student_t

from cwlib.quantise import SCHEMES

WEIGHTS = "-"  #: in the passage column: the value depends on weights only
RESAMPLES = 1000
CONFIDENCE = 0.95
FEW = 8  #: passages below which intervals are Student's instead of bootstrapped


@dataclass(frozen=True)
class Estimate:
    """A mean over passages with its interval.

    Attributes
    ----------
    mean : float
        Over passages.
    low, high : float
        95% interval: percentile bootstrap over passages, or Student's t below `FEW` passages. Equal to ``mean`` when
        the quantity depends on weights only; NaN when there is a single passage.
    effect : float
        Standardised size: the mean over its standard deviation between passages (Cohen's d of paired differences);
        NaN when the quantity depends on weights only.
    """

    mean: float
    low: float
    high: float
    effect: float

    def times(self, direction: int) -> "Estimate":
        """Itself, or its mirror image for direction -1."""
        if direction > 0:
            return self
        return Estimate(-self.mean, -self.high, -self.low, -self.effect)

    def moved(self, by: float) -> "Estimate":
        """Mean and interval moved."""
        return Estimate(self.mean + by, self.low + by, self.high + by, self.effect)


def estimate(values: pd.Series, seed: int = 0) -> Estimate:
    """The mean of one number per passage, with its interval.

    Parameters
    ----------
    values : pandas.Series
        Indexed by passage; the index `WEIGHTS` alone marks a quantity that depends on weights only.
    seed : int
        Of the bootstrap.
    """
    values = values.dropna()
    mean = float(values.mean()) if len(values) else np.nan
    if len(values) < 2:
        edge = mean if list(values.index) == [WEIGHTS] else np.nan
        return Estimate(mean, edge, edge, np.nan)
    spread = float(values.std(ddof=1))
    effect = mean / spread if spread > 0 else np.nan
    if spread == 0:
        return Estimate(mean, mean, mean, effect)
    if len(values) < FEW:
        # resampled means of few values stay within their range, and so well within the interval meant
        margin = spread / len(values) ** 0.5 * float(student_t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
        return Estimate(mean, mean - margin, mean + margin, effect)
    interval = bootstrap(
        (values.to_numpy(),),
        np.mean,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Estimate(mean, float(interval.low), float(interval.high), effect)


def thirds(rows: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Means over the first and the last third of the layers that a quantity has (at least one layer each).

    Parameters
    ----------
    rows : pandas.DataFrame
        Rows of a study: columns passage, layer, value, and ``by``.
    by : sequence of str
        Columns that tell quantities apart; none if there is one.

    Returns
    -------
    pandas.DataFrame
        Indexed by ``by`` and passage: columns early, late, and change, which is late minus early.
    """
    quantity = [rows[name] for name in by] or [pd.Series(0, rows.index)]
    layers = rows["layer"].groupby(quantity)
    rank, count = layers.rank("dense"), layers.transform("nunique")
    third = (count // 3).clip(lower=1)
    parts = {"early": rank <= third, "late": rank > count - third}
    frame = pd.DataFrame({name: rows[part].groupby([*by, "passage"])["value"].mean() for name, part in parts.items()})
    return frame.assign(change=frame["late"] - frame["early"])


def thirds_table(table: pd.DataFrame, metric: str, gauge: str = "") -> pd.DataFrame:
    """Early and late means of one metric: a line per checkpoint, the late means of the nulls beside the trained ones.

    Parameters
    ----------
    table : pandas.DataFrame
        From `cwlib.study.load`.
    metric, gauge : str
        Which rows.

    Returns
    -------
    pandas.DataFrame
        Columns (metric, early), (metric, late), and (metric, late <source>) for each null measured.
    """
    rows = table[(table["metric"] == metric) & (table["gauge"] == gauge) & ~table["source"].isin(SCHEMES)]
    lines: dict[str, dict[tuple[str, str], float]] = {}
    for (checkpoint, source), group in rows.groupby(["checkpoint", "source"]):
        early, late = thirds(group)[["early", "late"]].mean()
        line = lines.setdefault(checkpoint, {})
        if source == "trained":
            line |= {(metric, "early"): early, (metric, "late"): late}
        else:
            line[metric, f"late {source}"] = late
    frame = pd.DataFrame(lines).T.rename_axis("checkpoint")
    return frame[sorted(frame.columns, key=lambda c: (c[1] != "early", c[1]))]


@dataclass(frozen=True)
class Trend:
    """A rank correlation with depth and its bootstrap interval over passages.

    Attributes
    ----------
    rho : float
        Spearman correlation between layer and the mean over passages, in [-1, 1].
    low, high : float
        Percentile bootstrap interval over passages; equal to ``rho`` when the quantity depends on weights only, NaN
        when there is a single passage.
    passages : int
        Number of passages resampled; 0 when the quantity depends on weights only.
    """

    rho: float
    low: float
    high: float
    passages: int


def depth_trend(rows: pd.DataFrame, seed: int = 0) -> Trend:
    """Spearman trend over depth of one metric of one checkpoint, bootstrapped over passages.

    Parameters
    ----------
    rows : pandas.DataFrame
        Rows of a study for one checkpoint, source, metric and gauge: columns passage, layer, value.
    seed : int
        Of the bootstrap.

    Raises
    ------
    ValueError
        If there are fewer than three layers, or a passage lacks a layer that another has.
    """
    wide = rows.pivot_table(index="passage", columns="layer", values="value", aggfunc="mean")
    if wide.shape[1] < 3:
        raise ValueError(f"rows: expected at least three layers for a trend over depth, got {wide.shape[1]}")
    if wide.isna().any(axis=None):
        raise ValueError(f"rows: expected every passage to have every layer, got {int(wide.isna().sum().sum())} gaps")
    values, depth = wide.to_numpy(), wide.columns.to_numpy()

    def rho(index: np.ndarray, axis: int = -1) -> np.ndarray:
        # Spearman's correlation is Pearson's of the ranks; written so that all resamples are taken at once.
        means = values[np.moveaxis(index, axis, -1).astype(int)].mean(axis=-2)
        ranks, order = rankdata(means, axis=-1), rankdata(depth)
        ranks, order = ranks - ranks.mean(axis=-1, keepdims=True), order - order.mean()
        with np.errstate(invalid="ignore"):  # NaN where a quantity is the same in every layer
            return np.asarray((ranks @ order) / (np.linalg.norm(ranks, axis=-1) * np.linalg.norm(order)))

    passages = len(values)
    centre = float(rho(np.arange(passages)))
    if passages == 1:
        # one text says nothing of others; what depends on weights only has no such uncertainty
        weights_only = wide.index[0] == WEIGHTS
        edge = centre if weights_only else float("nan")
        return Trend(centre, edge, edge, 0 if weights_only else 1)
    spread = bootstrap(
        (np.arange(passages),),
        rho,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Trend(centre, float(spread.low), float(spread.high), passages)
