"""Panels of the costs: other ways beside cwlib, capture of whole models, growth beside the powers of T9.

They read the table of `cwlib.bench`, and each draws what a function beside it returns as a table.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from cwlib import style
from cwlib.cost import THEORY, exponents

COMPARED = ("singular values", "edge isometry", "Laplacian defect", "Schmidt values")
"""Groups of the table that compare ways to one number."""

WAYS = {  # the same in every panel; no two share a marker, nor a colour where they meet
    "cwlib": {"label": "cwlib", "color": style.BLACK, "marker": "*"},
    "dense": {"label": "dense", "color": style.BLUE, "marker": "o"},
    "dense, float32": {"label": "dense, float32", "color": style.SKY, "marker": "s"},
    "batched einsum": {"label": "batched einsum", "color": style.GREEN, "marker": "D"},
    "batched einsum, float32": {"label": "batched einsum, float32", "color": style.PURPLE, "marker": "d"},
    "TransformerLens": {"label": "TransformerLens", "color": style.VERMILLION, "marker": "^"},
    "TransformerLens, float64": {"label": "TransformerLens, float64", "color": style.ORANGE, "marker": "v"},
    "TransformerLens, by layer": {"label": "TransformerLens, by layer", "color": "#666666", "marker": "<"},
    "output_attentions": {"label": "output_attentions", "color": style.BLUE, "marker": "P"},
    "plain forward": {"label": "plain forward", "color": style.NULL["color"], "marker": "x"},
}
GROWTH = {  # variable: its axis label, look
    "tokens": ("tokens", {"color": style.BLUE, "marker": "o"}),
    "d_model": ("d_model", {"color": style.VERMILLION, "marker": "s"}),
    "heads": ("heads", {"color": style.GREEN, "marker": "^"}),
    "layers": ("layers", {"color": style.BLACK, "marker": "D"}),
}


def ratios(table: pd.DataFrame) -> pd.DataFrame:
    """How many times cwlib's time each other way takes to the same numbers.

    Returns
    -------
    pd.DataFrame
        Columns group, case, tokens, way, ratio, ``low`` and ``high`` (the widest that the quartiles of both times
        allow), ``extrapolated`` (whether only a part of that way's work was timed) and error, in the table's order.
    """
    chosen = table[table["group"].isin(COMPARED)]
    own = chosen[chosen["way"] == "cwlib"].set_index(["group", "case"])[["value", "low", "high"]].add_suffix("_own")
    other = chosen[chosen["way"] != "cwlib"].join(own, on=["group", "case"])
    other = other.assign(
        ratio=other["value"] / other["value_own"],
        low=other["low"] / other["high_own"],
        high=other["high"] / other["low_own"],
        extrapolated=other["sampled"] < 1,
    )
    columns = ["group", "case", "tokens", "way", "ratio", "low", "high", "extrapolated", "error"]
    return other[columns].reset_index(drop=True)


def plot_ratios(ax: Axes, table: pd.DataFrame) -> Axes:
    """Draw how many times slower each other way is than cwlib, a row per comparison; bars as in `ratios`.

    A hollow marker is extrapolated from a part of the work.
    """
    found = ratios(table)
    names = found["group"] + "\n" + found["case"]
    names = names.where(found["tokens"].isna(), names + ", " + found["tokens"].map("{:.0f} tokens".format))
    rows = list(dict.fromkeys(names))[::-1]
    for name, group in found.groupby(names, sort=False):
        # next to each other, so that equal ratios stay apart
        lanes = rows.index(name) - 0.15 * (np.arange(len(group)) - (len(group) - 1) / 2)
        for y, line in zip(lanes, group.itertuples(), strict=True):
            look = WAYS[line.way]
            face = "white" if line.extrapolated else look["color"]
            ax.plot([line.low, line.high], [y, y], color=look["color"])
            mark = {"marker": look["marker"], "color": look["color"], "markerfacecolor": face, "markersize": 5}
            ax.plot(line.ratio, y, linestyle="", **mark)
    ax.axvline(1, color=WAYS["cwlib"]["color"], linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlim(min(1, found["low"].min()) / 2, max(1, found["high"].max()) * 2)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(-0.6, len(rows) - 0.4)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("time / cwlib's time (line: cwlib; hollow: extrapolated from a part of the work)")
    ax.grid(axis="x", color="#E6E6E6", linewidth=0.5)
    ax.set_axisbelow(True)
    for way in dict.fromkeys(found["way"]):
        ax.plot([], [], linestyle="", markersize=5, **WAYS[way])
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return ax


def capture_costs(table: pd.DataFrame, case: str, what: str) -> pd.DataFrame:
    """What it costs to capture one model, by way and tokens.

    Parameters
    ----------
    table : pd.DataFrame
        Of `cwlib.bench`.
    case : str
        The model.
    what : {"time", "memory"}
        Time over that of a plain forward pass, or peak memory over the weights in MB (10^6 bytes).

    Returns
    -------
    pd.DataFrame
        Columns way, tokens, value, and low, high: of times the widest that the quartiles of both allow, of memory,
        which is measured once, NaN.

    Raises
    ------
    ValueError
        If the table has no such rows.
    """
    group = {"time": "capture", "memory": "capture memory"}.get(what)
    rows = table[(table["group"] == group) & (table["case"] == case)].astype({"tokens": int})
    if rows.empty:
        has = sorted(table[table["group"] == "capture"]["case"].unique())
        raise ValueError(f"case, what: expected one of {has} and 'time' or 'memory', got {case!r} and {what!r}")
    rows = rows.set_index("tokens")[["way", "value", "low", "high"]]
    if what == "memory":
        return rows.assign(value=rows["value"] / 1e6).reset_index()
    plain = rows[rows["way"] == "plain forward"]
    spread = {"low": rows["low"] / plain["high"], "high": rows["high"] / plain["low"]}
    return rows.assign(value=rows["value"] / plain["value"], **spread).reset_index()


def plot_capture(ax: Axes, table: pd.DataFrame, case: str, what: str) -> Axes:
    """Draw what it costs to capture one model over tokens, a line per way; see `capture_costs`."""
    costs = capture_costs(table, case, what)
    if what == "time":
        ax.axhline(1, **(WAYS["plain forward"] | {"marker": ""}))
        costs = costs[costs["way"] != "plain forward"]
    ways = list(dict.fromkeys(costs["way"]))
    for way, line in costs.groupby("way", sort=False):
        look = {"markersize": 7 if way == "cwlib" else 4.5, "zorder": 3 if way == "cwlib" else 2} | WAYS[way]
        # bars of the same text next to each other
        at = line["tokens"] * 2 ** (0.08 * (ways.index(way) - (len(ways) - 1) / 2) if what == "time" else 0.0)
        ax.vlines(at, line["low"], line["high"], color=look["color"])
        ax.plot(at, line["value"], **look)
    lengths = sorted(set(costs["tokens"]))
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, lengths)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
    if what == "memory":
        ax.set_ylim(bottom=0)
    ax.set_title(case)
    ax.set_xlabel("tokens")
    ax.set_ylabel("time /\nplain forward pass" if what == "time" else "peak memory\nover the weights (MB)")
    return ax


def capture_grid(table: pd.DataFrame) -> Figure:
    """Panels of `plot_capture`: time above memory, a column per model."""
    cases = list(dict.fromkeys(table[table["group"] == "capture"]["case"]))
    size = style.WIDTHS["text"], 4.4
    fig, axes = plt.subplots(2, len(cases), figsize=size, squeeze=False)
    for row, what in zip(axes, ("time", "memory"), strict=True):
        for ax, case in zip(row, cases, strict=True):
            plot_capture(ax, table, case, what)
            ax.set(xlabel="") if what == "time" else ax.set_title("")
        for ax in row[1:]:
            ax.set_ylabel("")
    handles, labels = axes[1, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return fig


def growth(table: pd.DataFrame, work: str) -> pd.DataFrame:
    """Time, or memory, of one work over each variable, relative to the smallest size of that variable.

    Returns
    -------
    pd.DataFrame
        Columns variable, size, ``times`` (size over the smallest), value, low, high.

    Raises
    ------
    ValueError
        If the work is none of `cwlib.cost.THEORY`.
    """
    variables = [variable for name, variable in THEORY if name == work]
    if not variables:
        raise ValueError(f"work: expected one of {sorted({name for name, _ in THEORY})}, got {work!r}")
    parts = []
    for variable in variables:
        rows = table[(table["group"] == "growth") & (table["case"] == f"{work} over {variable}")]
        rows = rows.assign(variable=variable, size=rows["way"].astype(int)).sort_values("size")
        first = rows.iloc[0]
        rows[["value", "low", "high"]] /= first["value"]
        parts.append(rows.assign(times=rows["size"] / first["size"]))
    return pd.concat(parts)[["variable", "size", "times", "value", "low", "high"]].reset_index(drop=True)


def plot_growth(ax: Axes, table: pd.DataFrame, work: str) -> Axes:
    """Draw the growth of one work over each variable, both logarithmic; dotted, the power that bounds it.

    The legend holds the fitted power and its bound (`cwlib.cost.THEORY`).
    """
    fitted = exponents(table).set_index(["work", "variable"])
    ax.update_datalim([(1, 0.5), (1, 10)])  # so that noise around a constant is not drawn large
    for variable, line in growth(table, work).groupby("variable", sort=False):
        name, look = GROWTH[variable]
        power, bound = fitted.loc[(work, variable), ["exponent", "theory"]]
        ax.plot(line["times"], line["times"] ** bound, color=look["color"], linestyle=":", linewidth=0.8)
        ax.vlines(line["times"], line["low"], line["high"], color=look["color"])
        ax.plot(line["times"], line["value"], label=f"{name}: {power:.2f} (≤ {bound:g})", **look)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = 2 ** np.arange(np.ceil(np.log2(growth(table, work)["times"].max())) + 1).astype(int)
    ax.set_xticks(ticks, ticks)
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("size / smallest size")
    ax.set_ylabel(f"{'memory' if 'memory' in work else 'time'} / that of the smallest")
    ax.legend(title=work.replace("_", " "), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax


def growth_grid(table: pd.DataFrame) -> Figure:
    """A row of `plot_growth`, a panel per work, on axes of one scale: slopes are powers."""
    works = list(dict.fromkeys(work for work, _ in THEORY))
    fig, axes = plt.subplots(1, len(works), figsize=(style.WIDTHS["text"], 3.0), sharey=True, squeeze=False)
    for ax, work in zip(axes[0], works, strict=True):
        plot_growth(ax, table, work)
        ax.set_ylabel("")
    axes[0, 0].set_ylabel("relative to the smallest size")
    return fig
