"""Atlas: systems that run as recurrences along the tokens. Each is causal, and a state carries all that passes a token.

Unrolled, a recurrence is a triangle of blocks; what its gates do decides whether these are a walk's.
"""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from cwlib.atlas_kernels import Matrix, rank_excess
from cwlib.atlas_pair import Maps, Pair, Placed, system
from cwlib.checks import Check, compare

Channels = Float[Tensor, "dst src channel"]


def causal_rank_excess(matrix: Matrix, rank: int) -> float:
    r"""Largest `rank_excess` of the blocks :math:`W_{i:,\,:i}` from tokens up to i to tokens from i on, in [0, 1].

    Zero iff the causal matrix is semiseparable of that rank: all that passes token i fits a state of that size.
    """
    return max(rank_excess(matrix[token:, : token + 1], rank) for token in range(len(matrix)))


def norm_gauge(blocks: Maps) -> Pair:
    r"""The pair of an operator in the norm gauge (T2): :math:`W_{ij} = |K_{ij}|_F/\sqrt d`, signs in the transports."""
    weight = torch.linalg.matrix_norm(blocks) / blocks.shape[-1] ** 0.5
    return Pair(weight, blocks / torch.where(weight > 0, weight, 1.0)[..., None, None])


@system(
    name="Linear attention",
    paper="2006.16236",
    walk=r"$W_{ij} \propto \phi(q_i)^\top \phi(k_j),\ j \leq i,\ \phi = \mathrm{elu} + 1$",
    transport=r"$\Omega_{ij} = V$",
    remark="The causal mask lifts W to full rank, but all that passes a token passes a state of d features.",
)
def linear_attention(seed: int) -> Placed:
    """Causal linear attention as a recurrence over the states S and z (Katharopoulos et al. 2020, section 3.4)."""
    tokens, width, d_key = 8, 4, 3
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, width))
    w_q, w_k = rng.standard_normal((2, d_key, width)) / width**0.5
    w_v = rng.standard_normal((width, width)) / width**0.5

    def phi(point: np.ndarray) -> np.ndarray:
        return np.where(point > 0, point + 1, np.exp(point))

    state, normaliser, output = np.zeros((d_key, width)), np.zeros(d_key), []
    for each in x:
        feature = phi(w_k @ each)
        state, normaliser = state + np.outer(feature, w_v @ each), normaliser + feature
        asked = phi(w_q @ each)
        output.append(asked @ state / (asked @ normaliser))

    field, w_q, w_k, w_v = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    query, key = (torch.nn.functional.elu(field @ w.T) + 1 for w in (w_q, w_k))
    kernel = query @ key.T
    weight = kernel.tril() / kernel.tril().sum(1, keepdim=True)
    say = "Linear attention: "
    checks = (
        Check(say + "rank W <= d without the mask", "s_(d+1) / s_1", "0", rank_excess(kernel, d_key), 1e-12),
        Check(say + "rank W > d with it", "s_(d+1) / s_1", "0", rank_excess(weight, d_key), 1e-2, False),
        Check(say + "rank of past -> future <= d", "s_(d+1) / s_1", "0", causal_rank_excess(weight, d_key), 1e-12),
    )
    return Placed(Pair.constant(weight, w_v), field, torch.from_numpy(np.stack(output)), None, checks)


@system(
    name="Retention",
    paper="2307.08621",
    walk=r"$W_{i \geq j} = \mathrm{Re}\, q_i (\gamma e^{\mathrm{i}\theta})^{i-j} \bar{k}_j/\sqrt{d}$",
    transport=r"$\Omega_{ij} = V$",
    remark="GroupNorm forgets the mass of a row, so only signs part it from a walk: linear attention with decay.",
    fails=("nonnegative", "stochastic"),
)
def retention(seed: int) -> Placed:
    """One head of retention as the recurrence S_n = gamma S_(n-1) + K_n^T V_n, with rotations (Sun et al. 2023)."""
    tokens, width, d_key, gamma = 6, 4, 2, 1 - 2**-5
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, width))
    w_q, w_k = rng.standard_normal((2, d_key, width)) / width**0.5
    w_v = rng.standard_normal((width, width)) / width**0.5
    angles = 1 / (1 + np.arange(d_key // 2))  # coordinates turn in pairs: complex numbers

    state, output = np.zeros((d_key // 2, width), dtype=complex), np.empty((tokens, width))
    for n in range(tokens):
        q, k = ((w @ x[n]).reshape(-1, 2) @ np.array([1, 1j]) * np.exp(1j * n * angles) for w in (w_q, w_k))
        state = gamma * state + np.outer(k.conj(), w_v @ x[n])
        output[n] = (q @ state).real / d_key**0.5

    field, w_q, w_k, w_v, angles = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v, angles))
    query, key = ((field @ w.T).unflatten(1, (-1, 2)) for w in (w_q, w_k))
    lag = torch.arange(tokens, dtype=torch.float64)[:, None] - torch.arange(tokens)
    even = torch.einsum("ica,jca->ijc", query, key)
    odd = torch.einsum("ic,jc->ijc", query[..., 1], key[..., 0])
    odd = odd - torch.einsum("ic,jc->ijc", query[..., 0], key[..., 1])
    turn = lag[..., None] * angles
    weight = (gamma**lag * (even * turn.cos() - odd * turn.sin()).sum(-1) / d_key**0.5).tril()

    def group_norm(rows: Matrix) -> Matrix:
        return (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)

    mass = weight.abs().sum(1, keepdim=True)
    placed = torch.from_numpy(output)
    say = "Retention: "
    checks = (
        compare(
            say + "GroupNorm (without its epsilon) forgets the mass of a row",
            *(("GN(Y)", group_norm(placed)), ("GN(W V X / |W| 1)", group_norm(weight / mass @ field @ w_v.T))),
        ),
        Check(
            say + "what parts it from a walk, the mean negative share of a row",
            *("sum W^- / sum |W|", "0", float((weight.clamp_max(0).abs().sum(1, keepdim=True) / mass).mean())),
            *(1e-2, False),
        ),
        Check(say + "rank of past -> future <= d", "s_(d+1) / s_1", "0", causal_rank_excess(weight, d_key), 1e-12),
    )
    return Placed(Pair.constant(weight, w_v), field, placed, None, checks)


def _selective(field: Float[Tensor, "token channel"], maps: tuple[Tensor, ...]) -> Channels:
    r"""The diagonals of the blocks, :math:`\sum_s C_{is}\,e^{A_{cs}(t_i - t_j)_c}\,\Delta_{jc}B_{js}` for j <= i.

    Each channel has a clock :math:`t_i = \sum_{k\le i}\Delta_k`, which the tokens on the way advance.
    """
    rate, w_b, w_c, w_step, bias = maps
    step = torch.nn.functional.softplus(field @ w_step.T + bias)
    clock = step.cumsum(0)
    passed = torch.tril((clock[:, None] - clock).movedim(-1, 0)).movedim(0, -1)  # no way back: keep e^t bounded
    decay = (rate * passed[..., None]).exp()
    diagonals = torch.einsum("is,ijcs,jc,js->ijc", field @ w_c.T, decay, step, field @ w_b.T)
    return torch.tril(diagonals.movedim(-1, 0)).movedim(0, -1)


@system(
    name="Selective state space",
    paper="2312.00752",
    walk=r"$W = |K_{ij}|_F/\sqrt{d},\ K_{ij} = C_i e^{A(\Delta_{j+1}+\ldots+\Delta_i)} \Delta_j B_j$",
    transport=r"$\Omega_{ij} = K_{ij}/W_{ij}$, diagonal, signed",
    remark="W_ij depends on all tokens from j to i; divided by its row sums W walks, and loses the gain of the scan.",
    fails=("stochastic",),
)
def selective_state_space(seed: int) -> Placed:
    """The selective scan of Mamba, h_t = e^(Delta_t A) h_(t-1) + Delta_t B_t x_t, y_t = C_t h_t (Gu and Dao 2023).

    In the norm gauge, since blocks are diagonals of both signs. Skip connection, convolution and gate are left out.
    """
    tokens, channels, states = 7, 4, 3
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, channels))
    rate = -np.exp(rng.standard_normal((channels, states)))
    w_b, w_c = rng.standard_normal((2, states, channels))
    w_step, bias = rng.standard_normal((channels, channels)) / channels**0.5, rng.standard_normal(channels)
    state, output = np.zeros((channels, states)), np.empty((tokens, channels))
    for t in range(tokens):
        step = np.log1p(np.exp(w_step @ x[t] + bias))
        state = np.exp(step[:, None] * rate) * state + step[:, None] * np.outer(x[t], w_b @ x[t])
        output[t] = state @ (w_c @ x[t])

    field, maps = torch.from_numpy(x), tuple(torch.from_numpy(a) for a in (rate, w_b, w_c, w_step, bias))
    diagonals = _selective(field, maps)
    pair = norm_gauge(torch.diag_embed(diagonals))
    first, middle, last, late = 0, tokens // 2, tokens - 1, tokens - 2
    changed = field.clone()
    changed[middle] = torch.from_numpy(rng.standard_normal(channels))

    def odds(weight: Matrix) -> Float[Tensor, ""]:
        return weight[last, first] / weight[last, late]

    scores = maps[1].T @ maps[2] / states**0.5
    softmax = [(each @ scores @ each.T).softmax(-1) for each in (field, changed)]
    other = norm_gauge(torch.diag_embed(_selective(changed, maps))).weight
    say = "Selective state space: "
    checks = (
        compare(
            say + "under softmax a token on the way leaves the odds of two others",
            *(("W_i0 / W_i(i-1)", odds(softmax[0])), ("after the change", odds(softmax[1]))),
        ),
        compare(
            say + "here it changes them",
            *(("W_i0 / W_i(i-1)", odds(pair.weight)), ("after the change", odds(other)), 1e-3, False),
        ),
        Check(
            say + "what a walk loses, the gain of the rows",
            *("smallest row sum / largest", "1", float(1 - pair.weight.sum(1).min() / pair.weight.sum(1).max())),
            *(1e-2, False),
        ),
        Check(
            say + "blocks are of both signs",
            *("negative share", "0", float(-diagonals.clamp_max(0).sum() / diagonals.abs().sum()), 1e-2, False),
        ),
        Check(
            say + "rank of past -> future <= states, in each channel",
            *("s_(N+1) / s_1", "0", max(causal_rank_excess(d, states) for d in diagonals.unbind(-1)), 1e-12),
        ),
    )
    return Placed(pair, field, torch.from_numpy(output), None, checks)
