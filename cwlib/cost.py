"""The table of a benchmark: its columns, the powers of growth fitted to it, and how it reads as text."""

import numpy as np
import pandas as pd

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
        Columns work, variable, exponent, theory.
    """
    rows = []
    for (work, variable), theory in THEORY.items():
        found = table[(table["group"] == "growth") & (table["case"] == f"{work} over {variable}")]
        slope = np.polyfit(np.log(found["way"].astype(float)), np.log(found["value"]), 1)[0]
        rows.append({"work": work, "variable": variable, "exponent": float(slope), "theory": theory})
    return pd.DataFrame(rows)


def report(table: pd.DataFrame) -> str:
    """The table and the fitted exponents as text."""
    shown = table[["group", "case", "way", "tokens", "value", "unit", "sampled", "ratio", "error"]]
    shown = shown.assign(tokens=shown["tokens"].astype("Int64").astype(str).replace("<NA>", ""))
    fitted = exponents(table).to_string(index=False, float_format="{:.2f}".format)
    return f"{shown.to_string(index=False, float_format='{:.3g}'.format, na_rep='')}\n\ngrowth\n{fitted}"


def markdown(table: pd.DataFrame, machine: dict[str, object]) -> str:
    """The README's account of a benchmark: what each computation took, and how many times longer other ways took."""
    lines = ["| computed | cwlib | other ways, times as long |", "| --- | --- | --- |"]
    for group in ("singular values", "edge isometry", "Laplacian defect", "Schmidt values"):
        for case, rows in table[table["group"] == group].groupby("case", sort=False):
            others = [
                f"{row.way} {row.ratio:,.2g}{'*' if row.sampled < rows['sampled'].iloc[0] else ''}"
                for row in rows.itertuples()
                if row.way != "cwlib"
            ]
            lines.append(f"| {group}, {case} | {_seconds(rows['value'].iloc[0])} | {', '.join(others)} |")
    return "\n".join(lines)


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{1000 * value:.2g} ms"
