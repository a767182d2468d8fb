"""Trends over depth and their uncertainty over passages."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import bootstrap, rankdata

WEIGHTS = "-"  #: in the passage column: the value depends on weights only
RESAMPLES = 1000
CONFIDENCE = 0.95


def early_and_late(rows: pd.DataFrame) -> tuple[float, float]:
    """Means over the first and the last third of the layers that a quantity has (at least one layer each).

    Parameters
    ----------
    rows : pandas.DataFrame
        Rows of a study for one checkpoint, source, metric and gauge: columns layer, value.
    """
    layers = sorted(rows["layer"].unique())
    third = max(1, len(layers) // 3)
    early, late = (float(rows[rows["layer"].isin(part)]["value"].mean()) for part in (layers[:third], layers[-third:]))
    return early, late


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
    rows = table[(table["metric"] == metric) & (table["gauge"] == gauge)]
    lines: dict[str, dict[tuple[str, str], float]] = {}
    for (checkpoint, source), group in rows.groupby(["checkpoint", "source"]):
        early, late = early_and_late(group)
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
