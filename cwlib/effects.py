"""How far trained weights are from their nulls, and how far rounding moves them: every number metric, in its units."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from cwlib.quantise import SCHEMES
from cwlib.statistics import estimate, thirds

QUANTITY = ["checkpoint", "metric", "gauge"]
CASE = ["source", "seed"]


def _numbers(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table["at"] == "") & (table["metric"] != "t2_residual")]


def _by_quantity(parts: pd.DataFrame) -> Iterator[tuple[tuple, dict[tuple[str, int], pd.DataFrame]]]:
    """Thirds of layers of each metric on each checkpoint, by source and seed."""
    for quantity, mine in parts.groupby(level=QUANTITY):
        cases = {case: rows.droplevel(CASE) for case, rows in mine.droplevel(QUANTITY).groupby(level=CASE)}
        if ("trained", 0) in cases:
            yield quantity, cases


def effects_table(table: pd.DataFrame) -> pd.DataFrame:
    """Trained values beside each null: deep layers, change over depth, and the differences with intervals.

    Parameters
    ----------
    table : pandas.DataFrame
        From `cwlib.study.load`.

    Returns
    -------
    pandas.DataFrame
        One line per checkpoint, metric, gauge, null and seed. late and null_late: mean over the last third of layers;
        change and null_change: the same minus the mean over the first third; both trained and null on the passages that
        the null was measured on. late_gap and change_gap: trained minus null, each with low, high and effect as in
        `cwlib.statistics.Estimate`.
    """
    lines = []
    for quantity, cases in _by_quantity(thirds(_numbers(table), [*QUANTITY, *CASE])):
        own = cases.pop(("trained", 0))
        for (null, seed), other in cases.items():
            if null in SCHEMES:
                continue
            shared = own.loc[own.index.isin(other.index)]
            line = dict(zip(QUANTITY, quantity, strict=True)) | {"null": null, "seed": seed}
            for part in ("late", "change"):
                gap = estimate(shared[part] - other[part])
                line |= {part: shared[part].mean(), f"null_{part}": other[part].mean(), f"{part}_gap": gap.mean}
                line |= {f"{part}_{name}": getattr(gap, name) for name in ("low", "high", "effect")}
            lines.append(line)
    return pd.DataFrame(lines)


def rounding_table(table: pd.DataFrame) -> pd.DataFrame:
    """How far rounding to a format of gguf moves each metric of the checkpoints of the control.

    Parameters
    ----------
    table : pandas.DataFrame
        From `cwlib.study.load`.

    Returns
    -------
    pandas.DataFrame
        One line per checkpoint, metric, gauge and scheme. size: mean absolute trained value over passages and layers;
        shift: mean absolute difference, layer by layer; late_shift and change_shift: rounded minus trained, mean over
        passages of the last third of layers, and of the change since the first third; null_distance: mean absolute
        difference from the Gaussian maps, or random initialisation where they change nothing, as a yardstick.
    """
    numbers = _numbers(table)
    numbers = numbers[numbers["checkpoint"].isin(numbers[numbers["source"].isin(SCHEMES)]["checkpoint"])]
    place = [*QUANTITY, "passage", "layer"]
    by_source = {case: rows.set_index(place)["value"] for case, rows in numbers.groupby(CASE)}
    if not by_source:
        return pd.DataFrame()

    def distance(case: tuple[str, int]) -> pd.Series:
        """Mean absolute difference from the trained values, by quantity."""
        gaps = (by_source[case] - by_source["trained", 0]).abs() if case in by_source else pd.Series(dtype=float)
        return gaps.dropna().groupby(level=QUANTITY).mean() if len(gaps) else gaps

    gaussian, init = distance(("gaussian", 0)), distance(("init", 0))
    size = by_source["trained", 0].abs().groupby(level=QUANTITY).mean()
    shifts = {scheme: distance((scheme, 0)) for scheme in SCHEMES}
    lines = []
    for quantity, cases in _by_quantity(thirds(numbers, [*QUANTITY, *CASE])):
        for scheme in SCHEMES:
            if (scheme, 0) in cases:
                moved = (cases[scheme, 0] - cases["trained", 0]).mean()
                lines.append(
                    dict(zip(QUANTITY, quantity, strict=True))
                    | {"scheme": scheme, "size": size[quantity], "shift": shifts[scheme][quantity]}
                    | {"late_shift": moved["late"], "change_shift": moved["change"]}
                    | {"null_distance": gaussian.get(quantity, init.get(quantity, np.nan))}
                )
    return pd.DataFrame(lines)
