r"""Holonomy: what transport around closed walks does to a vector, and the fields that transport leaves alone (T8).

Dense in d_model, for small walks and single cycles; the average over many triangles of an attention layer is
`cwlib.metrics.holonomy_defect`.
"""

import operator
from collections.abc import Sequence
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from cwlib.edges import EdgeWalk
from cwlib.laplacian import AnyWalk, Map, measure_and_flow
from cwlib.measures import Measure
from cwlib.walk import ConnectionWalk


def _require_tokens(walk: AnyWalk, name: str, tokens: Sequence[int]) -> list[int]:
    if walk.n_dst != walk.n_src:
        raise ValueError(f"walk: expected as many destinations as sources, got {walk.n_dst} and {walk.n_src}")
    try:
        indices = [operator.index(token) for token in tokens]
    except TypeError:
        raise ValueError(f"{name}: expected token indices, got {tokens!r}") from None
    if not indices:
        raise ValueError(f"{name}: expected at least one token, got none")
    for token in indices:
        if not 0 <= token < walk.n_src:
            raise ValueError(f"{name}: expected a token index below {walk.n_src} and not negative, got {token}")
    return indices


def _along(walk: AnyWalk, cycle: Sequence[int]) -> list[Map]:
    """Transports of a closed walk's steps."""
    cycle, support = _require_tokens(walk, "cycle", cycle), walk.support
    return [_one_way(walk, support, dst, src) for dst, src in zip(cycle, [*cycle[1:], cycle[0]], strict=True)]


def _one_way(walk: AnyWalk, support: Tensor, dst: int, src: int) -> Map:
    if support[dst, src]:
        return walk.transport(dst, src)
    if support[src, dst]:
        return walk.transport(src, dst).T  # no way back under causal attention: the adjoint takes its place (T8)
    raise ValueError(f"cycle, edge (dst={dst}, src={src}): expected W > 0, got 0 both ways; see walk.support")


def holonomy(walk: AnyWalk, cycle: Sequence[int]) -> Map:
    r"""Transport around a closed walk, :math:`\Omega_{c_0c_1}\Omega_{c_1c_2}\cdots\Omega_{c_{k-1}c_0}` (T8), dense.

    Where an edge carries no weight but its reverse does, the adjoint of the reverse is used.

    Parameters
    ----------
    walk : ConnectionWalk or EdgeWalk
        The walk.
    cycle : sequence of int
        Tokens :math:`c_0, \dots, c_{k-1}`; the way back to :math:`c_0` is added.

    Raises
    ------
    ValueError
        If the cycle is empty, or two of its neighbours are not joined by an edge.
    """
    return reduce(torch.matmul, _along(walk, cycle))


def cycle_defect(walk: AnyWalk, cycle: Sequence[int]) -> float:
    r"""Holonomy defect of a closed walk, :math:`\min_{s\ge0}|s\,Hol_c - \Pi_c|_F/|\Pi_c|_F` in [0, 1] (T8).

    :math:`\Pi_c` projects on the row space of the holonomy, of dimension the least rank that the cycle's edges allow
    (T7). Zero iff transport around the cycle is the identity there, up to scale. Errors as in `holonomy`; NaN if the
    holonomy vanishes.
    """
    around = holonomy(walk, cycle)
    if not around.any():
        return float("nan")
    # Of each transport, not of their product: on a long cycle its singular values fall over many orders of magnitude.
    rank = int(torch.linalg.matrix_rank(torch.stack(_along(walk, cycle))).min())
    rows = torch.linalg.svd(around).Vh[:rank]
    overlap = (around * (rows.T @ rows)).sum().clamp_min(0)
    return float((1 - overlap**2 / (rank * (around**2).sum())).clamp_min(0).sqrt())


def triangle_defect(walk: AnyWalk, dst: int, via: int, src: int) -> float:
    r"""Defect of the transitive triangle k -> j -> i (``src -> via -> dst``) against k -> i (T8), in [0, 1].

    :math:`1 - |\langle\Omega_{ij}\Omega_{jk}, \Omega_{ik}\rangle|/(|\Omega_{ij}\Omega_{jk}||\Omega_{ik}|)`; all three
    edges must carry weight. `cwlib.metrics.holonomy_defect` averages it over many triangles without forming a
    transport.
    """
    _require_tokens(walk, "dst, via, src", (dst, via, src))
    path = walk.transport(dst, via) @ walk.transport(via, src)
    direct = walk.transport(dst, src)
    return float((1 - (path * direct).sum().abs() / (path.norm() * direct.norm())).clamp_min(0))


def parallel_fields(
    walk: AnyWalk, measure: Measure | None = None, tolerance: float = 1e-8
) -> Float[Tensor, "field token d"]:
    r"""An orthonormal basis, in :math:`l^2(\pi)`, of the parallel fields :math:`x_i = \Omega_{ij}x_j` (T4 c, T8).

    The null space of the Dirichlet form; dense, so for small walks. Its dimension is d_model per connected component if
    the connection is flat, and less otherwise.

    Parameters
    ----------
    walk, measure
        As in `laplacian_defect`.
    tolerance : float
        Energy over size, up to which a field counts as parallel.

    Raises
    ------
    ValueError
        If n * d_model exceeds 4096; `cwlib.spectra.extreme_eigenvalues` finds the bottom of larger spectra.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance: expected a nonnegative number, got {tolerance!r}")
    size = walk.n_src * walk.d_model
    if size > 4096:
        raise ValueError(
            f"walk: expected n * d_model of at most 4096, got {size}; see cwlib.spectra.extreme_eigenvalues"
        )
    measure, flow = measure_and_flow(walk, measure)
    weight = measure.repeat_interleave(walk.d_model)
    dense = walk.to_dense()
    edges = EdgeWalk.from_walk(walk) if isinstance(walk, ConnectionWalk) else walk
    metrics = edges.blocks._gather(flow, edges.maps.transpose(1, 2) @ edges.maps)
    arriving = torch.block_diag(*metrics)
    leaving = torch.diag(flow.sum(1).repeat_interleave(walk.d_model))
    crossed = weight[:, None] * dense
    form = (leaving + arriving - crossed - crossed.T) / 2
    scale = weight.rsqrt()
    values, vectors = torch.linalg.eigh(scale[:, None] * form * scale[None, :])
    found = vectors[:, values <= tolerance].T * scale
    return found.reshape(-1, walk.n_src, walk.d_model)
