"""The table of a benchmark: its columns, the powers of growth fitted to it, and how it reads as text."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from cwlib.files import write_atomically

#: exponents of T9 in the growth of time: (work, variable) -> at most
THEORY = {
    ("singular_values", "d_model"): 1.0,
    ("singular_values", "heads"): 1.0,
    ("edge_isometry", "tokens"): 2.0,
    ("edge_isometry", "d_model"): 1.0,
    ("edge_isometry", "heads"): 4.0,
    ("capture", "layers"): 1.0,
    ("capture memory", "layers"): 0.0,
}


COLUMNS = ["group", "case", "way", "tokens", "value", "low", "high", "unit", "repeats", "sampled", "ratio", "error"]


def exponents(table: pd.DataFrame) -> pd.DataFrame:
    """Fitted powers of the growth rows: least squares on logarithms, beside those of T9.

    Returns
    -------
    pd.DataFrame
        Columns work, variable, exponent, last (the power between the two largest sizes alone), theory. Values of zero,
        which are too small to be measured, are left out; powers of fewer than two others are NaN.
    """
    rows = []
    for (work, variable), theory in THEORY.items():
        found = table[
            (table["group"] == "growth") & (table["case"] == f"{work} over {variable}") & (table["value"] > 0)
        ]
        sizes, values = np.log(found["way"].astype(float).to_numpy()), np.log(found["value"].to_numpy())
        exponent = last = np.nan
        if len(found) > 1:
            exponent = float(np.polyfit(sizes, values, 1)[0])
            last = float((values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
        rows.append({"work": work, "variable": variable, "exponent": exponent, "last": last, "theory": theory})
    return pd.DataFrame(rows)


def report(table: pd.DataFrame) -> str:
    """The table and the fitted exponents as text."""
    shown = table[["group", "case", "way", "tokens", "value", "unit", "sampled", "ratio", "error"]]
    shown = shown.assign(tokens=shown["tokens"].astype("Int64").astype(str).replace("<NA>", ""))
    fitted = exponents(table).to_string(index=False, float_format="{:.2f}".format, na_rep="")
    text = f"{shown.to_string(index=False, float_format='{:.3g}'.format, na_rep='')}\n\ngrowth\n{fitted}"
    zero = table[(table["group"] == "growth") & (table["value"] == 0)]
    left_out = ", ".join(f"{case} at {size}" for case, size in zip(zero["case"], zero["way"], strict=True))
    return text + (f"\ntoo small to be measured, and left out of the powers: {left_out}" if left_out else "")


def write_partial(table: pd.DataFrame, folder: Path) -> None:
    """Write the rows of a run that has not ended to bench.partial.csv: an interrupted run leaves them there."""
    write_atomically(folder / "bench.partial.csv", table.to_csv(index=False, float_format="%.6g").encode())


def write(table: pd.DataFrame, folder: Path, machine: dict[str, object]) -> None:
    """Write bench.csv, and bench.json with the machine and versions that it was measured with."""
    write_atomically(folder / "bench.csv", table.to_csv(index=False, float_format="%.6g").encode())
    write_atomically(folder / "bench.json", f"{json.dumps(machine, indent=1)}\n".encode())
    (folder / "bench.partial.csv").unlink(missing_ok=True)


def markdown(table: pd.DataFrame) -> str:
    """The README's account of a benchmark: what cwlib took, and how many times as much other ways took.

    An asterisk marks what was extrapolated from a part of the work, a dash ratios to what was too small to be measured.
    Of captures those of the largest model.
    """

    def star(row: pd.Series) -> str:
        return "*" if row["sampled"] < 1 else ""

    lines = ["| computed | cwlib takes | other ways, times as much |", "| --- | --- | --- |"]
    captures = table["group"].str.startswith("capture")
    largest = table.loc[captures, "case"].iloc[-1] if captures.any() else ""
    shown = table[(~captures | (table["case"] == largest)) & ~table["group"].isin(["growth", "matrix products"])]
    for (group, case, _), rows in shown.groupby(["group", "case", "tokens"], sort=False, dropna=False):
        own = rows[rows["way"] == "cwlib"].iloc[0]
        others = [
            f"{row['way']} {_digits(row['value'] / own['value']) if own['value'] else '–'}{star(row)}"
            for _, row in rows[rows["way"] != "cwlib"].iterrows()
        ]
        tokens = "" if np.isnan(own["tokens"]) else f", {own['tokens']:.0f} tokens"
        lines.append(
            f"| {group}, {case}{tokens} | {_amount(own['value'], own['unit'])}{star(own)} | {'; '.join(others)} |"
        )
    return "\n".join(lines)


def machine_line(machine: dict[str, object]) -> str:
    """The machine that a benchmark was measured on, from its bench.json."""
    where = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    return f"{where}, {machine['cores']} cores, torch {machine['torch']} with {machine['threads']} threads"


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return f"{_digits(value / 1e6)} MB" if value < 1e9 else f"{_digits(value / 1e9)} GB"
    return f"{_digits(value)} s" if value >= 1 else f"{_digits(1000 * value)} ms"


def _digits(value: float) -> str:
    """Two significant digits."""
    return f"{float(f'{value:.1e}'):,g}"
