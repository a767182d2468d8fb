r"""Measures and reversibilisation of a token walk.

A random walk W on tokens has a measure pi in which its flow :math:`F = \Pi W` is looked at. Reversibility is the
symmetry of the flow (condition R of T4). Causal attention has no positive stationary measure (T5), so the measure used
is always named.
"""

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from cwlib._types import Walk
from cwlib.validation import require_gauge
from cwlib.walk import ConnectionWalk

Measure = Float[Tensor, " token"]


def stochastic_walk(walk: ConnectionWalk, gauge: str = "mean") -> Walk:
    """The row-stochastic token walk W of a layer, float64.

    ``mean``: the mean of the heads' attention, row-stochastic as it stands. ``norm``: what flows along each edge,
    |K_ij|_F / sqrt(d), divided by its row sums.

    Raises
    ------
    ValueError
        If the gauge is unknown, or in the norm gauge if some row carries no flow at all.
    """
    require_gauge(gauge)
    matrix = walk.effective_walk("mean" if gauge == "sum" else gauge)
    sums = matrix.sum(1, keepdim=True)
    if (sums == 0).any():
        raise ValueError(
            f"walk: expected every row to carry flow in the norm gauge, got an empty row {int(sums.argmin())}; "
            "all transports into that token vanish"
        )
    return matrix / sums


def uniform_measure(tokens: int, device: torch.device | str = "cpu") -> Measure:
    """The uniform probability measure on ``tokens`` tokens."""
    return torch.full((tokens,), 1.0 / tokens, dtype=torch.float64, device=device)


def stationary_measure(matrix: Walk) -> Measure:
    r"""The stationary law of an irreducible walk: :math:`\pi^T W = \pi^T`, :math:`\pi > 0`, :math:`\sum\pi = 1`.

    Raises
    ------
    ValueError
        If W is not square or not irreducible (a causal walk never is, T5: its only stationary law sits on token 0).
    """
    if not is_irreducible(matrix):
        raise ValueError(
            f"matrix: expected an irreducible square walk, got shape {tuple(matrix.shape)} with more than one "
            "communicating class (causal walks are absorbed by token 0, T5); use uniform_measure and say so"
        )
    # Elimination of states without subtraction (Grassmann, Taksar, Heyman 1985): every entry keeps its relative
    # accuracy, also where parts of the walk are linked by tiny weights only.
    rest = matrix.to(torch.float64).cpu().numpy().copy()
    tokens = len(rest)
    for last in range(tokens - 1, 0, -1):
        rest[:last, last] /= rest[last, :last].sum()
        rest[:last, :last] += np.outer(rest[:last, last], rest[last, :last])
    measure = np.ones(tokens)
    for token in range(1, tokens):
        measure[token] = measure[:token] @ rest[:token, token]
    return torch.from_numpy(measure / measure.sum()).to(matrix.device)


def is_irreducible(matrix: Walk) -> bool:
    """Whether every token reaches every other along edges of positive weight."""
    if matrix.shape[0] != matrix.shape[1]:
        return False
    support = csr_matrix((matrix > 0).cpu().numpy().astype(np.int8))
    return connected_components(support, directed=True, connection="strong")[0] == 1


def choose_measure(matrix: Walk) -> tuple[str, Measure]:
    """The measure this artifact uses for W, with its name: ``stationary`` if W is irreducible, else ``uniform``."""
    if is_irreducible(matrix):
        return "stationary", stationary_measure(matrix)
    return "uniform", uniform_measure(matrix.shape[0], matrix.device)


def _flow(matrix: Walk, measure: Measure) -> Walk:
    if matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"matrix: expected a walk from tokens to the same tokens, got shape {tuple(matrix.shape)}; "
            "a bipartite walk (cross-attention) has no way back to compare with"
        )
    return measure[:, None] * matrix


def reversibility_defect(matrix: Walk, measure: Measure) -> float:
    r""":math:`|\Pi W - W^T \Pi|_F / |\Pi W + W^T \Pi|_F` in [0, 1]; zero iff W is reversible in pi (T4 R).

    One iff no edge has a way back; loops count towards the symmetric part.

    Raises
    ------
    ValueError
        If W is not square.
    """
    flow = _flow(matrix, measure)
    return float(torch.linalg.matrix_norm(flow - flow.T) / torch.linalg.matrix_norm(flow + flow.T))


def reversibilised_spectrum(matrix: Walk, measure: Measure) -> Float[Tensor, " token"]:
    r"""Eigenvalues, ascending, of the walk on the symmetrised flow :math:`S = \frac12(\Pi W + W^T\Pi)`.

    That walk is :math:`D^{-1} S` with :math:`D = diag(S 1)`; it is stochastic and reversible, so its spectrum is real,
    lies in [-1, 1] and contains 1. When pi is stationary it is the additive reversibilisation
    :math:`\frac12(W + W^*)` of T5.

    Raises
    ------
    ValueError
        If W is not square.
    """
    flow = _flow(matrix, measure)
    symmetric = (flow + flow.T) / 2
    scale = symmetric.sum(1).rsqrt()
    return torch.linalg.eigvalsh(scale[:, None] * symmetric * scale[None, :])
