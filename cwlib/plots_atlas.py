"""Panels of the atlas: which system meets which condition, and the rates that its entries show."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from cwlib import style
from cwlib.atlas_pair import CONDITIONS, ROUNDING

PARTS = {"walk W": ("nonnegative", "stochastic", "reversible"), "transport Ω": CONDITIONS[3:]}
"""What the conditions are on."""

LINES = (  # series in order; told apart without colour too
    {"color": style.BLUE, "linestyle": "-", "marker": "o"},
    {"color": style.VERMILLION, "linestyle": "--", "marker": "s"},
    {"color": style.GREEN, "linestyle": "-.", "marker": "^"},
    {"color": style.PURPLE, "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "D"},
    {"color": style.BLACK, "linestyle": ":", "marker": "v"},
    {"color": style.ORANGE, "linestyle": (0, (8, 2)), "marker": "P"},
)


def two_digits(defect: float) -> str:
    """A defect by two significant digits, written short: 0.25, 12, 130, 1.5e-5."""
    rounded = float(f"{defect:.1e}")
    text = f"{rounded:.0f}" if 10 <= rounded < 1e4 else f"{rounded:#.2g}"
    return text.replace("e-0", "e-").replace("e+0", "e")


def arranged(table: pd.DataFrame) -> dict[str, list[str]]:
    """Systems by verdict: stochastic walks first, then the verdicts with the most systems."""
    groups = [(verdict, list(rows.index)) for verdict, rows in table.groupby("verdict", sort=False)]
    return dict(sorted(groups, key=lambda group: (group[0] != "stochastic walk", -len(group[1]))))


def plot_conditions(ax: Axes, table: pd.DataFrame) -> Axes:
    """Draw which conditions each system meets: a dot if it does, its defect if it fails, a dash if undefined.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        About 0.17 inches high for each system and each verdict; see `conditions_figure`.
    table : pandas.DataFrame
        Of `cwlib.atlas.table`: indexed by system, with a column for each condition, and ``verdict``.
    """
    names, rows, top = [], [], 0
    for verdict, systems in arranged(table).items():
        ax.axhline(top - 0.5, color="black", linewidth=0.6)
        ax.text(-0.45, top, f"{verdict} ({len(systems)})", va="center_baseline", style="italic", fontsize=7)
        for row, system in enumerate(systems, start=top + 1):
            ax.axhline(row, color="#E6E6E6", linewidth=0.5, zorder=0)
            for column, condition in enumerate(CONDITIONS):
                defect = table.loc[system, condition]
                if np.isnan(defect):
                    ax.plot(column, row, "_", color=style.NULL["color"], markersize=5)
                elif defect <= ROUNDING:
                    ax.plot(column, row, "o", color=style.BLUE, markersize=4.5)
                else:
                    look = {"ha": "center", "va": "center_baseline", "fontsize": 6.5, "color": style.VERMILLION}
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # no line through the digits
                    ax.text(column, row, two_digits(defect), bbox=box, **look)
            names.append(system)
            rows.append(row)
        between = len(PARTS["walk W"]) - 0.5
        ax.vlines(between, top + 0.5, top + len(systems) + 0.5, color="black", linewidth=0.6)
        top += len(systems) + 1
    for part, conditions in PARTS.items():
        middle = CONDITIONS.index(conditions[0]) + (len(conditions) - 1) / 2
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center", "va": "bottom"}
        ax.annotate(part, (middle, 1), (0, 15), fontsize=8, **place)
    ax.set_xlim(-0.5, len(CONDITIONS) - 0.5)
    ax.set_ylim(top - 0.5, -0.5)
    ax.set_yticks(rows, names)
    ax.set_xticks(range(len(CONDITIONS)), CONDITIONS)
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel(f"dot: holds to {two_digits(ROUNDING)}; number: defect; dash: undefined")
    return ax


def conditions_figure(table: pd.DataFrame) -> Figure:
    """A figure of text width, as tall as `plot_conditions` needs for this table."""
    lines = len(table) + table["verdict"].nunique()
    fig, ax = plt.subplots(figsize=(style.WIDTHS["text"], 0.17 * lines + 0.75))
    plot_conditions(ax, table)
    return fig


def _named_slope(x: np.ndarray, y: np.ndarray, logarithmic: bool) -> str:
    """The exponent, or the rate of its second half, of a line that is straight as it is drawn; else nothing."""
    if not logarithmic:
        x, y = x[len(x) // 2 :], y[len(y) // 2 :]
    if len(x) < (3 if logarithmic else 5):
        return ""
    across, up = np.log(x) if logarithmic else x, np.log(y)
    if np.ptp(up) < 0.1 or abs(np.corrcoef(across, up)[0, 1]) < 0.99:
        return ""
    slope = f"{np.polyfit(across, up, 1)[0]:.2f}".replace("-", "−")
    return f", {'slope' if logarithmic else 'rate'} {slope}"


def plot_curve(ax: Axes, curve: pd.DataFrame, xlabel: str, ylabel: str) -> Axes:
    """Draw the rate that an entry shows: y on a logarithmic axis, x too if it is positive and covers a factor of 4.

    The legend names the slope of a line that is straight on two logarithmic axes, and, if x is not logarithmic, the
    rate d log y / dx of a line that is straight in its second half. A y of zero has no place there, and is left out.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    curve : pandas.DataFrame
        Columns ``x``, ``y`` >= 0, and ``series``: up to six.
    xlabel, ylabel : str
        What x and y are.

    Raises
    ------
    ValueError
        If there are more series than line styles.
    """
    series = list(dict.fromkeys(curve["series"]))
    if len(series) > len(LINES):
        raise ValueError(f"curve: expected at most {len(LINES)} series, got {len(series)}; draw them in two panels")
    logarithmic = bool(curve["x"].min() > 0 and curve["x"].max() >= 4 * curve["x"].min())
    for name, look in zip(series, LINES, strict=False):
        line = curve[(curve["series"] == name) & (curve["y"] > 0)].sort_values("x")
        x, y = line["x"].to_numpy(float), line["y"].to_numpy(float)
        marks = {"markevery": max(1, len(x) // 8), "markerfacecolor": "white"}
        ax.plot(x, y, label=name + _named_slope(x, y, logarithmic), **look, **marks)
    ax.set_yscale("log")
    if logarithmic:
        ax.set_xscale("log")
        at = sorted(set(curve["x"]))
        if len(at) <= 8:  # sizes or steps
            ax.set_xticks(at, [f"1/{1 / x:g}" if x < 1 and (1 / x).is_integer() else f"{x:g}" for x in at])
        ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return ax
