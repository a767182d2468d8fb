"""Panels of the claims: changes over depth beside those of the nulls, scale, the rounding control, verdicts.

They read the tables of `cwlib.effects` and `cwlib.claims`; looks are those of `cwlib.plots`.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from cwlib import style
from cwlib.plots import LABELS, NULLS, broken

VERDICT_COLOURS = {  # fixed order, light enough for black text; the word is printed in every cell
    "not testable here": "#E6E6E6",
    "not supported": "#F4B183",
    "mixed": "#FFE699",
    "supported": "#9DC3E6",
}
NULL_MARKS = {"gaussian": "2", "init": "x", "shuffled": "+", "sinkless": "1"}
NULL_NAMES = {null: look["label"] for null, look in NULLS.items()}


def plot_changes(ax: Axes, evidence: pd.DataFrame, effects: pd.DataFrame, metric: str) -> Axes:
    """Draw the change over depth of one metric: a line per checkpoint, trained in colour, its nulls in grey.

    The change is the mean of the last third of layers minus that of the first, counted positive as the claim has it;
    bars are its interval over passages. A filled marker is a verdict of "supported".
    """
    lines = evidence[evidence["metric"] == metric].sort_values(["kind", "checkpoint"], ascending=[True, False])
    for y, line in enumerate(lines.itertuples()):
        look = style.checkpoint(line.checkpoint, line.kind)
        face = look["color"] if line.verdict == "supported" else "white"
        sign = 1 if line.expected == "rises" else -1
        nulls = effects[(effects["checkpoint"] == line.checkpoint) & (effects["metric"] == metric)]
        for null, group in nulls[nulls["gauge"] == line.gauge].groupby("null"):
            grey = {"color": "#777777", "linestyle": "", "marker": NULL_MARKS[null], "markersize": 6}
            ax.plot(sign * group["null_change"], [y] * len(group), label=NULL_NAMES[null], **grey)
        ax.plot([line.change_low, line.change_high], [y, y], color=look["color"])
        marker = {"marker": look["marker"], "color": look["color"], "markerfacecolor": face, "linestyle": ""}
        ax.plot(line.change, y, markersize=5, **marker)
    ax.axvline(0, color="black", linewidth=0.6)
    ax.set_yticks(range(len(lines)), lines["checkpoint"])
    ax.set_ylim(-0.6, len(lines) - 0.4)
    ax.set_title(f"{metric}\n({lines['expected'].iloc[0]} by the claim)")
    ax.margins(x=0.15)
    ax.locator_params(axis="x", nbins=4)
    return ax


def changes_grid(evidence: pd.DataFrame, effects: pd.DataFrame) -> Figure:
    """A row of `plot_changes` for the evidence of one claim."""
    metrics = list(dict.fromkeys(evidence["metric"]))
    fig, axes = plt.subplots(1, len(metrics), figsize=(style.WIDTHS["text"], 2.6), sharey=True, squeeze=False)
    for ax, metric in zip(axes[0], metrics, strict=True):
        plot_changes(ax, evidence, effects, metric)
    about = "right of zero: as claimed; filled: supported"
    fig.supxlabel(f"change, last minus first third of layers ({about})", fontsize="medium")
    _legend(fig, axes)
    return fig


def _legend(fig: Figure, axes: np.ndarray) -> None:
    seen = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    fig.legend(seen.values(), seen, loc="outside upper center", ncols=len(seen), frameon=False)


def plot_scale(ax: Axes, evidence: pd.DataFrame, scale: pd.DataFrame, parameters: dict[str, int], metric: str) -> Axes:
    """Draw how far each checkpoint's change over depth exceeds its hardest null's, over the number of parameters.

    Bars are intervals over passages. A line is the fit within a kind of three checkpoints or more.
    """
    mine = evidence[evidence["metric"] == metric]
    for line in mine.itertuples():
        look = style.checkpoint(line.checkpoint, line.kind)
        size = parameters[line.checkpoint]
        ax.plot([size, size], [line.gain_low, line.gain_high], color=look["color"])
        ax.plot(size, line.gain, marker=look["marker"], color=look["color"], linestyle="", label=line.checkpoint)
    for kind, group in mine.groupby("kind"):
        [slope] = scale[(scale["group"] == kind) & (scale["metric"] == metric)]["slope"] if len(group) > 2 else [np.nan]
        sizes = np.log10([parameters[c] for c in group["checkpoint"]])
        ends = np.array([sizes.min(), sizes.max()])
        ax.plot(10**ends, group["gain"].mean() + slope * (ends - sizes.mean()), color="black", linewidth=0.8)
    ax.axhline(0, color=style.NULL["color"], linewidth=2, zorder=0)
    ax.set_xscale("log")
    ax.margins(x=0.1)
    ax.set_title(LABELS.get(metric, metric).replace("\n", " "), fontsize="small")
    return ax


def scale_grid(evidence: pd.DataFrame, scale: pd.DataFrame, parameters: dict[str, int]) -> Figure:
    """Panels of `plot_scale` for all evidence, C1 above C2."""
    claims = {claim: list(dict.fromkeys(group["metric"])) for claim, group in evidence.groupby("claim")}
    size = style.WIDTHS["text"], 0.9 + 1.7 * len(claims)
    across = max(map(len, claims.values()))
    fig, axes = plt.subplots(len(claims), across, figsize=size, sharex=True, squeeze=False)
    for row, (claim, metrics) in zip(axes, claims.items(), strict=True):
        for ax in row[len(metrics) :]:
            ax.set_axis_off()
        for ax, metric in zip(row, metrics, strict=False):
            plot_scale(ax, evidence, scale, parameters, metric)
        row[0].set_ylabel(f"{claim}: gain over\nthe hardest null")
    fig.supxlabel("parameters", fontsize="medium")
    _legend_columns(fig, axes)
    return fig


def _legend_columns(fig: Figure, axes: np.ndarray) -> None:
    handles, labels = axes[0, 0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4), frameon=False)


def plot_rounding(ax: Axes, rounding: pd.DataFrame, metrics: Sequence[str] | None = None) -> Axes:
    """Draw how far rounding to a few bits moves each metric, as a share of its distance from a null.

    Left of one, rounding matters less than what is measured.
    """
    chosen = rounding[rounding["gauge"].isin(("", "mean"))]
    share = (chosen["shift"] / chosen["null_distance"]).rename("share")
    chosen = chosen.assign(share=share)
    chosen = chosen if metrics is None else chosen[chosen["metric"].isin(metrics)]
    order = list(chosen.groupby("metric")["share"].max().sort_values(ascending=False).index)
    for (checkpoint, scheme), group in chosen.groupby(["checkpoint", "scheme"]):
        look = style.checkpoint(checkpoint, "encoder")
        face = look["color"] if scheme == "q4_1" else "white"
        places = [order.index(m) for m in group["metric"]]
        marker = {"marker": look["marker"], "markerfacecolor": face, "color": look["color"], "linestyle": ""}
        ax.plot(group["share"], places, label=f"{checkpoint}, {scheme.upper()}", **marker)
    ax.axvline(1, color="black", linewidth=0.6)
    ax.set_xscale("log")
    ax.set_yticks(range(len(order)), [LABELS.get(m, m).replace("\n", " ") for m in order])
    ax.set_xlabel("shift by rounding / distance between trained weights and null")
    ax.grid(axis="y", color="#E6E6E6", linewidth=0.5)
    ax.legend(loc="lower left")
    return ax


def plot_verdicts(ax: Axes, words: pd.DataFrame) -> Axes:
    """Draw a table of verdicts, one word per cell: metrics or claims down, checkpoints and the overall one across."""
    order = list(VERDICT_COLOURS)
    codes = words.map(order.index)
    sns.heatmap(
        codes,
        ax=ax,
        annot=words.replace("not testable here", "not testable\nhere"),
        fmt="",
        cmap=ListedColormap(list(VERDICT_COLOURS.values())),
        vmin=-0.5,
        vmax=len(order) - 0.5,
        cbar=False,
        linewidths=1,
        annot_kws={"color": "black", "fontsize": "small"},
    )
    ax.set_xlabel("")
    ax.set_ylabel("")
    ax.tick_params(length=0)
    ax.set_xticks(ax.get_xticks(), [broken(name) for name in words.columns], rotation=0)
    ax.set_yticks(ax.get_yticks(), list(words.index), rotation=0)
    return ax
