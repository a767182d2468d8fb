"""Seeded walks with prescribed properties, and the Gaussian null model."""

import numpy as np
import torch
from jaxtyping import Float
from scipy.spatial import KDTree
from torch import Tensor

from cwlib.cores import HeadTransports
from cwlib.edges import EdgeWalk, Frames
from cwlib.measures import Measure, require_measure
from cwlib.validation import require_finite
from cwlib.walk import ConnectionWalk


def generator(seed: int) -> torch.Generator:
    """A CPU generator of its own, so that no instance depends on global state."""
    return torch.Generator().manual_seed(seed)


def random_walk(
    seed: int,
    heads: int = 3,
    tokens: int = 6,
    d_model: int = 8,
    d_head: int = 3,
    groups: int = 1,
    causal: bool = False,
    sources: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> ConnectionWalk:
    """A walk with Gaussian value, output and attention logits.

    Parameters
    ----------
    seed : int
        Fixes every number.
    heads, tokens, d_model, d_head, groups : int
        Shape; ``groups`` query heads share a value head.
    causal : bool
        Whether token i attends to tokens j <= i only.
    sources : int, optional
        Number of source tokens (cross-attention); ``tokens`` by default.
    dtype : torch.dtype
        Precision of the tensors.
    """
    rng = generator(seed)
    logits = torch.randn(heads, tokens, sources or tokens, dtype=torch.float64, generator=rng) * 2
    if causal:
        future = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(future, -torch.inf)
    value = torch.randn(heads // groups, d_head, d_model, dtype=torch.float64, generator=rng) / d_model**0.5
    output = torch.randn(heads, d_model, d_head, dtype=torch.float64, generator=rng) / d_head**0.5
    return ConnectionWalk(logits.softmax(-1).to(dtype), value.to(dtype), output.to(dtype), groups=groups)


def dependent_walk(seed: int, heads: int = 4, rank: int = 2, tokens: int = 6, d_model: int = 8) -> ConnectionWalk:
    """A walk of ``heads`` heads whose operator Schmidt rank is exactly ``rank`` (T3).

    Only ``rank`` different attention matrices occur, so the attention family is linearly dependent.
    """
    base = random_walk(seed, heads=heads, tokens=tokens, d_model=d_model)
    index = torch.arange(heads) % rank
    return ConnectionWalk(base.attention[index], base.value, base.output)


def isometric_transports(seed: int, heads: int, d_model: int, scale: float = 1.0) -> HeadTransports:
    """Heads whose transports are ``scale`` times independent random orthogonal d_model x d_model matrices."""
    identity = torch.eye(d_model, dtype=torch.float64).expand(heads, -1, -1)
    return HeadTransports(identity, scale * random_orthogonal(seed, heads, d_model))


def gaussian_transports(like: HeadTransports, seed: int) -> HeadTransports:
    """The Gaussian null: value and output maps of the same shape with independent normal entries of mean zero.

    Products of Gaussian matrices with d_head << d_model are already close to isometries on their support, so a bare
    isometry number says nothing; this null is what it must be compared with. The entries have the root mean square of
    the layer's own, which matters to energy and mass only: no other metric of this package feels the scale.
    """
    rng = generator(seed)

    def resample(original: Tensor) -> Tensor:
        # drawn on the CPU, so that a seed means the same numbers on every device
        drawn = torch.randn(original.shape, dtype=torch.float64, generator=rng).to(original.device)
        return drawn * original.detach().to(torch.float64).square().mean().sqrt()

    return HeadTransports(resample(like.value), resample(like.output), like.groups)


def varied_shapes(seed: int) -> dict[str, int]:
    """A small random shape, so that checks do not all run at one size."""
    rng = generator(seed)
    heads = 2 * int(torch.randint(1, 4, (), generator=rng))
    return {
        "heads": heads,
        "tokens": int(torch.randint(2, 9, (), generator=rng)),
        "d_model": int(torch.randint(3, 13, (), generator=rng)),
        "d_head": int(torch.randint(1, 6, (), generator=rng)),
        "groups": 1 + seed % 2,
    }


def random_measure(seed: int, tokens: int) -> Measure:
    """A positive probability measure whose weights differ by a factor of up to four."""
    weights = 0.5 + 1.5 * torch.rand(tokens, dtype=torch.float64, generator=generator(seed))
    return weights / weights.sum()


def random_metrics(seed: int, tokens: int, d_model: int) -> Frames:
    """Symmetric positive definite fibre metrics with eigenvalues between 0.4 and 2.5, one per token."""
    rng = generator(seed)
    frames = random_orthogonal(seed + 1, tokens, d_model)
    values = 0.4 + 2.1 * torch.rand(tokens, 1, d_model, dtype=torch.float64, generator=rng)
    return (frames * values) @ frames.transpose(1, 2)


def random_orthogonal(seed: int, count: int, d_model: int) -> Frames:
    """Independent orthogonal matrices from the uniform (Haar) law on O(d): half of them are reflections."""
    drawn = torch.randn(count, d_model, d_model, dtype=torch.float64, generator=generator(seed))
    factors = torch.linalg.qr(drawn)
    # With a positive diagonal of R the factorisation is unique, and Q inherits the invariance of the Gaussian law.
    return factors.Q * factors.R.diagonal(dim1=1, dim2=2).sign()[:, None, :]


def conditioned_walk(
    seed: int,
    measure: Measure,
    d_model: int = 3,
    metrics: Frames | None = None,
    scale: float = 1.0,
    stochastic: bool = True,
    reversible: bool = True,
    isometric: bool = True,
    inverse: bool = True,
) -> EdgeWalk:
    r"""A walk on the complete graph that meets the conditions of T4, or breaks exactly those that are switched off.

    Parameters
    ----------
    seed : int
        Fixes weights and transports.
    measure : Float[Tensor, "token"]
        Positive :math:`\pi` of at least three tokens (a circulation needs a cycle).
    d_model : int
        Fibre dimension, at least 2 (in one dimension two isometries may agree by chance).
    metrics : Float[Tensor, "token d_model d_model"], optional
        Fibre metrics :math:`G_i`; the identity by default.
    scale : float
        Of all transports between different tokens, :math:`\Omega = sO` (T4 f).
    stochastic : bool
        (S) :math:`W1 = 1`. Off: flows are multiplied by a symmetric factor, so that (R) stays.
    reversible : bool
        (R) :math:`\pi_iW_{ij} = \pi_jW_{ji}`. Off: a circulation is added, so that :math:`\pi` stays stationary.
    isometric : bool
        (M), first half. Off: transports are stretched by 0.4 to 2.5, and :math:`\Omega_{ji} = \Omega_{ij}^{-1}` stays.
    inverse : bool
        (M), second half: :math:`\Omega_{ji} = \Omega_{ij}^{-1}`. Off: the way back is an isometry of its own.

    Raises
    ------
    ValueError
        If there are fewer than three tokens or two dimensions.
    """
    tokens, rng = len(measure), generator(seed)
    if tokens < 3 or d_model < 2:
        raise ValueError(f"measure, d_model: expected at least 3 tokens and 2 dimensions, got {tokens} and {d_model}")
    if not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale!r}")
    pi = require_measure(measure, tokens)
    flow = torch.rand(tokens, tokens, dtype=torch.float64, generator=rng).triu(1) * 0.8
    flow = (flow + flow.T + 0.2) * pi[:, None] * pi[None, :]
    flow.fill_diagonal_(0.0)
    flow *= 0.95 * (pi / flow.sum(1)).min()
    flow += torch.diag(pi - flow.sum(1))  # what does not leave stays: rows of the flow sum to pi
    if not reversible:
        here = torch.arange(tokens)
        onward = here.roll(-1)
        current = 0.9 * flow[onward, here].min()
        flow[here, onward] += current
        flow[onward, here] -= current
    if not stochastic:
        factor = 0.4 + 1.2 * torch.rand(tokens, dtype=torch.float64, generator=rng)
        flow *= factor[:, None] * factor[None, :]

    maps = random_orthogonal(seed + 1, tokens * tokens, d_model).reshape(tokens, tokens, d_model, d_model)
    if not isometric:
        stretch = random_metrics(seed + 2, tokens * tokens, d_model).reshape(maps.shape)
        maps = maps @ stretch
    first, second = torch.triu_indices(tokens, tokens, 1)
    if inverse:
        maps[second, first] = torch.linalg.inv(maps[first, second])
    maps = maps * scale
    maps[range(tokens), range(tokens)] = scale * torch.eye(d_model, dtype=torch.float64)
    walk = EdgeWalk.from_dense(flow / pi[:, None], maps)
    if metrics is None:
        return walk
    require_finite("metrics", metrics, 3, "token, d_model, d_model")
    values, vectors = torch.linalg.eigh(metrics.to(torch.float64))
    if (values <= 0).any():
        raise ValueError(f"metrics: expected positive definite matrices, got smallest eigenvalue {values.min():.3g}")
    return walk.change_frames((vectors / values.sqrt()[:, None, :]) @ vectors.transpose(1, 2))


def flat_walk(seed: int, measure: Measure, frames: Frames) -> EdgeWalk:
    r"""A reversible walk with the flat connection :math:`\Omega_{ij} = g_ig_j^{-1}` of given invertible frames (T8)."""
    base = conditioned_walk(seed, measure, frames.shape[-1])
    identity = torch.eye(frames.shape[-1], dtype=torch.float64).expand(base.maps.shape)
    return EdgeWalk(base.tokens, base.dst, base.src, base.weight, identity.clone()).change_frames(frames)


def cycle_walk(tokens: int, around: Float[Tensor, "d_model d_model"]) -> EdgeWalk:
    r"""The simple walk on a cycle of n >= 3 tokens, whose transport around it is a given invertible matrix (T8).

    All transports are the identity but that from token n-1 to token 0, which is ``around``, and its inverse on the way
    back. So the holonomy of the cycle [0, n-1, ..., 1] is ``around``.
    """
    require_finite("around", around, 2, "d_model, d_model")
    if tokens < 3 or around.shape[0] != around.shape[1] or torch.linalg.matrix_rank(around) < len(around):
        raise ValueError(
            "tokens, around: expected at least 3 tokens and an invertible square matrix, got "
            f"{tokens!r} and shape {tuple(around.shape)} of rank {int(torch.linalg.matrix_rank(around))}"
        )
    d_model = len(around)
    here = torch.arange(tokens)
    dst = torch.cat([here, here.roll(-1)])
    src = torch.cat([here.roll(-1), here])
    maps = torch.eye(d_model, dtype=torch.float64).repeat(2 * tokens, 1, 1)
    around = around.to(torch.float64)
    maps[(dst == 0) & (src == tokens - 1)] = around
    maps[(dst == tokens - 1) & (src == 0)] = torch.linalg.inv(around)
    return EdgeWalk(tokens, dst, src, torch.full((2 * tokens,), 0.5, dtype=torch.float64), maps)


def sphere_tangent_walk(points: int = 2000, seed: int = 0, radius: float = 0.4) -> tuple[EdgeWalk, Measure]:
    r"""Tangent vectors of the round sphere from a random sample, as in vector diffusion maps (Singer and Wu 2012).

    Points are drawn uniformly. Each point's frame is the leading plane of a weighted local PCA, the transport of an
    edge is the orthogonal matrix nearest to :math:`F_i^TF_j` (Procrustes), and weights :math:`e^{-5|x_i - x_j|^2/r^2}`
    within the radius are divided by both points' densities. The generator is a random-walk connection Laplacian; as the
    sample grows its low eigenvalues tend to those of the Bochner Laplacian on vector fields, :math:`l(l+1) - 1` with
    multiplicity 2(2l+1): 6, 10, 14, ...

    Returns
    -------
    EdgeWalk, Measure
        The walk (d_model = 2, no loops), and the measure in which it is reversible.
    """
    if points < 3 or not radius > 0:
        raise ValueError(
            f"points, radius: expected at least 3 points and a positive radius, got {points!r}, {radius!r}"
        )
    rng = np.random.default_rng(seed)
    position = rng.standard_normal((points, 3))
    position /= np.linalg.norm(position, axis=1, keepdims=True)
    pairs = KDTree(position).query_pairs(radius, output_type="ndarray")
    dst, src = np.concatenate([pairs, pairs[:, ::-1]]).T
    step = position[src] - position[dst]
    weight = np.exp(-5 * (step**2).sum(1) / radius**2)
    scatter = np.zeros((points, 3, 3))
    np.add.at(scatter, dst, weight[:, None, None] * step[:, :, None] * step[:, None, :])
    if (np.bincount(dst, minlength=points) < 2).any():
        raise ValueError(f"radius: expected at least two neighbours of every point, got fewer at radius {radius}")
    frames = np.linalg.eigh(scatter).eigenvectors[:, :, 1:]
    left, _, right = np.linalg.svd(frames[dst].transpose(0, 2, 1) @ frames[src])
    density = np.bincount(dst, weight, points)
    weight /= density[dst] * density[src]
    degree = np.bincount(dst, weight, points)
    walk = EdgeWalk(
        points,
        torch.from_numpy(dst.copy()),
        torch.from_numpy(src.copy()),
        torch.from_numpy(weight / degree[dst]),
        torch.from_numpy(left @ right),
    )
    return walk, torch.from_numpy(degree / degree.sum())
