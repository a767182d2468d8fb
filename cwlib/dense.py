r"""The naive side of T4 and T5: fields, inner products and operators of small walks as dense matrices.

With a measure :math:`\pi` and fibre metrics :math:`G_i`, fields carry :math:`\langle X, Y\rangle = X^TMY`,
:math:`M = blockdiag(\pi_iG_i)`. Everything here is a sum over edges or a dense matrix, to be compared with what the
package computes without either.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from cwlib._types import Field, Walk
from cwlib.checks import Check, compare, relative_residual
from cwlib.edges import EdgeWalk, Frames
from cwlib.measures import Measure
from cwlib.synthetic import conditioned_walk, generator, random_measure, random_metrics

F64 = torch.float64
Blocks = Float[Tensor, "dst src d_model d_model"]
Dense = Float[Tensor, "dst_fibre src_fibre"]


def normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers of a seed, apart from those of walks of the same seed, float64."""
    return torch.randn(*shape, dtype=F64, generator=generator(seed + 7919))


@dataclass(frozen=True, eq=False)
class Space:
    r"""Fields of small size with the inner product of a measure and fibre metrics.

    Parameters
    ----------
    seed : int
        Of the walks and fields drawn on it.
    measure : Float[Tensor, "token"]
        :math:`\pi > 0`.
    metrics : Float[Tensor, "token d_model d_model"]
        :math:`G_i`, symmetric positive definite.
    """

    seed: int
    measure: Measure
    metrics: Frames

    @classmethod
    def drawn(cls, seed: int) -> "Space":
        """3 to 7 tokens of 2 to 4 dimensions with a random measure and random metrics."""
        tokens, d_model = 3 + seed % 5, 2 + seed % 3
        return cls(seed, random_measure(seed, tokens), random_metrics(seed + 1, tokens, d_model))

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.metrics.shape[0]

    @property
    def d_model(self) -> int:
        """Dimension of a fibre."""
        return self.metrics.shape[1]

    @cached_property
    def m(self) -> Dense:
        """M, dense."""
        return torch.block_diag(*(self.measure[:, None, None] * self.metrics))

    @cached_property
    def roots(self) -> Frames:
        """G_i^1/2: the coordinates in which `cwlib.laplacian.in_metric` puts a field."""
        values, vectors = torch.linalg.eigh(self.metrics)
        return (vectors * values.sqrt()[:, None, :]) @ vectors.mT

    @cached_property
    def frames(self) -> Frames:
        """G_i^-1/2, whose columns are orthonormal in the metric of token i."""
        return torch.linalg.inv(self.roots)

    def walk(self, **switches: bool | float) -> EdgeWalk:
        """A walk that meets the conditions of T4 but for those switched off; see `conditioned_walk`."""
        return conditioned_walk(self.seed, self.measure, self.d_model, self.metrics, **switches)

    def field(self, shift: int = 0) -> Field:
        """A random field."""
        return normal(self.seed + shift, self.tokens, self.d_model)

    def inner(self, left: Field, right: Field) -> Float[Tensor, ""]:
        r""":math:`\langle X, Y\rangle = \sum_i\pi_i x_i^TG_iy_i`."""
        return torch.einsum("i,ia,iab,ib->", self.measure, left, self.metrics, right)

    def flow(self, walk: EdgeWalk) -> Walk:
        r""":math:`f_{ij} = \pi_iW_{ij}`."""
        return self.measure[:, None] * walk.effective_walk()

    def edge_flow(self, walk: EdgeWalk) -> Float[Tensor, "edge 1 1"]:
        """The same per edge, to be multiplied with matrices."""
        return (self.measure[walk.dst] * walk.weight)[:, None, None]

    def pulled_back(self, walk: EdgeWalk) -> Float[Tensor, "edge d_model d_model"]:
        r""":math:`\Omega_{ij}^TG_i\Omega_{ij}`, edge by edge."""
        return walk.maps.mT @ self.metrics[walk.dst] @ walk.maps

    def energy(self, walk: EdgeWalk, field: Field) -> Float[Tensor, ""]:
        r""":math:`\frac12\sum_{ij}\pi_iW_{ij}|x_i - \Omega_{ij}x_j|^2_{G_i}`."""
        steps = field[walk.dst] - torch.einsum("eab,eb->ea", walk.maps, field[walk.src])
        lengths = torch.einsum("ea,eab,eb->e", steps, self.metrics[walk.dst], steps)
        return (self.measure[walk.dst] * walk.weight * lengths).sum() / 2

    def energy_form(self, walk: EdgeWalk) -> Dense:
        """The symmetric matrix E of the energy X^T E X."""
        steps = incidence(walk)
        return (steps.mT @ (self.edge_flow(walk) * self.metrics[walk.dst]) @ steps).sum(0) / 2

    def arriving(self, walk: EdgeWalk) -> Frames:
        r""":math:`\sum_i\pi_iW_{ij}\Omega_{ij}^TG_i\Omega_{ij}` of every source j: metric balance makes it pi_j G_j."""
        pulled = self.edge_flow(walk) * self.pulled_back(walk)
        return torch.zeros_like(self.metrics).index_add(0, walk.src, pulled)

    def adjoint(self, operator: Dense) -> Dense:
        r""":math:`K^* = M^{-1}K^TM`."""
        return torch.linalg.solve(self.m, operator.T @ self.m)

    def square(self, operator: Dense) -> Float[Tensor, ""]:
        r""":math:`|K|_M^2 = tr(K^*K)`."""
        return (self.adjoint(operator) * operator.T).sum()


def blocks(walk: EdgeWalk) -> Blocks:
    r""":math:`K_{ij} = W_{ij}\Omega_{ij}`, zero where there is no edge."""
    result = torch.zeros(walk.tokens, walk.tokens, walk.d_model, walk.d_model, dtype=F64)
    for i, j, weight, omega in zip(walk.dst, walk.src, walk.weight, walk.maps, strict=True):
        result[i, j] = weight * omega
    return result


def assembled(parts: Blocks) -> Dense:
    """Blocks as one matrix."""
    return parts.transpose(1, 2).reshape(parts.shape[0] * parts.shape[2], -1)


def taken_apart(dense: Dense, d_model: int) -> Blocks:
    """One matrix as blocks."""
    return dense.unflatten(1, (-1, d_model)).unflatten(0, (-1, d_model)).transpose(1, 2)


def laplacian(walk: EdgeWalk) -> Dense:
    """The generator L = I - K."""
    dense = assembled(blocks(walk))
    return torch.eye(len(dense), dtype=F64) - dense


def incidence(walk: EdgeWalk) -> Float[Tensor, "edge d_model fibre"]:
    r"""The matrices :math:`X \mapsto x_i - \Omega_{ij}x_j`, one per edge."""
    here = torch.arange(len(walk.weight))
    steps = torch.zeros(len(here), walk.d_model, walk.tokens, walk.d_model, dtype=F64)
    steps[here, :, walk.dst] += torch.eye(walk.d_model, dtype=F64)
    steps[here, :, walk.src] -= walk.maps
    return steps.flatten(2)


def null_projector(matrix: Float[Tensor, "row column"]) -> Float[Tensor, "column column"]:
    """The orthogonal projector on the null space: singular values below 1e-9 of the largest."""
    _, values, rows = torch.linalg.svd(matrix)
    null = rows[int((values > 1e-9 * values[0]).sum()) :]
    return null.T @ null


def span_projector(columns: Float[Tensor, "row column"]) -> Float[Tensor, "row row"]:
    """The orthogonal projector on the span of independent columns."""
    basis = torch.linalg.qr(columns).Q
    return basis @ basis.T


def self_adjoint(name: str, operator: Dense, m: Dense, holds: bool = True) -> Check:
    """Whether L is self-adjoint in the inner product M, as far as M L is symmetric."""
    return compare(name, ("M L", m @ operator), ("(M L)^T", (m @ operator).T), holds=holds)


def spectrum_within(name: str, operator: Dense, low: float, high: float, where: str, holds: bool = True) -> Check:
    """Whether all eigenvalues are real and in an interval: the largest distance from it in the complex plane."""
    values = torch.linalg.eigvals(operator)
    distance = float((values - values.real.clamp(low, high)).abs().max())
    return Check(name, "eigenvalues", f"themselves, moved into {where}", distance, 1e-10 if holds else 1e-2, holds)


def spectra_agree(name: str, lhs: tuple[str, Tensor], rhs: tuple[str, Tensor]) -> Check:
    """Whether two lists of eigenvalues agree with multiplicities, matched as closely as they can be."""
    left, right = (side[1].to(torch.complex128).flatten() for side in (lhs, rhs))
    match = linear_sum_assignment((left[:, None] - right[None, :]).abs().numpy())[1]
    residual = relative_residual(torch.view_as_real(left), torch.view_as_real(right[torch.as_tensor(match)]))
    return Check(name, lhs[0], rhs[0], residual, 1e-10)
