"""One function per kind of panel: ``plot_*(ax, table, ...)``, and the grids that notebooks compose of them.

Panels read the tables of `cwlib.study` and `cwlib.claims` and know nothing of models. Trained checkpoints are drawn in
colour, nulls in grey; encoders and decoders differ in marker and line style as well.
"""

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import ListedColormap, LogNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from cwlib import style

LABELS = {
    "depth_step": "depth step\n(total variation)",
    "operator_cosine": "operator cosine\nto previous layer",
    "spectral_step": "spectral step\n(Wasserstein-1)",
    "reversibility_defect": "reversibility\ndefect",
    "spectral_gap": "spectral gap",
    "entropy_rate": "entropy rate\n(nats)",
    "sink_mass": "sink mass\non token 0",
    "schmidt_participation": "effective\nnumber of heads",
    "single_walk_error": "single-walk\nrelative error",
    "head_isometry": "head isometry",
    "sum_isometry": "isometry of\nsummed heads",
    "edge_isometry": "edge isometry",
    "symmetry": "symmetry of T",
    "identity_alignment": "alignment of T\nwith identity",
    "norm_cv": "norm variation\n(std / mean)",
    "angle_correlation": "angle\ncorrelation",
    "holonomy_defect": "holonomy defect\nof triangles",
    "laplacian_defect": "Laplacian\ndefect",
    "metric_defect": "metric defect",
    "inverse_defect": "inverse defect",
    "metric_balance_defect": "metric balance\ndefect",
    "mass": "mass 1 - s",
    "dirichlet_energy": "Dirichlet\nenergy / size",
    "parallel_defect": "parallel\ndefect",
}
NULLS = {  # drawn in grey, told apart by line style
    "gaussian": {"label": "Gaussian O, V", "linestyle": ":", "color": style.NULL["color"]},
    "init": {"label": "random initialisation", "linestyle": "-", "linewidth": 0.8, "color": style.NULL["color"]},
    "shuffled": {"label": "heads shuffled", "linestyle": "-.", "linewidth": 0.8, "color": style.NULL["color"]},
    "sinkless": {"label": "token 0 removed", "linestyle": "--", "linewidth": 0.8, "color": "#666666"},
}
VERDICT_COLOURS = {  # fixed order, light enough for black text; the word is printed in every cell
    "not testable here": "#E6E6E6",
    "not supported": "#F4B183",
    "mixed": "#FFE699",
    "supported": "#9DC3E6",
}


def plot_walk(ax: Axes, matrix: np.ndarray, tokens: Sequence[str] | None = None) -> Axes:
    """Draw a walk matrix W, destinations down and sources across, on a square-root colour scale."""
    norm = PowerNorm(0.5, vmin=0, vmax=1)
    sns.heatmap(matrix, ax=ax, cmap="cividis", norm=norm, square=True, cbar=False, xticklabels=False, yticklabels=False)
    if tokens is not None:
        positions = np.arange(len(tokens)) + 0.5
        ax.set_xticks(positions, tokens, rotation=90)
        ax.set_yticks(positions, tokens, rotation=0)
    ax.set_xlabel("source j")
    ax.set_ylabel("destination i")
    return ax


def plot_depth(ax: Axes, table: pd.DataFrame, checkpoint: str, metric: str, gauge: str = "") -> Axes:
    """Draw one metric of one checkpoint over depth.

    The trained checkpoint is the mean over passages with the band between the 10th and 90th percentile; each null is
    the mean over its passages and seeds with the band of its extremes. Says so where a metric is not defined, as the
    way back under causal attention.
    """
    rows = table[(table["checkpoint"] == checkpoint) & (table["metric"] == metric) & (table["gauge"] == gauge)]
    if rows.empty:
        ax.text(0.5, 0.5, "not defined", transform=ax.transAxes, ha="center", va="center", color="#555555")
        return ax
    for source, look in NULLS.items():
        null = rows[rows["source"] == source].groupby("depth")["value"]
        if null.ngroups:
            mean = null.mean()
            ax.plot(mean.index, mean, **look)
            ax.fill_between(mean.index, null.min(), null.max(), color=look["color"], alpha=0.2, linewidth=0)
    trained = rows[rows["source"] == "trained"]
    look = style.checkpoint(checkpoint, trained["kind"].iloc[0])
    values = trained.groupby("depth")["value"]
    mean = values.mean()
    ax.fill_between(
        mean.index, values.quantile(0.1), values.quantile(0.9), color=look["color"], alpha=0.25, linewidth=0
    )
    ax.plot(mean.index, mean, label="trained", **look)
    ax.set_xlim(-0.03, 1.03)
    return ax


def depth_grid(
    table: pd.DataFrame, metrics: Sequence[str], gauge: str = "", checkpoints: Sequence[str] | None = None
) -> Figure:
    """A grid of `plot_depth`: one row per metric (shared axis), one column per checkpoint.

    Parameters
    ----------
    table : pandas.DataFrame
        From `cwlib.study.load`.
    metrics : sequence of str
        Rows. A metric of the token walk uses ``gauge``.
    gauge : {"", "mean", "norm"}
        Token walk of the attention-graph metrics.
    checkpoints : sequence of str, optional
        Columns; by default every checkpoint that has the first metric, encoders first.
    """
    if checkpoints is None:
        have = table[table["metric"] == metrics[0]].drop_duplicates("checkpoint").sort_values(["kind", "checkpoint"])
        checkpoints = list(have.sort_values("kind", ascending=False, kind="stable")["checkpoint"])
    size = style.WIDTHS["text"], 0.6 + 1.2 * len(metrics)
    fig, axes = plt.subplots(len(metrics), len(checkpoints), figsize=size, sharex=True, sharey="row", squeeze=False)
    for row, metric in zip(axes, metrics, strict=True):
        has_gauge = table.loc[table["metric"] == metric, "gauge"].ne("").any()
        for ax, checkpoint in zip(row, checkpoints, strict=True):
            plot_depth(ax, table, checkpoint, metric, (gauge or "mean") if has_gauge else "")
        row[0].set_ylabel(LABELS.get(metric, metric))
    for ax, checkpoint in zip(axes[0], checkpoints, strict=True):
        kind = table.loc[table["checkpoint"] == checkpoint, "kind"].iloc[0]
        ax.set_title(f"{checkpoint}\n({kind})")
    fig.supxlabel("relative depth (0 = first layer, 1 = last)", fontsize="medium")
    _grey_legend(fig, axes)
    return fig


def plot_density(ax: Axes, table: pd.DataFrame, checkpoint: str, source: str) -> QuadMesh:
    """Draw the spectral density of one checkpoint's generators, eigenvalue across and depth down, on a log scale.

    Dashed lines bound [0, 2], where the eigenvalues of a connection Laplacian lie (T4 c). Returns the mesh, which a
    colour bar needs.
    """
    rows = table[(table["metric"] == "spectral_density") & (table["source"] == source)]
    density = rows[rows["checkpoint"] == checkpoint].assign(at=lambda r: r["at"].astype(float))
    density = density.pivot_table(index="layer", columns="at", values="value")
    norm = LogNorm(1e-4, 4.0, clip=True)
    if density.empty:
        raise ValueError(f"table: expected spectral densities of {checkpoint} ({source}), got none")
    # edges of cells, for a single layer too
    layers = np.append(density.index - 0.5, density.index[-1] + 0.5)
    at = density.columns.to_numpy()
    places = np.concatenate([[1.5 * at[0] - at[1] / 2], (at[1:] + at[:-1]) / 2, [1.5 * at[-1] - at[-2] / 2]])
    mesh = ax.pcolormesh(places, layers, density, cmap="cividis", norm=norm, rasterized=True)
    for edge in (0, 2):
        ax.axvline(edge, color="white", linestyle="--", linewidth=0.8)
    ax.set_ylim(density.index.max() + 0.5, density.index.min() - 0.5)
    ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    return mesh


def density_grid(table: pd.DataFrame) -> Figure:
    """A grid of `plot_density`: trained weights above the Gaussian null, one column per checkpoint."""
    have = table[table["metric"] == "spectral_density"].drop_duplicates("checkpoint")
    if have.empty:
        raise ValueError("table: expected spectral densities, got none; read a study with cwlib.study.load")
    kinds = have.sort_values(["kind", "checkpoint"], ascending=[False, True]).set_index("checkpoint")["kind"]
    size = style.WIDTHS["text"], 3.6
    fig, axes = plt.subplots(2, len(kinds), figsize=size, sharex=True, sharey="col", squeeze=False)
    for row, (source, name) in zip(axes, (("trained", "trained"), ("gaussian", "Gaussian O, V")), strict=True):
        for ax, checkpoint in zip(row, kinds.index, strict=True):
            mesh = plot_density(ax, table, checkpoint, source)
        row[0].set_ylabel(f"{name}\nlayer")
    for ax, (checkpoint, kind) in zip(axes[0], kinds.items(), strict=True):
        ax.set_title(f"{checkpoint}\n({kind})")
    fig.supxlabel("eigenvalue of the reversibilised generator, transports at scale 1", fontsize="medium")
    fig.colorbar(mesh, ax=axes, label="density of eigenvalues", fraction=0.03)
    return fig


def _grey_legend(fig: Figure, axes: np.ndarray) -> None:
    """One legend for the figure, above the panels: trained and the nulls that occur."""
    seen = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    names = [n for n in ("trained", *(look["label"] for look in NULLS.values())) if n in seen]
    fig.legend([seen[n] for n in names], names, loc="outside upper center", ncols=len(names), frameon=False)


def plot_residuals(ax: Axes, table: pd.DataFrame, bound: float) -> Axes:
    """Draw the largest T2 residual over passages of every layer of every checkpoint, with the bound."""
    rows = table[(table["metric"] == "t2_residual") & (table["source"] == "trained")]
    for (kind, name), group in rows.groupby(["kind", "checkpoint"], sort=True):
        worst = group.groupby("depth")["value"].max()
        ax.plot(worst.index, worst, label=name, **style.checkpoint(name, kind))
    ax.axhline(bound, color="black", linewidth=0.8)
    ax.annotate(f"bound {bound:.0e}", (0.0, bound), xytext=(2, -3), textcoords="offset points", va="top")
    ax.set_yscale("log")
    ax.set_ylim(top=bound * 2)
    ax.set_xlabel("relative depth (0 = first layer, 1 = last)")
    ax.set_ylabel("relative residual of T2")
    ax.legend(ncols=2, loc="center", bbox_to_anchor=(0.5, 0.55))
    return ax


def plot_schmidt(ax: Axes, spectra: dict[str, np.ndarray], looks: dict[str, dict] | None = None) -> Axes:
    """Draw operator Schmidt values, each divided by its root sum of squares, by rank."""
    for name, values in spectra.items():
        look = {"marker": "o"} | (looks or {}).get(name, {})
        ax.plot(np.arange(1, len(values) + 1), values / np.linalg.norm(values), label=name, **look)
    ax.set_xlabel("rank")
    ax.set_ylabel("Schmidt value / |K|")
    ax.set_ylim(bottom=0)
    ax.legend()
    return ax


def plot_evidence(ax: Axes, evidence: pd.DataFrame) -> Axes:
    """Draw the trends over depth of one claim with intervals, a line per metric and checkpoint, and the best null."""
    ordered = evidence.sort_values(["metric", "kind", "checkpoint"], ascending=[True, False, True]).iloc[::-1]
    labels = []
    for y, line in enumerate(ordered.itertuples()):
        look = style.checkpoint(line.checkpoint, line.kind)
        ax.plot([line.low, line.high], [y, y], color=look["color"])
        face = look["color"] if line.verdict == "supported" else "white"
        ax.plot(line.rho, y, marker=look["marker"], color=look["color"], markerfacecolor=face)
        ax.plot(line.null_rho, y, marker="|", markersize=7, color="#555555", linestyle="")
        labels.append(f"{line.metric} ({line.expected})  {line.checkpoint}")
    ax.axvline(0, color="black", linewidth=0.6)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_xlim(-1.05, 1.05)
    ax.set_xlabel("Spearman correlation with depth (bar: best random initialisation; filled: supported)")
    return ax


def plot_verdicts(ax: Axes, words: pd.DataFrame) -> Axes:
    """Draw a table of verdicts, one word per cell: metrics or claims down, checkpoints and the overall one across."""
    order = list(VERDICT_COLOURS)
    codes = words.map(order.index)
    sns.heatmap(
        codes,
        ax=ax,
        annot=words,
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
    ax.set_xticks(ax.get_xticks(), list(words.columns), rotation=0)
    ax.set_yticks(ax.get_yticks(), list(words.index), rotation=0)
    return ax
