"""Quantities of the attention graph: the token walk W, alone or from layer to layer, and how many heads it takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import wasserstein_distance
from torch import Tensor

from cwlib._types import Walk
from cwlib.measures import Measure, choose_measure, reversibilised_spectrum
from cwlib.measures import reversibility_defect as _reversibility_defect
from cwlib.walk import ConnectionWalk

MOST = 128  #: heads and layers up to which functions of a head's rank or of a layer are reported
SINK_FROM = 8  #: sink_mass averages over tokens from this index on: earlier ones have little else to attend to


@dataclass(frozen=True, eq=False)
class TokenWalk:
    """A row-stochastic walk W with its measure and spectrum, computed once; every function here takes it for W."""

    matrix: Walk

    @cached_property
    def measure(self) -> Measure:
        """Stationary if W is irreducible, else uniform."""
        return choose_measure(self.matrix)[1]

    @cached_property
    def spectrum(self) -> Float[Tensor, " token"]:
        """Eigenvalues of the reversibilised walk, ascending."""
        return reversibilised_spectrum(self.matrix, self.measure)


AnyTokenWalk = Walk | TokenWalk


def _of(walk: AnyTokenWalk) -> TokenWalk:
    return walk if isinstance(walk, TokenWalk) else TokenWalk(walk.detach())


def depth_step(before: AnyTokenWalk, after: AnyTokenWalk) -> float:
    r"""Total variation between layers, :math:`\frac1n\sum_i \frac12\sum_j |W'_{ij} - W_{ij}|` in [0, 1]."""
    there = _of(after).matrix
    return float((there - _of(before).matrix.to(there.device)).abs().sum(1).mean() / 2)


def operator_cosine(before: ConnectionWalk, after: ConnectionWalk) -> float:
    r"""Cosine between neighbouring operators, :math:`\langle K, K'\rangle / (|K|\,|K'|)` in [-1, 1] (T9).

    NaN if one of them vanishes.
    """
    size = before.norm() * after.norm()
    return before.inner(after) / size if size > 0 else np.nan


def layer_cosines(walk: ConnectionWalk, earlier: Sequence[ConnectionWalk]) -> Float[np.ndarray, " layer"]:
    r"""Cosine of a layer's operator with each earlier layer's, :math:`\langle K, K'\rangle / (|K|\,|K'|)` (T9).

    At 0, 1, ..., up to `MOST`; NaN beyond the layer and where an operator vanishes.
    """
    cosines = np.full(MOST, np.nan)
    for index, other in enumerate(earlier[:MOST]):
        cosines[index] = operator_cosine(other, walk)
    return cosines


def spectral_step(before: AnyTokenWalk, after: AnyTokenWalk) -> float:
    """Wasserstein-1 distance between the spectra of the reversibilised walks of neighbouring layers, in [0, 2]."""
    return float(wasserstein_distance(_of(before).spectrum.cpu().numpy(), _of(after).spectrum.cpu().numpy()))


def reversibility_defect(matrix: AnyTokenWalk) -> float:
    r""":math:`|\Pi W - W^T\Pi| / |\Pi W + W^T\Pi|` in [0, 1]; pi stationary if irreducible, else uniform (T4 R)."""
    return _reversibility_defect(_of(matrix).matrix, _of(matrix).measure)


def spectral_gap(matrix: AnyTokenWalk) -> float:
    r""":math:`1 - \lambda_2` of the reversibilised walk, in [0, 2]; pi as in `reversibility_defect`."""
    spectrum = _of(matrix).spectrum
    return max(float(1 - spectrum[-2]), 0.0) if len(spectrum) > 1 else np.nan


def entropy_rate(matrix: AnyTokenWalk, measure: Measure | None = None) -> float:
    r""":math:`-\sum_i \pi_i \sum_j W_{ij}\log W_{ij}` in nats, in [0, log n]; pi as in `reversibility_defect`."""
    walk = _of(matrix)
    measure = walk.measure if measure is None else measure
    return float(-(measure[:, None] * torch.xlogy(walk.matrix, walk.matrix)).sum())


def sink_mass(matrix: AnyTokenWalk) -> float:
    """Mean weight on token 0 received by tokens >= 8, in [0, 1]; NaN when there is no such token."""
    rows = _of(matrix).matrix[SINK_FROM:, 0]
    return float(rows.mean()) if len(rows) else np.nan


def schmidt_participation(walk: ConnectionWalk) -> float:
    r"""Effective number of heads, :math:`(\sum s^2)^2 / \sum s^4` of the Schmidt values, in [1, H] (T3)."""
    squares = walk.schmidt_values() ** 2
    return float(squares.sum() ** 2 / (squares**2).sum())


def single_walk_error(walk: ConnectionWalk) -> float:
    r"""Relative error of the best constant-transport walk, :math:`\sqrt{1 - s_1^2/\sum s^2}` in [0, 1) (T3)."""
    squares = walk.schmidt_values() ** 2
    return float((1 - squares[0] / squares.sum()).sqrt())


def schmidt_spectrum(walk: ConnectionWalk) -> Float[np.ndarray, " rank"]:
    r"""Operator Schmidt values by rank, :math:`s_k / \sqrt{\sum s^2}` in [0, 1] (T3).

    At rank 1, 2, ..., up to `MOST`; NaN beyond the number of heads, and if the operator vanishes.
    """
    values = walk.schmidt_values().cpu().numpy()
    size = np.linalg.norm(values)
    spectrum = np.full(max(MOST, len(values)), np.nan)
    spectrum[: len(values)] = values / size if size > 0 else np.nan
    return spectrum[:MOST]
