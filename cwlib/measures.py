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

from cwlib._types import Field, Walk
from cwlib.validation import require_finite, require_gauge
from cwlib.walk import ConnectionWalk

Measure = Float[Tensor, " token"]


def stochastic_walk(walk: ConnectionWalk, gauge: str = "mean") -> Walk:
    """The row-stochastic token walk W of a layer, float64.

    ``mean``, ``sum``: the mean of the heads' attention, row-stochastic as it stands. ``norm``: what flows along each
    edge, |K_ij|_F / sqrt(d), divided by its row sums.

    Raises
    ------
    ValueError
        If the gauge is unknown, the walk absorbs (in the norm gauge it does not matter), or in the norm gauge if some
        row carries no flow at all.
    """
    require_gauge(gauge)
    if walk.absorption is not None and gauge != "norm":
        raise ValueError("walk: expected a row-stochastic walk, got one with absorption; use the norm gauge")
    matrix = walk.effective_walk("mean" if gauge == "sum" else gauge)
    sums = matrix.sum(1, keepdim=True)
    if (sums == 0).any():
        raise ValueError(
            f"walk: expected every row to carry flow in the norm gauge, got an empty row {int(sums.argmin())}; "
            "all transports into that token vanish"
        )
    return matrix / sums


def uniform_measure(tokens: int, device: torch.device | str = "cpu") -> Measure:
    """The uniform probability measure on ``tokens`` tokens; ValueError if there are none."""
    if tokens < 1:
        raise ValueError(f"tokens: expected at least one token, got {tokens!r}")
    return torch.full((tokens,), 1.0 / tokens, dtype=torch.float64, device=device)


def stationary_measure(matrix: Walk) -> Measure:
    r"""The stationary law of an irreducible walk: :math:`\pi^T W = \pi^T`, :math:`\pi > 0`, :math:`\sum\pi = 1`.

    Raises
    ------
    ValueError
        If W is not square or not irreducible (a causal walk never is, T5: its only stationary law sits on token 0), or
        if weights of the law are too small for a float.
    """
    matrix = matrix.detach()
    if not is_irreducible(matrix):
        raise ValueError(
            f"matrix: expected an irreducible square walk, got shape {tuple(matrix.shape)} with more than one "
            "communicating class (under causal attention token 0 absorbs, T5); use uniform_measure and say so"
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
    measure /= measure.max()
    if not measure.min() > 0:
        raise ValueError(
            f"matrix: expected a walk whose stationary law floats can hold, got weight 0 at token {measure.argmin()}; "
            "some tokens are reached next to never: use uniform_measure or degree_measure and say so"
        )
    return torch.from_numpy(measure / measure.sum()).to(matrix.device)


def degree_measure(matrix: Walk) -> Measure:
    r"""The degree of the symmetrised walk, :math:`\pi_i \propto \sum_j \frac12(W_{ij} + W_{ji})`, always positive (T5).

    It is stationary for the reversible walk on the graph of weights :math:`\frac12(W + W^T)`.

    Raises
    ------
    ValueError
        If W is not square, or some token neither sends nor receives.
    """
    _require_square(matrix)
    matrix = matrix.detach().to(torch.float64)
    degree = matrix.sum(1) + matrix.sum(0)
    if not (degree > 0).all():
        raise ValueError(
            f"matrix: expected weight at every token, got none at token {int((degree > 0).int().argmin())}"
        )
    return degree / degree.sum()


def is_irreducible(matrix: Walk) -> bool:
    """Whether every token reaches every other along edges of positive weight."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        return False
    support = csr_matrix((matrix > 0).cpu().numpy().astype(np.int8))
    return connected_components(support, directed=True, connection="strong")[0] == 1


def choose_measure(matrix: Walk) -> tuple[str, Measure]:
    """The measure this artifact uses for W, with its name: ``stationary`` if W is irreducible, else ``uniform``."""
    if is_irreducible(matrix):
        return "stationary", stationary_measure(matrix)
    return "uniform", uniform_measure(matrix.shape[0], matrix.device)


def require_measure(measure: Measure, tokens: int) -> Measure:
    """A measure of one's own, checked and scaled to sum to one, float64.

    Raises
    ------
    ValueError
        If it does not have one positive, finite weight per token. A law that misses tokens, such as the stationary one
        of a causal walk (T5), gives no inner product on fields.
    """
    require_finite("measure", measure, 1, "token")
    if len(measure) != tokens or (measure <= 0).any():
        raise ValueError(
            f"measure: expected {tokens} positive weights, one per token, got {len(measure)} with smallest "
            f"{float(measure.min()):.3g}; uniform_measure and degree_measure are positive for every walk"
        )
    measure = measure.detach().to(torch.float64)
    measure = measure / measure.max()  # first, for the sum of the largest floats is infinite
    return measure / measure.sum()


def lazy_walk(matrix: Walk, stay: float = 0.5) -> Walk:
    r"""The lazy walk :math:`(1 - a) W + a I` with holding probability a in [0, 1).

    It has the stationary law, eigenvectors and reversibility of W; its eigenvalues are :math:`(1-a)\lambda + a`, so
    that at a = 1/2 a reversible walk has none below zero. A causal walk stays causal: laziness does not undo T5.

    Raises
    ------
    ValueError
        If W is not square or ``stay`` is out of range.
    """
    _require_square(matrix)
    require_fraction("stay", stay)
    return (1 - stay) * matrix.to(torch.float64) + stay * torch.eye(len(matrix), dtype=torch.float64).to(matrix.device)


def teleporting_walk(matrix: Walk, restart: float = 0.15, law: Measure | None = None) -> Walk:
    r"""The teleporting walk :math:`(1 - a) W + a\,1\rho^T`, a in [0, 1): a remedy of T5.

    With a > 0 and a positive law :math:`\rho` (uniform by default) it is irreducible, whatever W, so that it has a
    positive stationary law. It need not be reversible in it.

    Raises
    ------
    ValueError
        If W is not square, ``restart`` is out of range, or the law is not positive on every token.
    """
    _require_square(matrix)
    require_fraction("restart", restart)
    law = uniform_measure(len(matrix), matrix.device) if law is None else require_measure(law, len(matrix))
    return (1 - restart) * matrix.to(torch.float64) + restart * law[None, :]


def require_fraction(name: str, value: float) -> None:
    """Refuse anything but a probability below one."""
    if not 0 <= value < 1:
        raise ValueError(f"{name}: expected a probability in [0, 1), got {value!r}")


def _require_square(matrix: Walk) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"matrix: expected a walk from tokens to the same tokens, got shape {tuple(matrix.shape)}; "
            "a bipartite walk (cross-attention) has no way back to compare with"
        )


def token_flow(matrix: Walk, measure: Measure) -> Walk:
    r"""The flow :math:`f_{ij} = \pi_i W_{ij}` along every edge; ValueError if W is not square or pi negative.

    The measure is taken as it is, not scaled to sum to one.
    """
    _require_square(matrix)
    require_finite("measure", measure, 1, "token")
    if len(measure) != len(matrix) or (measure < 0).any():
        raise ValueError(
            f"measure: expected {len(matrix)} nonnegative weights, one per token, got {len(measure)} with smallest "
            f"{float(measure.min()):.3g}"
        )
    return measure[:, None] * matrix


def stochasticity_defect(matrix: Walk) -> float:
    r""":math:`|W1 - 1|/(|W1| + |1|)` in [0, 1]; zero iff every row sums to one (T4 S)."""
    if matrix.ndim != 2:
        raise ValueError(f"matrix: expected shape (dst, src), got {tuple(matrix.shape)}")
    sums = matrix.to(torch.float64).sum(1)
    return float((sums - 1).norm() / (sums.norm() + len(sums) ** 0.5))


def reversibility_defect(matrix: Walk, measure: Measure) -> float:
    r""":math:`|\Pi W - W^T \Pi|_F / |\Pi W + W^T \Pi|_F` in [0, 1]; zero iff W is reversible in pi (T4 R).

    One iff no edge has a way back; loops count towards the symmetric part.

    Raises
    ------
    ValueError
        If W is not square.
    """
    flow = token_flow(matrix, measure)
    return float(torch.linalg.matrix_norm(flow - flow.T) / torch.linalg.matrix_norm(flow + flow.T))


def reversibilised_spectrum(matrix: Walk, measure: Measure) -> Float[Tensor, " token"]:
    r"""Eigenvalues, ascending, of the walk on the symmetrised flow :math:`S = \frac12(\Pi W + W^T\Pi)`.

    That walk is :math:`D^{-1} S` with :math:`D = diag(S 1)`; it is stochastic and reversible, so its spectrum is real,
    lies in [-1, 1] and contains 1. When pi is stationary it is the additive reversibilisation
    :math:`\frac12(W + W^*)` of T5.

    Raises
    ------
    ValueError
        If W is not square, or the measure is not positive.
    """
    flow = token_flow(matrix, require_measure(measure, len(matrix)))
    symmetric = (flow + flow.T) / 2
    scale = symmetric.sum(1).rsqrt()
    return torch.linalg.eigvalsh(scale[:, None] * symmetric * scale[None, :])


def whitening_metric(field: Field, ridge: float = 1e-3) -> Float[Tensor, "d_model d_model"]:
    r"""The metric in which a field is white: :math:`G = (C + \epsilon\,\tfrac{tr C}{d} I)^{-1}`, C its covariance.

    Parameters
    ----------
    field : Float[Tensor, "token d_model"]
        Token vectors. With fewer tokens than dimensions C is singular, so that the ridge decides what the
        directions without data count.
    ridge : float
        :math:`\epsilon > 0`, in units of the mean variance.

    Raises
    ------
    ValueError
        If the field is not finite or constant, or the ridge is not positive.
    """
    require_finite("field", field, 2, "token, d_model")
    field = field.detach().to(torch.float64)
    centred = field - field.mean(0)
    covariance = centred.T @ centred / len(centred)
    level = covariance.trace() / len(covariance)
    # a mean rounds: what is left of a constant field is below 1e-15 of its size, squared
    if not 0 < ridge < float("inf") or level <= 1e-28 * field.square().mean():
        found = f"{ridge!r}, variance {level:.3g}"
        raise ValueError(f"ridge, field: expected ridge > 0 and a field that varies, got {found}")
    ridged = covariance + ridge * level * torch.eye(len(covariance)).to(covariance)
    return torch.cholesky_inverse(torch.linalg.cholesky(ridged))  # symmetric, as inv is to rounding only
