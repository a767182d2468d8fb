"""Quantities of the attention graph: the token walk W, alone or from layer to layer, and how many heads it takes."""

import numpy as np
import torch
from scipy.stats import wasserstein_distance

from cwlib._types import Walk
from cwlib.laplacian import Measure, choose_measure, reversibilised_spectrum
from cwlib.laplacian import reversibility_defect as _reversibility_defect
from cwlib.walk import ConnectionWalk

SINK_FROM = 8  #: sink_mass averages over tokens from this index on: earlier ones have little else to attend to


def depth_step(before: Walk, after: Walk) -> float:
    r"""Total variation between layers, :math:`\frac1n\sum_i \frac12\sum_j |W'_{ij} - W_{ij}|` in [0, 1]."""
    return float((after - before).abs().sum(1).mean() / 2)


def operator_cosine(before: ConnectionWalk, after: ConnectionWalk) -> float:
    r"""Cosine between neighbouring operators, :math:`\langle K, K'\rangle / (|K|\,|K'|)` in [-1, 1] (T9)."""
    return before.inner(after) / (before.norm() * after.norm())


def spectral_step(before: Walk, after: Walk) -> float:
    """Wasserstein-1 distance between the spectra of the reversibilised walks of neighbouring layers, in [0, 2]."""
    spectra = [reversibilised_spectrum(w, choose_measure(w)[1]).cpu().numpy() for w in (before, after)]
    return float(wasserstein_distance(*spectra))


def reversibility_defect(matrix: Walk) -> float:
    r""":math:`|\Pi W - W^T\Pi| / |\Pi W + W^T\Pi|` in [0, 1]; pi stationary if irreducible, else uniform (T4 R)."""
    return _reversibility_defect(matrix, choose_measure(matrix)[1])


def spectral_gap(matrix: Walk) -> float:
    r""":math:`1 - \lambda_2` of the reversibilised walk, in [0, 2]; pi as in `reversibility_defect`."""
    return float(1 - reversibilised_spectrum(matrix, choose_measure(matrix)[1])[-2]) if len(matrix) > 1 else np.nan


def entropy_rate(matrix: Walk, measure: Measure | None = None) -> float:
    r""":math:`-\sum_i \pi_i \sum_j W_{ij}\log W_{ij}` in nats, in [0, log n]; pi as in `reversibility_defect`."""
    measure = choose_measure(matrix)[1] if measure is None else measure
    return float(-(measure[:, None] * torch.xlogy(matrix, matrix)).sum())


def sink_mass(matrix: Walk) -> float:
    """Mean weight on token 0 received by tokens >= 8, in [0, 1]; NaN when there is no such token."""
    rows = matrix[SINK_FROM:, 0]
    return float(rows.mean()) if len(rows) else np.nan


def schmidt_participation(walk: ConnectionWalk) -> float:
    r"""Effective number of heads, :math:`(\sum s^2)^2 / \sum s^4` of the Schmidt values, in [1, H] (T3)."""
    squares = walk.schmidt_values() ** 2
    return float(squares.sum() ** 2 / (squares**2).sum())


def single_walk_error(walk: ConnectionWalk) -> float:
    r"""Relative error of the best constant-transport walk, :math:`\sqrt{1 - s_1^2/\sum s^2}` in [0, 1) (T3)."""
    squares = walk.schmidt_values() ** 2
    return float((1 - squares[0] / squares.sum()).sqrt())
