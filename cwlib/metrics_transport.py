"""Quantities of the transports: isometry, symmetry, and holonomy, of maps and on data."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from cwlib._types import Field
from cwlib.blocks import gates
from cwlib.cores import HeadTransports
from cwlib.synthetic import generator
from cwlib.walk import ConnectionWalk

RELATIVE_RANKS = np.round(np.linspace(0, 1, 21), 2)  #: where the singular spectrum is reported
TRIANGLES = 256  #: triangles sampled per layer for the holonomy defect


def head_isometry(transports: HeadTransports) -> Float[Tensor, " head"]:
    r"""Isometry of each head on its d_head-dimensional support, :math:`(\sum s^2)^2/(r\sum s^4)` in (0, 1] (T7)."""
    squares = transports.singular_values() ** 2
    return squares.sum(1) ** 2 / (squares.shape[1] * (squares**2).sum(1))


def singular_spectrum(transports: HeadTransports) -> Float[np.ndarray, " rank"]:
    """Singular values over their root mean square, by relative rank (0: largest, 1: smallest); mean over heads.

    A scaled partial isometry has 1 everywhere; a Gaussian map of the same shape has a spread that depends on
    d_head / d_model only. NaN if all heads vanish.
    """
    values = transports.singular_values()
    size = (values**2).mean(1, keepdim=True).sqrt()
    relative = (values / size)[size[:, 0] > 0].cpu().numpy()
    if not len(relative):
        return np.full(len(RELATIVE_RANKS), np.nan)
    ranks = np.linspace(0, 1, relative.shape[1]) if relative.shape[1] > 1 else np.zeros(1)
    return np.mean([np.interp(RELATIVE_RANKS, ranks, head) for head in relative], axis=0)


def sum_isometry(transports: HeadTransports) -> float:
    r"""Isometry of :math:`T = \sum_h T_h` on its rank bound min(d_model, n_kv d_head), in (0, 1] (T7)."""
    # from singular values of the sum itself: where heads cancel, sums over pairs of heads would lose all digits
    squares = transports.total().singular_values()[0] ** 2
    return float(squares.sum() ** 2 / (squares.numel() * (squares**2).sum()))


def edge_isometry(walk: ConnectionWalk) -> float:
    r"""Isometry of the transports :math:`\Omega_{ij}` of all edges, averaged with weights W_ij, in (0, 1] (T7, T9).

    Each is :math:`(\sum s^2)^2/(r\sum s^4)` with r the rank bound of all heads that have any attention on the edge.
    So it is near one only if the heads act evenly: an edge that is carried almost wholly by one isometric head of H
    has isometry near 1/H. Compare it with the Gaussian null, which keeps the attention.
    """
    isometry, weight = walk.edge_isometry(), walk.effective_walk("mean")
    defined = ~isometry.isnan()
    return float((isometry * weight)[defined].sum() / weight[defined].sum())


def symmetry(transports: HeadTransports) -> float:
    r""":math:`|sym\,T|_F^2/|T|_F^2 = \frac12 + tr(T^2)/(2|T|_F^2)` in [0, 1]; near 1/2 for a random matrix."""
    total = transports.total()
    return float((1 + total.product_traces / total.head_gram) / 2)


def identity_alignment(transports: HeadTransports) -> float:
    r""":math:`tr\,T / (\sqrt d\,|T|_F)` in [-1, 1]: the cosine between T and the identity."""
    total = transports.total()
    return float((total.traces() / (total.d_model * total.head_gram[0]).sqrt()).clamp(-1, 1))


def norm_cv(transports: HeadTransports, field: Field) -> float:
    r"""Coefficient of variation (std/mean) over tokens of :math:`|T x_i|/|x_i|`, >= 0; zero for a scaled isometry."""
    ratio = transports.total().apply(field)[0].norm(dim=1) / field.to(torch.float64).norm(dim=1)
    return float(ratio.std(correction=0) / ratio.mean())


def angle_correlation(transports: HeadTransports, field: Field) -> float:
    r"""Pearson correlation of the cosines of token pairs before and after T, in [-1, 1]; NaN below 3 tokens."""
    cosines = []
    for vectors in (field.detach().to(torch.float64), transports.total().apply(field)[0]):
        unit = torch.nn.functional.normalize(vectors, dim=1)
        cosines.append((unit @ unit.T)[tuple(torch.triu_indices(len(unit), len(unit), 1))].cpu().numpy())
    with np.errstate(invalid="ignore"):  # NaN where T vanishes
        return float(np.corrcoef(*cosines)[0, 1]) if len(cosines[0]) > 2 else np.nan


def sample_triangles(walk: ConnectionWalk, seed: int = 0, count: int = TRIANGLES) -> Int[Tensor, "triangle 3"]:
    """Seeded transitive triangles (i, j, k) whose edges j -> i, k -> j and k -> i all carry weight.

    Under causal attention i > j > k. At most ``count`` rows; fewer, or none, on a short or sparse support.
    """
    if walk.n_dst != walk.n_src:
        raise ValueError(f"walk: expected as many destinations as sources, got {walk.n_dst} and {walk.n_src}")
    triples = torch.randint(walk.n_dst, (64 * count, 3), generator=generator(seed))
    if walk.is_causal:
        triples = triples.sort(1, descending=True).values
    i, j, k = triples.T
    support = walk.support.cpu()
    valid = (i != j) & (j != k) & (i != k) & support[i, j] & support[j, k] & support[i, k]
    return triples[valid][:count]


def holonomy_defect(walk: ConnectionWalk, triangles: Int[Tensor, "triangle 3"] | None = None) -> float:
    r"""Mean over triangles of
    :math:`1 - |\langle\Omega_{ij}\Omega_{jk}, \Omega_{ik}\rangle|/(|\Omega_{ij}\Omega_{jk}||\Omega_{ik}|)` (T8).

    In [0, 1], over sampled triangles (i, j, k); zero if transport along the two edges agrees with the direct one up to
    scale, as for a flat connection. NaN if there is no triangle.
    """
    triangles = sample_triangles(walk) if triangles is None else triangles
    if len(triangles) == 0:
        return np.nan
    i, j, k = triangles.T
    first, second, direct = (gates(walk.attention[:, None, dst, src])[:, 0] for dst, src in ((i, j), (j, k), (i, k)))
    cubic, quartic = walk.transports.triangle_forms
    path = torch.einsum("ht,lt->hlt", first, second).flatten(0, 1)
    inner = ((cubic.flatten(0, 1).T @ path) * direct).sum(0)
    # quartic is indexed [h, h', l, l']; the pairing of path (h, l) with path (h', l') needs [h, l, h', l'].
    pairing = quartic.permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)
    composed = (path * (pairing @ path)).sum(0)
    straight = (direct * (walk.transports.head_gram @ direct)).sum(0)
    return max(float(1 - (inner.abs() / (composed * straight).sqrt()).mean()), 0.0)
