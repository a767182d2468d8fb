r"""Spectra of walks too large to write down: a matrix-free operator, extreme eigenvalues, spectral density.

The operator is :math:`B = M^{1/2} K M^{-1/2}`, K in coordinates :math:`y_i = \sqrt{\pi_i}\,x_i` in which the inner
product of :math:`l^2(\pi)` is the ordinary one and the adjoint is the transpose. One application costs two projections
and the attention of a layer, about one forward pass; the dense K of a GPT-2-small layer on 128 tokens has 9.7e9
entries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from scipy.sparse import diags_array
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, aslinearoperator, eigsh
from torch import Tensor

from cwlib.laplacian import AnyWalk, measure_and_flow
from cwlib.measures import Measure, require_fraction
from cwlib.walk import ConnectionWalk

Array = np.ndarray


class WalkOperator(LinearOperator):
    r"""P of an attention layer as a scipy operator on :math:`\mathbb R^{nd}`, in orthonormal coordinates of l2(pi).

    ``matvec`` applies :math:`B = \Pi^{1/2}K\Pi^{-1/2}`, ``rmatvec`` its transpose, which is the adjoint
    :math:`P^* = M^{-1}K^TM` in these coordinates; ``matmat`` takes many fields at once.

    Parameters
    ----------
    walk : ConnectionWalk
        A layer with as many destinations as sources; biases (its constant section) play no part.
    measure : Float[Tensor, "token"], optional
        Positive weights of tokens; by default the one that `cwlib.measures.choose_measure` names.

    Raises
    ------
    ValueError
        If there are not as many destinations as sources, or the measure is not positive.
    """

    def __init__(self, walk: ConnectionWalk, measure: Measure | None = None) -> None:
        if not isinstance(walk, ConnectionWalk):
            raise ValueError(f"walk: expected a ConnectionWalk, got {type(walk).__name__}; use walk_operator")
        root = measure_and_flow(walk, measure)[0].sqrt()
        self.n, self.d, transports = walk.n_dst, walk.d_model, walk.transports
        super().__init__(np.dtype("float64"), (self.n * self.d,) * 2)
        scaled = walk.attention.detach().to(torch.float64) * (root[:, None] / root[None, :])
        # One product per value head: its query heads are stacked along the rows of their attention.
        self._kv, self._groups, self._width = transports.kv_heads, transports.groups, transports.d_head
        self._attention = scaled.reshape(self._kv, self._groups * self.n, self.n)
        self._value = transports._v.reshape(-1, self.d)
        self._output = transports._o.transpose(1, 2).reshape(-1, self.d)

    def _matmat(self, columns: Array) -> Array:
        values = self._fields(columns) @ self._value.T  # (p n, kv_head d_head)
        mixed = self._attention @ self._split(values, self._kv)
        return self._columns(self._join(mixed.reshape(self._kv * self._groups, self.n, -1)) @ self._output)

    def _rmatmat(self, columns: Array) -> Array:
        heads = self._fields(columns) @ self._output.T  # (p n, head d_head)
        stacked = self._split(heads, self._kv * self._groups).reshape(self._kv, self._groups * self.n, -1)
        return self._columns(self._join(self._attention.transpose(1, 2) @ stacked) @ self._value)

    def _rmatvec(self, vector: Array) -> Array:
        return self._rmatmat(vector.reshape(-1, 1))

    def _fields(self, columns: Array) -> Tensor:
        """(n d, p) numbers as p fields below each other, one token per row."""
        fields = torch.from_numpy(np.ascontiguousarray(columns.T)).reshape(-1, self.d)
        return fields.to(self._value)

    def _columns(self, fields: Tensor) -> Array:
        return fields.reshape(-1, self.n * self.d).T.cpu().numpy()

    def _split(self, rows: Tensor, heads: int) -> Tensor:
        """(p n, head d_head) to (head, n, p d_head)."""
        return rows.reshape(-1, self.n, heads, self._width).permute(2, 1, 0, 3).reshape(heads, self.n, -1)

    def _join(self, heads: Tensor) -> Tensor:
        """(head, n, p d_head) to (p n, head d_head)."""
        fields = heads.reshape(len(heads), self.n, -1, self._width).permute(2, 1, 0, 3)
        return fields.reshape(-1, len(heads) * self._width)


def walk_operator(walk: AnyWalk, measure: Measure | None = None) -> LinearOperator:
    """P of any walk as an operator in orthonormal coordinates of l2(pi); see `WalkOperator`."""
    if isinstance(walk, ConnectionWalk):
        return WalkOperator(walk, measure)
    root = measure_and_flow(walk, measure)[0].sqrt().repeat_interleave(walk.d_model).cpu().numpy()
    return aslinearoperator(diags_array(root) @ walk.sparse() @ diags_array(1 / root))


def generator(operator: LinearOperator) -> LinearOperator:
    r"""The generator :math:`L = I - P` of a walk operator."""
    return _identity(operator) - operator


def lazy(operator: LinearOperator, stay: float = 0.5) -> LinearOperator:
    r"""The lazy step :math:`(1-a)P + aI`; at a = 1/2 half a residual step, :math:`\frac12(X + PX)` (T4 g)."""
    require_fraction("stay", stay)
    return (1 - stay) * operator + stay * _identity(operator)


def additive(operator: LinearOperator) -> LinearOperator:
    r"""Additive reversibilisation :math:`\frac12(P + P^*)`, the nearest self-adjoint operator in the M-norm (T5)."""
    _require_square(operator)
    return 0.5 * (operator + operator.T)


def multiplicative(operator: LinearOperator) -> LinearOperator:
    r"""Multiplicative reversibilisation :math:`P^*P`: self-adjoint, its eigenvalues squares of P's singular values."""
    _require_square(operator)
    return operator.T @ operator


def _require_square(operator: LinearOperator) -> int:
    """The size of an operator from a space to itself."""
    if not isinstance(operator, LinearOperator) or operator.shape[0] != operator.shape[1]:
        got = f"{type(operator).__name__} of shape {getattr(operator, 'shape', None)}"
        raise ValueError(f"operator: expected a square LinearOperator, got {got}; aslinearoperator wraps a matrix")
    return operator.shape[0]


def _identity(operator: LinearOperator) -> LinearOperator:
    _require_square(operator)
    same = np.array
    return LinearOperator(operator.shape, dtype=operator.dtype, matvec=same, rmatvec=same, matmat=same, rmatmat=same)


def _require_self_adjoint(operator: LinearOperator, seed: int) -> int:
    """The size of a self-adjoint operator; refuses others, whose Lanczos iteration gives numbers without meaning."""
    size = _require_square(operator)
    fields = np.random.default_rng(seed + 1).standard_normal((size, 2))
    images = operator.matmat(fields)
    if not np.isfinite(images).all():
        raise ValueError("operator: expected finite products with fields, got NaN or infinity")
    images = images / max(np.abs(images).max(), np.finfo(float).tiny)
    there, back = fields[:, 0] @ images[:, 1], images[:, 0] @ fields[:, 1]
    if abs(there - back) > 1e-8 * np.linalg.norm(images) * size**0.5:
        raise ValueError(
            f"operator: expected a self-adjoint one, got <u, Sv> : <Su, v> = {there:.6g} : {back:.6g} for random "
            "fields; take additive(operator), or multiplicative(operator)"
        )
    return size


def extreme_eigenvalues(
    operator: LinearOperator, count: int = 6, which: str = "LA", vectors: bool = False, seed: int = 0
) -> Array | tuple[Array, Array]:
    """Extreme eigenvalues of a self-adjoint operator, ascending, by ARPACK's Lanczos iteration.

    Parameters
    ----------
    operator : LinearOperator
        Self-adjoint, such as `additive` of a walk operator or the `generator` of that.
    count : int
        How many.
    which : {"LA", "SA", "LM"}
        The largest, the smallest, or the largest in magnitude.
    vectors : bool
        Also return eigenvectors as columns (coordinates of `WalkOperator`).
    seed : int
        Of the first vector.

    Raises
    ------
    ValueError
        If the operator is not self-adjoint, ``count`` is not between 1 and its size less one, ``which`` is unknown, or
        the iteration does not converge.
    """
    size = _require_self_adjoint(operator, seed)
    if not isinstance(count, int) or not 1 <= count < size or which not in ("LA", "SA", "LM"):
        raise ValueError(
            f"count, which: expected 1 <= count < {size} and LA, SA or LM, got {count!r} and {which!r}; to_dense() "
            "gives numpy the whole spectrum of a small walk"
        )
    start = np.random.default_rng(seed).standard_normal(size)
    if not operator.matvec(start).any():  # ARPACK takes a zero operator for a failure
        values, columns = np.zeros(count), np.eye(size, count)
        return (values, columns) if vectors else values
    try:
        values, columns = eigsh(operator, count, which=which, v0=start, ncv=min(size, max(2 * count + 1, 40)))
    except ArpackNoConvergence as error:
        raise ValueError(
            f"operator: expected eigenvalues that iteration tells apart, got {len(error.eigenvalues)} of {count}; ask "
            "for fewer, for the other end, or for spectral_density"
        ) from error
    order = np.argsort(values)
    return (values[order], columns[:, order]) if vectors else values[order]


@dataclass(frozen=True)
class SpectralDensity:
    r"""Gauss quadratures of the spectral measure, one per probe (`spectral_density`).

    Attributes
    ----------
    nodes, weights : Float[ndarray, "probe step"]
        Each probe's measure puts ``weights`` (summing to one) on ``nodes``.
    coarse_nodes, coarse_weights : Float[ndarray, "probe fewer"]
        The same after two thirds of the steps, to see what the last third still changed.
    """

    nodes: Array
    weights: Array
    coarse_nodes: Array
    coarse_weights: Array

    def mean(self, function: Callable[[Array], Array]) -> tuple[float, float]:
        r""":math:`\frac1N\sum_k f(\lambda_k)` for a function of arrays, and its estimated error.

        The error (one standard deviation, itself rough from few probes) adds up, in squares, the standard error over
        probes and the change over the last third of steps.
        """
        value, error = self._estimate(lambda nodes: np.asarray(function(nodes))[None])
        return float(value[0]), float(error[0])

    def smooth(self, points: Sequence[float] | Array, width: float) -> tuple[Array, Array]:
        """The density at ``points`` smoothed by a Gaussian of standard deviation ``width``, and its estimated error."""
        points = _require_points(points)
        if not 0 < width < float("inf"):
            raise ValueError(f"width: expected a positive number, got {width!r}")

        def bumps(nodes: Array) -> Array:
            z = (points[:, None, None] - nodes) / width
            return np.exp(-(z**2) / 2) / (width * (2 * np.pi) ** 0.5)

        return self._estimate(bumps)

    def below(self, points: Sequence[float] | Array) -> tuple[Array, Array]:
        """The share of eigenvalues up to each of ``points`` (half of a node's weight at the node), and its error."""
        points = _require_points(points)
        return self._estimate(lambda nodes: np.heaviside(points[:, None, None] - nodes, 0.5))

    def _estimate(self, functions: Callable[[Array], Array]) -> tuple[Array, Array]:
        fine = (functions(self.nodes) * self.weights).sum(-1)
        coarse = (functions(self.coarse_nodes) * self.coarse_weights).sum(-1)
        spread = fine.std(1, ddof=1) / fine.shape[1] ** 0.5
        return fine.mean(1), np.hypot(spread, np.abs(fine.mean(1) - coarse.mean(1)))


def _require_points(points: Sequence[float] | Array) -> Array:
    points = np.asarray(points, dtype=float)
    if points.ndim != 1 or not np.isfinite(points).all():
        raise ValueError(f"points: expected a vector of finite numbers, got shape {points.shape}")
    return points


def spectral_density(operator: LinearOperator, probes: int = 8, steps: int = 60, seed: int = 0) -> SpectralDensity:
    r"""Spectral density of a self-adjoint operator by stochastic Lanczos quadrature, with an error estimate.

    For a probe z of random signs, :math:`z^Tf(S)z/N` has the mean :math:`tr f(S)/N`; m Lanczos steps from z give the
    Gauss quadrature of its measure, exact for polynomials of degree below 2m (Golub and Meurant; Ubaru, Chen and Saad
    2017). All probes run side by side. No reorthogonalisation: lost orthogonality splits a node into several of the
    same total weight, which leaves the quadrature accurate.

    Parameters
    ----------
    operator : LinearOperator
        Self-adjoint, of size N.
    probes : int
        Random vectors, at least 2.
    steps : int
        Lanczos steps m, at least 3; two applications of a walk per step for its additive reversibilisation.
    seed : int
        Of the probes.

    Raises
    ------
    ValueError
        If the operator is not self-adjoint, or there are fewer than 2 probes or 3 steps.
    """
    if not isinstance(probes, int) or not isinstance(steps, int) or probes < 2 or steps < 3:
        raise ValueError(f"probes, steps: expected integers of at least 2 and 3, got {probes!r} and {steps!r}")
    size = _require_self_adjoint(operator, seed)
    steps = min(steps, size)
    current = np.random.default_rng(seed).choice([-1.0, 1.0], (size, probes)) / size**0.5
    previous, off = np.zeros_like(current), np.zeros(probes)
    diagonal, offdiagonal = np.zeros((probes, steps)), np.zeros((probes, steps))
    for k in range(steps):
        image = operator.matmat(current) - off * previous
        diagonal[:, k] = (current * image).sum(0)
        image = image - diagonal[:, k] * current
        off = np.linalg.norm(image, axis=0)
        # A probe whose Krylov space is exhausted has its exact measure already; the rest decouples at zero weight.
        off = np.where(off > 1e-12 * np.abs(diagonal).max(), off, 0.0)
        offdiagonal[:, k] = off
        previous, current = current, np.divide(image, off, out=np.zeros_like(image), where=off > 0)
    fewer = slice(0, max(1, 2 * steps // 3))
    return SpectralDensity(*_quadrature(diagonal, offdiagonal), *_quadrature(diagonal[:, fewer], offdiagonal[:, fewer]))


def _quadrature(diagonal: Array, offdiagonal: Array) -> tuple[Array, Array]:
    """Nodes and weights per probe: eigenvalues of the Jacobi matrix, squared first entries of its eigenvectors."""
    pairs = [eigh_tridiagonal(a, b[:-1]) for a, b in zip(diagonal, offdiagonal, strict=True)]
    return np.stack([values for values, _ in pairs]), np.stack([vectors[0] ** 2 for _, vectors in pairs])
