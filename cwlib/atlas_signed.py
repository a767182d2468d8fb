"""Atlas: relatives of attention whose weights have signs, and how near a walk is to them."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from cwlib.atlas_kernels import Matrix, rank_excess
from cwlib.atlas_pair import Pair, Placed, fitted_slope, system
from cwlib.atlas_recurrent import norm_gauge
from cwlib.checks import Check, compare


def nearest_walk(weight: Matrix) -> Matrix:
    r"""A stochastic walk at the least total variation from signed weights: the positive part over its row sums.

    No walk is nearer to a row than :math:`\frac12(\sum_j W^-_{ij} + |\sum_j W^+_{ij} - 1|)`, which is reached. If rows
    sum to one that is the negative mass. A row without positive weights is equally far from every walk; it becomes
    uniform.
    """
    positive = weight.clamp_min(0)
    sums = positive.sum(-1, keepdim=True)
    return torch.where(sums > 0, positive / torch.where(sums > 0, sums, 1.0), 1 / weight.shape[-1])


def _to_nearest(name: str, weight: Matrix) -> tuple[Check, Check]:
    """That the distance to `nearest_walk` is the least there is, and that it is not zero."""
    distance = (weight - nearest_walk(weight)).abs().sum(-1) / 2
    least = (-weight.clamp_max(0).sum(-1) + (weight.clamp_min(0).sum(-1) - 1).abs()) / 2
    return (
        compare(
            f"{name}: the positive part over its sums is a nearest walk",
            *(("total variation", distance), ("(W^- 1 + |W^+ 1 - 1|) / 2", least)),
        ),
        Check(
            f"{name}: distance to the nearest walk", "mean total variation", "0", float(distance.mean()), 1e-2, False
        ),
    )


@system(
    name="Linformer",
    paper="2006.04768",
    walk=r"$W = \mathrm{softmax}(Q (E K)^\top / \sqrt{d})\, F,\ E, F: k \times n$",
    transport=r"$\Omega_{ij} = V$",
    remark="Projections along the length sign the weights; with F that averages (pooling), W is a walk of rank k.",
    fails=("nonnegative", "stochastic"),
)
def linformer(seed: int) -> Placed:
    """Keys and values projected along the length, before softmax over the k projected ones (Wang et al. 2020)."""
    tokens, width, rank = 8, 4, 3
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, width))
    w_q, w_k, w_v = rng.standard_normal((3, width, width)) / width**0.5
    shrink_k, shrink_v = rng.standard_normal((2, rank, tokens)) / rank**0.5
    keys = [sum(row[j] * (w_k @ x[j]) for j in range(tokens)) for row in shrink_k]
    values = [sum(row[j] * (w_v @ x[j]) for j in range(tokens)) for row in shrink_v]
    output = np.zeros((tokens, width))
    for i in range(tokens):
        weights = np.exp([w_q @ x[i] @ key / width**0.5 for key in keys])
        output[i] = sum(w * value for w, value in zip(weights / weights.sum(), values, strict=True))

    field, w_q, w_k, w_v, left, right = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v, shrink_k, shrink_v))
    attention = (field @ w_q.T @ w_k @ (left @ field).T / width**0.5).softmax(-1)
    weight = attention @ right
    pooled = attention @ right.softmax(-1)
    outside = pooled.clamp_max(0).abs().sum() + (pooled.sum(1) - 1).abs().sum()
    checks = (
        Check("Linformer: rank W <= k", "s_(k+1) / s_1", "0", rank_excess(weight, rank), 1e-12),
        Check(
            "Linformer: rows of F on the simplex make W a walk", "negative, missing mass", "0", float(outside), 1e-12
        ),
        *_to_nearest("Linformer", weight),
    )
    return Placed(Pair.constant(weight, w_v), field, torch.from_numpy(output), None, checks)


@system(
    name="Multi-linear attention",
    paper="1906.09777",
    walk=r"$W_{ik} = |K_{ik}|_F / \sqrt{d},\ K_{ik} = \sum_{jr} g_r\, q_{ir}\, k_{jr}\, O_{jk} V_r$",
    transport=r"$\Omega_{ik} = K_{ik} / W_{ik}$",
    remark="Weights have signs, so they move into transports: rows keep a mass, no sum of one, and blocks cancel.",
    fails=("stochastic",),
)
def multi_linear(seed: int) -> Placed:
    r"""The tensor :math:`A_{ijk} = \sum_r g_r q_{ir} k_{jr} v_{kr}`, averaged over blocks; O reads slices (Ma et al).

    There is no softmax. Blocks share Q, K, V and have diagonal cores, so that they amount to one with the mean core.
    The layer is linear in the values; what comes from token k is the third mode.
    """
    tokens, width, rank, count = 5, 4, 3, 2
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, width))
    w_q, w_k, w_v = rng.standard_normal((3, rank, width)) / width**0.5
    cores = rng.uniform(size=(count, rank))
    w_o = rng.standard_normal((width, tokens * tokens)) / tokens
    q, k, v = x @ w_q.T, x @ w_k.T, x @ w_v.T
    tensors = np.zeros((count, tokens, tokens, tokens))
    for b in range(count):
        for r in range(rank):
            tensors[b] += cores[b, r] * np.multiply.outer(np.outer(q[:, r], k[:, r]), v[:, r])
    tensor = tensors.mean(0)
    output = np.stack([w_o @ tensor[i].ravel() for i in range(tokens)])

    field, w_q, w_k, w_v, w_o = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v, w_o))
    core, read = torch.from_numpy(cores).mean(0), w_o.unflatten(1, (tokens, tokens))
    query, key, value = field @ w_q.T, field @ w_k.T, field @ w_v.T
    blocks = torch.einsum("r,ir,jr,djk,re->ikde", core, query, key, read, w_v)
    pair = norm_gauge(blocks)
    kept = torch.linalg.matrix_norm(blocks.sum(1)) / torch.linalg.matrix_norm(blocks).sum(1)
    summed = torch.from_numpy(tensor.sum(1))
    scores = query @ torch.stack([key, key.roll(1, 0)]).mT / rank**0.5  # other keys, same sum
    attended = scores.softmax(-1) @ value
    say = "Multi-linear attention: "
    checks = (
        compare(
            say + "the sum over its second mode sees the sum of keys alone",
            *(("sum_j A_ijk", summed), ("q_i diag(g sum_j k_j) v_k", query * core * key.sum(0) @ value.T)),
        ),
        compare(
            say + "scaled dot-product attention sees more than their sum",
            *(("softmax(Q K^T) V", attended[0]), ("keys exchanged", attended[1]), 1e-2, False),
        ),
        Check(
            say + "the blocks of a row cancel, which the norm gauge does not see",
            *("mean |sum_k K_ik| / sum_k |K_ik|", "1", float(1 - kept.mean()), 0.1, False),
        ),
    )
    return Placed(pair, field, torch.from_numpy(output), None, checks)


def _estimate(
    points: Float[Tensor, "token width"], frequencies: Float[Tensor, "*draw feature width"]
) -> Float[Tensor, "*draw dst src"]:
    r"""The kernel estimate :math:`\phi(p_i)^T\phi(p_j)`, the mean of :math:`\cos\omega^T(p_i - p_j)`."""
    kernel = (frequencies @ (points[:, None] - points).flatten(0, 1).T).cos().mean(-2)
    return kernel.unflatten(-1, (len(points), len(points)))


@system(
    name="Learned kernel",
    paper="2110.08323",
    walk=r"$W = D^{-1} \phi(Q) \phi(K)^\top,\ \phi = m^{-1/2} [\cos \omega x, \sin \omega x]$",
    transport=r"$\Omega_{ij} = V$",
    remark="Estimates oscillate, and so may a learned kernel; the nearest walk cuts the negative part off.",
    fails=("nonnegative",),
)
def learned_kernel(seed: int) -> Placed:
    """Linear attention with spectral features of a learned Gaussian mixture (Chowdhury et al. 2021, GMM-RKS).

    Queries are keys here: a token then has similarity one to itself, which keeps row sums away from zero.
    """
    tokens, width, components, each = 5, 8, 4, 16
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, width))
    w_q, w_v = rng.standard_normal((2, width, width)) / width**0.5
    mean, spread = rng.standard_normal((components, 1, width)), rng.uniform(0.4, 0.6, (components, 1, width))
    omega = (mean + spread * rng.standard_normal((components, each, width))).reshape(-1, width)

    def phi(point: np.ndarray) -> np.ndarray:
        return np.concatenate([np.cos(omega @ point), np.sin(omega @ point)]) / len(omega) ** 0.5

    state = sum(np.outer(phi(w_q @ token), w_v @ token) for token in x)
    normaliser = sum(phi(w_q @ token) for token in x)
    output = np.stack([phi(w_q @ token) @ state / (phi(w_q @ token) @ normaliser) for token in x])

    field, w_q, w_v, mean, spread = (torch.from_numpy(a) for a in (x, w_q, w_v, mean, spread))
    points = field @ w_q.T
    kernel = _estimate(points, torch.from_numpy(omega))
    weight = kernel / kernel.sum(1, keepdim=True)
    along = torch.linspace(0, 2, 200, dtype=torch.float64)[:, None, None] * mean[:, 0]  # differences along a mean
    exact = ((along @ mean[:, 0].T).cos() * (-(along**2) @ (spread[:, 0] ** 2).T / 2).exp()).mean(-1)
    counts = [64, 256, 1024]
    far = 4 * torch.from_numpy(rng.standard_normal((8, width)))  # where the Gaussian kernel is next to nothing

    def masses(place: Tensor, mean: Tensor, spread: Tensor) -> list[float]:
        """Mean negative part of estimates from m frequencies of a mixture."""
        shapes = [(64, len(mean), m // len(mean), width) for m in counts]
        drawn = [(mean + spread * torch.from_numpy(rng.standard_normal(shape))).flatten(1, 2) for shape in shapes]
        return [float(_estimate(place, each).clamp_max(0).abs().mean()) for each in drawn]

    series = {
        "mixture": masses(points, mean, spread),
        "Gaussian, far tokens": masses(far, *torch.tensor([0.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)),
    }
    slope = fitted_slope([float(m) for m in counts], series["Gaussian, far tokens"])
    say = "Learned kernel: "
    checks = (
        Check(
            say + "row sums stay away from zero", "1 / smallest", "<= 10", float(1 / kernel.sum(1).abs().min()), 10.0
        ),
        Check(
            say + "negative part of Gaussian estimates among far tokens falls like m^(-1/2)",
            *("fitted exponent over m", "-1/2", abs(slope + 0.5), 0.1),
        ),
        Check(
            say + "the kernel of a mixture is negative itself, somewhere along a mean",
            *("-smallest value", "0", float(-exact.min()), 1e-3, False),
        ),
        *_to_nearest("Learned kernel", weight),
    )
    curve = pd.concat(pd.DataFrame({"x": counts, "y": y, "series": name}) for name, y in series.items())
    return Placed(Pair.constant(weight, w_v), field, torch.from_numpy(output), None, checks, curve)
