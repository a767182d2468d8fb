"""Panels of the theorem notebooks: spectra of constructed walks. See `cwlib.plots` for the study's."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Circle

from cwlib import style


def plot_eigenvalues(ax: Axes, values: np.ndarray, reach: tuple[float, float] = (2.2, 1.6)) -> Axes:
    """Draw eigenvalues of a generator in the complex plane, with [0, 2] and the disk of radius one around 1.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    values : Complex[ndarray, "eigenvalue"]
        Any that lie outside the window raise ValueError, so that none is left out unseen.
    reach : tuple of float
        How far the window goes from 1, along the real axis and along the imaginary one.
    """
    outside = ~((abs(values.real - 1) <= reach[0]) & (abs(values.imag) <= reach[1]))  # NaN is outside
    if outside.any():
        raise ValueError(f"reach: expected a window that holds all eigenvalues, got {outside.sum()} outside {reach}")
    ax.add_patch(Circle((1, 0), 1, fill=False, color=style.NULL["color"], linestyle="--", linewidth=0.8))
    ax.plot([0, 2], [0, 0], color=style.ORANGE, linewidth=4, alpha=0.6, solid_capstyle="butt")
    ax.plot(values.real, values.imag, ".", color=style.BLUE, markersize=2, markeredgewidth=0)
    ax.set_xlim(1 - reach[0], 1 + reach[0])
    ax.set_ylim(-reach[1], reach[1])
    ax.set_aspect("equal")
    ax.set_xticks([0, 1, 2])
    ax.set_yticks([-1, 0, 1])
    return ax


def plot_band(ax: Axes, at: np.ndarray, value: np.ndarray, error: np.ndarray, **look: str) -> Axes:
    """Draw an estimate as a line, with a band of two standard errors; ``look`` are plot keywords, the label among them.

    On a logarithmic axis only what is positive can be drawn, of the band too.
    """
    ax.fill_between(at, value - 2 * error, value + 2 * error, color=look["color"], alpha=0.25, linewidth=0)
    ax.plot(at, value, **look)
    return ax


def plot_mixing(ax: Axes, table: pd.DataFrame) -> Axes:
    """Draw length and isometry of mixtures of two rotations over their angle (T6), closed form as line, cores as dots.

    Lengths are those of a pair in the plane, isometry that of a pair in four dimensions that agrees in two.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    table : pandas.DataFrame
        Columns ``angle`` (radians), ``gate`` (of the second rotation), ``quantity`` ("length" or "isometry"),
        ``closed form`` and ``measured``.
    """
    looks = {"length": ("-", "o", "in the plane"), "isometry": ("--", "s", "in 4 dimensions")}
    for (quantity, gate), rows in table.groupby(["quantity", "gate"], sort=True):
        line, marker, space = looks[quantity]
        color = style.BLUE if gate == table["gate"].max() else style.VERMILLION
        label = rf"{quantity} {space}, $\gamma$ = {gate:g}"
        angle = np.degrees(rows["angle"])
        ax.plot(angle, rows["closed form"], color=color, linestyle=line)
        ax.plot(angle, rows["measured"], marker, markevery=4, color=color, markerfacecolor="white")
        ax.plot([], [], marker, color=color, linestyle=line, markerfacecolor="white", label=label)
    ax.set_xticks(range(0, 181, 45))
    ax.set_ylim(-0.03, 1.04)
    ax.set_xlabel("angle between the two heads (degrees)")
    ax.set_ylabel("length, isometry of the mixture")
    ax.legend(loc="lower left")
    return ax


def plot_gaussian_isometry(ax: Axes, table: pd.DataFrame) -> Axes:
    """Draw isometry of Gaussian heads over d_head / d_model, with its limit 1/(1 + 2 ratio), and singular values (T7).

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    table : pandas.DataFrame
        Columns ``d_model`` (two different ones), ``ratio``, ``isometry`` (mean over heads), and ``s_10``, ``s_90``
        (quantiles of singular values over their root mean square).
    """
    widest = table[table["d_model"] == table["d_model"].max()].sort_values("ratio")
    band = {"color": style.NULL["color"], "alpha": 0.25, "linewidth": 0}
    ax.fill_between(widest["ratio"], widest["s_10"], widest["s_90"], label="singular values / rms (10-90 %)", **band)
    ratio = np.geomspace(table["ratio"].min(), table["ratio"].max(), 100)
    ax.plot(ratio, 1 / (1 + 2 * ratio), color="black", label="1 / (1 + 2 ratio)")
    looks = [(style.BLUE, "o", 7), (style.VERMILLION, "s", 3)]  # by size, so that neither covers the other
    for (d_model, rows), (color, marker, size) in zip(table.groupby("d_model"), looks, strict=True):
        look = {"color": color, "markersize": size, "markerfacecolor": "white"}
        ax.plot(rows["ratio"], rows["isometry"], marker, label=f"isometry, d_model = {d_model:.0f}", **look)
    ax.set_xscale("log", base=2)
    exponents = range(round(np.log2(ratio[0])), 1)
    ax.set_xticks([2.0**e for e in exponents], [f"1/{2**-e}" if e else "1" for e in exponents])
    ax.minorticks_off()
    ax.set_ylim(0, 2.2)
    ax.set_xlabel("d_head / d_model of a Gaussian head")
    ax.set_ylabel("isometry; singular values")
    ax.legend(loc="upper left")
    return ax


def plot_spectral_flow(ax: Axes, angle: np.ndarray, numerical: np.ndarray) -> Axes:
    r"""Draw the spectrum of a walk on a cycle over its holonomy angle (T8), with its closed form as lines.

    The branches are :math:`1 - \cos((2\pi k + \theta)/n)`; the one of k = 0, which ends where k = 1 began, stands out.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    angle : Float[ndarray, "angle"]
        Radians.
    numerical : Float[ndarray, "angle eigenvalue"]
        The 2n eigenvalues of the generator at each angle, in any order; drawn as dots.
    """
    tokens = numerical.shape[1] // 2
    fine = np.linspace(angle.min(), angle.max(), 200)
    for k in range(tokens):
        color, width = (style.VERMILLION, 2.0) if k == 0 else (style.BLUE, 1.0)
        curve = 1 - np.cos((2 * np.pi * k + fine) / tokens)
        ax.plot(np.degrees(fine), curve, color=color, linewidth=width, label={0: "k = 0", 1: "k > 0"}.get(k))
    look = {"color": "black", "markersize": 2.5, "markerfacecolor": "white", "markeredgewidth": 0.6}
    dots = ax.plot(np.degrees(angle), numerical, "o", zorder=3, **look)
    dots[0].set_label("numerical")
    ax.set_xticks(range(0, 361, 90))
    ax.set_ylim(-0.05, 2.05)
    ax.set_xlabel(r"holonomy angle $\theta$ (degrees)")
    ax.set_ylabel("eigenvalue of L")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
    return ax


def plot_sphere_spectrum(ax: Axes, values: np.ndarray, levels: dict[int, int]) -> Axes:
    """Draw the low spectrum of a sampled sphere over rank, in clusters, with the exact levels as lines.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
    values : Float[ndarray, "eigenvalue"]
        Ascending, in units of the first level; as many as the multiplicities add up to.
    levels : dict of int to int
        Exact level -> multiplicity, ascending.
    """
    start = 0
    colors = [style.BLUE, style.VERMILLION, style.GREEN, style.PURPLE]
    for (level, size), color, marker in zip(levels.items(), colors, "os^D", strict=False):
        rank = np.arange(start + 1, start + size + 1)
        ax.plot([start + 0.5, start + size + 0.5], [level, level], color="black", linewidth=0.8)
        ax.plot(rank, values[start : start + size], marker, color=color, markersize=3)
        ax.text(start + 0.5, level + 0.7, f"{size} fields at {level}", color=color, ha="left", va="bottom")
        start += size
    ax.set_xlim(0, start + 1)
    ax.set_ylim(0, 1.15 * max(levels))
    ax.set_yticks(list(levels))
    ax.set_xlabel("rank of the eigenvalue")
    ax.set_ylabel("eigenvalue / mean of the first six")
    return ax
