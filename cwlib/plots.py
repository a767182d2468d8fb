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
from matplotlib.colors import LogNorm, Normalize, PowerNorm
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
    "singular_spectrum": "singular value\nover root mean square",
    "schmidt_spectrum": "Schmidt value / |K|",
}
NULLS = {  # drawn in grey, told apart by line style
    "gaussian": {"label": "Gaussian O, V", "linestyle": ":", "color": style.NULL["color"]},
    "init": {"label": "random initialisation", "linestyle": "-", "linewidth": 0.8, "color": style.NULL["color"]},
    "shuffled": {"label": "heads shuffled", "linestyle": "-.", "linewidth": 0.8, "color": style.NULL["color"]},
    "sinkless": {"label": "token 0 removed", "linestyle": "--", "linewidth": 0.8, "color": "#666666"},
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
    ax.plot(mean.index, mean, label="trained", markersize=2.2, **look)
    ax.set_xlim(-0.03, 1.03)
    return ax


def columns(table: pd.DataFrame, metric: str) -> list[str]:
    """Checkpoints that have a metric, in the order in which grids show them: encoders first.

    Raises
    ------
    ValueError
        If there is none.
    """
    have = table[table["metric"] == metric].drop_duplicates("checkpoint")
    if have.empty:
        raise ValueError(f"table: expected rows of {metric}, got none; read a study with cwlib.study.load")
    return list(have.sort_values(["kind", "checkpoint"], ascending=[False, True])["checkpoint"])


def broken(name: str) -> str:
    """A checkpoint's name on two lines if it is longer than a narrow column, which holds a dozen letters."""
    return name.replace("-", "-\n", 1) if len(name) > 13 else name


def _titles(row: np.ndarray, table: pd.DataFrame, checkpoints: Sequence[str]) -> None:
    kinds, narrow = table.drop_duplicates("checkpoint").set_index("checkpoint")["kind"], len(checkpoints) > 4
    for ax, name in zip(row, checkpoints, strict=True):
        ax.set_title(f"{broken(name) if narrow else name}\n({kinds[name]})", fontsize="small" if narrow else None)


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
        checkpoints = columns(table, metrics[0])
    size = style.WIDTHS["text"], 0.6 + 1.2 * len(metrics)
    fig, axes = plt.subplots(len(metrics), len(checkpoints), figsize=size, sharex=True, sharey="row", squeeze=False)
    for row, metric in zip(axes, metrics, strict=True):
        has_gauge = table.loc[table["metric"] == metric, "gauge"].ne("").any()
        for ax, checkpoint in zip(row, checkpoints, strict=True):
            plot_depth(ax, table, checkpoint, metric, (gauge or "mean") if has_gauge else "")
        row[0].set_ylabel(LABELS.get(metric, metric))
    _titles(axes[0], table, checkpoints)
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
    names = columns(table, "spectral_density")
    size = style.WIDTHS["text"], 3.6
    fig, axes = plt.subplots(2, len(names), figsize=size, sharex=True, sharey="col", squeeze=False)
    for row, (source, name) in zip(axes, (("trained", "trained"), ("gaussian", "Gaussian O, V")), strict=True):
        for ax, checkpoint in zip(row, names, strict=True):
            mesh = plot_density(ax, table, checkpoint, source)
        row[0].set_ylabel(f"{name}\nlayer")
    _titles(axes[0], table, names)
    fig.supxlabel("eigenvalue of the reversibilised generator, transports at scale 1", fontsize="medium")
    fig.colorbar(mesh, ax=axes, label="density of eigenvalues", fraction=0.03)
    return fig


def plot_spectrum(ax: Axes, table: pd.DataFrame, checkpoint: str, metric: str, null: str) -> Axes:
    """Draw a metric that is a spectrum, a curve per layer coloured by depth; in grey the mean over layers of a null."""
    rows = table[(table["checkpoint"] == checkpoint) & (table["metric"] == metric)]
    rows = rows.assign(at=rows["at"].astype(float))
    trained = rows[rows["source"] == "trained"].groupby(["depth", "at"])["value"].mean()
    for depth in trained.index.unique("depth"):
        curve = trained[depth]
        ax.plot(curve.index, curve, color=plt.get_cmap("cividis")(0.95 * depth), linewidth=0.8, label="trained")
    law = rows[rows["source"] == null].groupby("at")["value"].mean()
    look = {"label": NULLS[null]["label"], "color": "#777777", "linewidth": 1.6, "linestyle": (0, (1, 0.8))}
    ax.plot(law.index, law, **look)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    return ax


def spectrum_grid(table: pd.DataFrame, metric: str, xlabel: str, null: str = "gaussian") -> Figure:
    """A row of `plot_spectrum`, one panel per checkpoint, with a colour bar of depth."""
    names = columns(table, metric)
    fig, axes = plt.subplots(1, len(names), figsize=(style.WIDTHS["text"], 2.4), sharey=True, squeeze=False)
    for ax, checkpoint in zip(axes[0], names, strict=True):
        plot_spectrum(ax, table, checkpoint, metric, null)
    axes[0, 0].set_ylabel(LABELS.get(metric, metric))
    _titles(axes[0], table, names)
    fig.supxlabel(xlabel, fontsize="medium")
    scale = plt.cm.ScalarMappable(Normalize(0, 1 / 0.95), "cividis")
    bar = fig.colorbar(scale, ax=axes, label="relative depth", fraction=0.02, ticks=[0, 0.5, 1])
    bar.ax.set_ylim(0, 1)
    handle = axes[0, 0].lines[-1]
    fig.legend([handle], [f"{NULLS[null]['label']} (mean over layers)"], loc="outside upper center", frameon=False)
    return fig


def plot_pairs(ax: Axes, table: pd.DataFrame, checkpoint: str, source: str, limit: float) -> QuadMesh:
    """Draw the operator cosine of every pair of layers of one checkpoint, from -``limit`` to ``limit``."""
    rows = table[(table["metric"] == "layer_cosines") & (table["checkpoint"] == checkpoint)]
    rows = rows[rows["source"] == source].assign(at=lambda r: r["at"].astype(float).astype(int))
    means = rows.groupby(["layer", "at"])["value"].mean()
    layers, earlier = (means.index.get_level_values(n).to_numpy(int) for n in (0, 1))
    matrix = np.full((layers.max(initial=0) + 1,) * 2, np.nan)  # nothing on the diagonal, where it is one
    matrix[layers, earlier] = matrix[earlier, layers] = means
    edges = np.arange(len(matrix) + 1) - 0.5
    mesh = ax.pcolormesh(edges, edges, matrix, cmap="RdBu_r", vmin=-limit, vmax=limit, rasterized=True)
    ax.set_aspect("equal")
    ax.invert_yaxis()
    ax.locator_params(nbins=3, integer=True)
    return mesh


def pairs_grid(table: pd.DataFrame, limit: float = 0.3) -> Figure:
    """A grid of `plot_pairs`: trained weights, Gaussian maps, and for decoders token 0 removed."""
    names = columns(table, "layer_cosines")
    rows = {"trained": "trained", "gaussian": "Gaussian O, V", "sinkless": "token 0 removed"}
    have = set(table[table["metric"] == "layer_cosines"].groupby(["checkpoint", "source"]).groups)
    rows = {source: label for source, label in rows.items() if any(s == source for _, s in have)}
    size = style.WIDTHS["text"], 0.8 + len(rows)
    fig, axes = plt.subplots(len(rows), len(names), figsize=size, squeeze=False)
    for row, (source, label) in zip(axes, rows.items(), strict=True):
        for ax, checkpoint in zip(row, names, strict=True):
            if (checkpoint, source) in have:
                mesh = plot_pairs(ax, table, checkpoint, source, limit)
            else:
                ax.set_axis_off()
        first = next(ax for ax, name in zip(row, names, strict=True) if (name, source) in have)
        first.set_ylabel(f"{label}\nlayer")
    _titles(axes[0], table, names)
    fig.supxlabel("layer", fontsize="medium")
    fig.colorbar(mesh, ax=axes, label="operator cosine", fraction=0.03, extend="both")
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
