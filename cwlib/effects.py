"""How far trained weights are from their nulls, and how far rounding moves them: every number metric, in its units."""

from collections.abc import Iterator

import pandas as pd

from cwlib.quantise import SCHEMES
from cwlib.statistics import estimate, thirds

QUANTITY = ["checkpoint", "metric", "gauge"]
CASE = ["source", "seed"]


def _quantities(table: pd.DataFrame) -> Iterator[tuple[list[str], pd.DataFrame, dict[tuple[str, int], pd.DataFrame]]]:
    """Each metric that is a number, on each checkpoint: name, trained rows, and rows by any other source and seed."""
    numbers = table[(table["at"] == "") & (table["metric"] != "t2_residual")]
    for quantity, rows in numbers.groupby(QUANTITY):
        cases = dict(iter(rows.groupby(CASE)))
        trained = cases.pop(("trained", 0), None)
        if trained is not None:
            yield list(quantity), trained, cases


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
    for quantity, trained, cases in _quantities(table):
        own = thirds(trained)
        for (null, seed), rows in cases.items():
            if null in SCHEMES:
                continue
            other = thirds(rows)
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
    lines = []
    place = ["passage", "layer"]
    for quantity, trained, cases in _quantities(table):
        for scheme in SCHEMES:
            if (scheme, 0) not in cases:
                continue
            rounded = cases[scheme, 0]
            moved = (rounded.set_index(place)["value"] - trained.set_index(place)["value"]).abs()
            parts = (thirds(rounded) - thirds(trained)).mean()
            null = cases.get(("gaussian", 0), cases.get(("init", 0)))
            away = (null.set_index(place)["value"] - trained.set_index(place)["value"]).abs().mean()
            lines.append(
                dict(zip(QUANTITY, quantity, strict=True))
                | {"scheme": scheme, "size": trained["value"].abs().mean(), "shift": moved.mean()}
                | {"late_shift": parts["late"], "change_shift": parts["change"], "null_distance": away}
            )
    return pd.DataFrame(lines)
