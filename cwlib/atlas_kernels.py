"""Atlas: attention with another kernel or a mask, whose weights stay a stochastic walk.

`cwlib.atlas_recurrent` has those that run as recurrences, `cwlib.atlas_signed` those whose weights are signed.
"""

import math

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cwlib.atlas_pair import Pair, Placed, best_measure, fitted_slope, system
from cwlib.checks import Check, compare
from cwlib.measures import is_irreducible, reversibility_defect, stationary_measure

Matrix = Float[Tensor, "dst src"]


def _normed(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def rank_excess(matrix: Matrix, rank: int) -> float:
    r"""Singular value number ``rank + 1`` over the largest, in [0, 1]: zero iff the rank is at most ``rank``."""
    values = torch.linalg.svdvals(matrix)
    return float(values[rank] / values[0]) if len(values) > rank else 0.0


def _frequencies(rng: np.random.Generator, draws: int, count: int, width: int) -> np.ndarray:
    """Gaussian frequencies, orthogonal within blocks of ``width`` (FAVOR+): directions of a QR, independent norms."""
    frame, triangle = np.linalg.qr(rng.standard_normal((draws, -(-count // width), width, width)))
    # signs make the frame uniform; LAPACK's own choice leaves the estimate with a bias
    frame *= np.sign(np.diagonal(triangle, axis1=-2, axis2=-1))[..., None, :]
    norms = np.linalg.norm(rng.standard_normal(frame.shape), axis=-1, keepdims=True)
    return (frame * norms).reshape(draws, -1, width)[:, :count]


@system(
    name="Performer",
    paper="2009.14794",
    walk=r"$W = D^{-1} \phi(Q) \phi(K)^\top,\ \phi(x) = m^{-1/2} e^{\omega x - |x|^2/2}$",
    transport=r"$\Omega_{ij} = V$",
    remark="Positive features keep the walk stochastic at any rank m; it nears softmax like 1/sqrt(m).",
)
def performer(seed: int) -> Placed:
    """FAVOR+ attention in its linear-time order, tokens summed up before any is asked (Choromanski et al. 2020)."""
    tokens, width, count = 8, 4, 4
    rng = np.random.default_rng(seed)
    x = _normed(rng.standard_normal((tokens, width)))
    w_q, w_k, w_v = rng.standard_normal((3, width, width)) / width  # an estimate varies like exp(|q + k|^2 / 2)
    omega = _frequencies(rng, 1, count, width)[0]

    def phi(point: np.ndarray) -> np.ndarray:
        return np.exp(omega @ point - point @ point / 2) / count**0.5

    features = [phi(w_k @ each / width**0.25) for each in x]
    state = sum(np.outer(feature, w_v @ each) for feature, each in zip(features, x, strict=True))
    asked = [phi(w_q @ each / width**0.25) for each in x]
    output = np.stack([each @ state / (each @ sum(features)) for each in asked])

    field, w_q, w_k, w_v, omega = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v, omega))
    query, key = field @ w_q.T / width**0.25, field @ w_k.T / width**0.25

    def walk(frequencies: Float[Tensor, "*draw feature width"]) -> Float[Tensor, "*draw dst src"]:
        left, right = (((p @ frequencies.mT) - p.square().sum(1, keepdim=True) / 2).exp() for p in (query, key))
        kernel = left @ right.mT
        return kernel / kernel.sum(-1, keepdim=True)

    weight, exact = walk(omega), (query @ key.T).softmax(-1)
    counts = [64, 256, 1024]
    distances = [
        float((walk(torch.from_numpy(_frequencies(rng, 128, m, width))) - exact).abs().sum(-1).mean() / 2)
        for m in counts
    ]
    slope = fitted_slope([float(m) for m in counts], distances)
    checks = (
        Check(
            "Performer: total variation to softmax falls like m^(-1/2)",
            *("fitted exponent over m", "-1/2", abs(slope + 0.5), 0.1),
        ),
        Check("Performer: rank W <= m", "s_(m+1) / s_1", "0", rank_excess(weight, count), 1e-12),
    )
    curve = pd.DataFrame({"x": counts, "y": distances, "series": "orthogonal features"})
    return Placed(Pair.constant(weight, w_v), field, torch.from_numpy(output), None, checks, curve)


def _masks(tokens: int) -> dict[str, Bool[Tensor, "dst src"]]:
    """Supports that the survey lists, both directions allowed, loops included."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    window = (i - j).abs() <= 1
    return {
        "full": window | True,
        "window": window,
        "strided": window | ((i - j) % 4 == 0),
        "block": i // 4 == j // 4,
        "global + window": window | (i == 0) | (j == 0),
    }


def _masked(scores: Matrix, mask: Bool[Tensor, "dst src"]) -> Matrix:
    return scores.masked_fill(~mask, -math.inf).softmax(-1)


def _scores(seed: int, tokens: int, width: int = 4) -> tuple[Matrix, Matrix]:
    """Cosines of queries with themselves (tied: symmetric), and with keys by another map (untied)."""
    rng = np.random.default_rng(seed)
    x, (w_q, w_k) = rng.standard_normal((tokens, width)), rng.standard_normal((2, width, width))
    query, key = (torch.from_numpy(_normed(x @ w.T)) for w in (w_q, w_k))
    return query @ query.T, query @ key.T


def _mixing_time(weight: Matrix) -> float:
    """Steps until every row is within 1/4 of the stationary law; the walk has loops, so that it is aperiodic."""
    if not is_irreducible(weight):
        return math.inf
    law, power, steps = stationary_measure(weight), weight, 1.0
    while (power - law).abs().sum(1).max() / 2 > 0.25:
        power, steps = power @ weight, steps + 1
    return steps


def patterns(seed: int = 0) -> pd.DataFrame:
    r"""What the supports of efficient transformers do to softmax attention among 16 tokens.

    A symmetric mask with symmetric scores (tied: one map for queries and keys) gives
    :math:`W = D^{-1}(M\circ e^S)`, reversible in the row sums D. With untied maps it is reversible only where the
    support has no cycles, as a window of next neighbours (Kolmogorov). Blocks alone never mix.

    Returns
    -------
    pandas.DataFrame
        Indexed by ``pattern`` and ``scores`` (tied, untied); columns ``density`` (share of pairs in the support),
        ``reversibility_defect`` (0 to 1, in the measure that comes closest), ``gap`` (one minus the second largest
        modulus of an eigenvalue) and ``mixing_time`` (least t with total variation at most 1/4 from every start;
        infinite if the walk falls apart).
    """
    tokens = 16
    rows = []
    for name, mask in _masks(tokens).items():
        for kind, scores in zip(("tied", "untied"), _scores(seed, tokens), strict=True):
            weight = _masked(scores, mask)
            moduli = torch.linalg.eigvals(weight).abs().sort(descending=True).values
            row = {"pattern": name, "scores": kind, "density": float(mask.double().mean())}
            row |= {"reversibility_defect": reversibility_defect(weight, best_measure(weight))}
            rows.append(row | {"gap": float((1 - moduli[1]).clamp_min(0)), "mixing_time": _mixing_time(weight)})
    return pd.DataFrame(rows).set_index(["pattern", "scores"])


def _gap(seed: int, tokens: int, pattern: str) -> float:
    """One minus the second eigenvalue of a pattern with tied scores, by its symmetric form."""
    kernel = _scores(seed, tokens)[0].exp() * _masks(tokens)[pattern]
    scale = kernel.sum(1).rsqrt()
    return float(1 - torch.linalg.eigvalsh(scale[:, None] * kernel * scale)[-2])


@system(
    name="Sparse attention",
    paper="2009.06732",
    walk=r"$W = D^{-1} (M \circ e^{Q K^\top / \sqrt{d}}),\ M$ strided",
    transport=r"$\Omega_{ij} = V$",
    remark="The mask is the graph: a window closes the gap like n^-2, one global token keeps it open.",
)
def sparse_attention(seed: int) -> Placed:
    """Softmax over a strided neighbourhood, the pattern of Sparse Transformers (survey of Tay et al. 2020)."""
    tokens, width, stride = 8, 4, 4
    rng = np.random.default_rng(seed)
    x = _normed(rng.standard_normal((tokens, width))) * width**0.5
    w_q, w_k, w_v = rng.standard_normal((3, width, width)) / width**0.5
    output = np.zeros((tokens, width))
    for i in range(tokens):
        seen = [j for j in range(tokens) if abs(i - j) <= 1 or (i - j) % stride == 0]
        weights = np.exp([w_q @ x[i] @ (w_k @ x[j]) / width**0.5 for j in seen])
        for weight, j in zip(weights / weights.sum(), seen, strict=True):
            output[i] += weight * (w_v @ x[j])

    field, w_q, w_k, w_v = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    scores, tied = (field @ w_q.T @ w @ field.T / width**0.5 for w in (w_k, w_q))
    weight, path, block = (_masked(scores, _masks(tokens)[name]) for name in ("strided", "window", "block"))
    rows = [
        {"x": float(n), "y": _gap(s, n, name), "series": name}
        for name in ("window", "global + window")
        for n in (32, 64, 128)
        for s in rng.integers(2**32, size=32).tolist()
    ]
    curve = pd.DataFrame(rows).groupby(["series", "x"], sort=False, as_index=False).mean()
    window = curve[curve.series == "window"]
    # var f <= sum pi_i |f_i - f_0|^2, and edges to token 0 alone have min W_i0 of that as energy: so it bounds the gap;
    # a row holds four scores, all in [-1, 1]
    bound, least = 1 / (1 + 3 * math.e**2), min(row["y"] for row in rows if row["series"] != "window")
    mask = _masks(tokens)["strided"]
    law = (tied.exp() * mask).sum(1)
    ones = torch.linalg.eigvals(block).abs().sort(descending=True).values[tokens // 4 - 1]
    say = "Sparse attention: "
    checks = (
        Check(
            say + "tied scores, symmetric mask: reversible in the row sums",
            *("pi_i W_ij", "pi_j W_ji", reversibility_defect(_masked(tied, mask), law), 1e-12),
        ),
        Check(
            say + "untied scores: not reversible in any measure",
            *("pi_i W_ij", "pi_j W_ji", reversibility_defect(weight, best_measure(weight)), 1e-2, False),
        ),
        Check(
            say + "a window of next neighbours has no cycles: reversible with any scores",
            *("pi_i W_ij", "pi_j W_ji", reversibility_defect(path, best_measure(path)), 1e-12),
        ),
        Check(say + "blocks never mix", "eigenvalue per block", "1", abs(float(ones) - 1), 1e-12),
        Check(
            say + "window: gap ~ n^-2",
            *("fitted exponent over n", "-2", abs(fitted_slope(window.x.tolist(), window.y.tolist()) + 2), 0.1),
        ),
        Check(say + "one global token: gap >= 1/(1 + 3 e^2) at every n", "bound / gap", "<= 1", bound / least, 1.0),
    )
    return Placed(Pair.constant(weight, w_v), field, torch.from_numpy(output), None, checks, curve)


@system(
    name="Non-Mercer kernel machine",
    paper="2106.01506",
    walk=r"$W = D^{-1} \kappa,\ \kappa_{ij} = e^{x_i^\top Q^\top K x_j / \sqrt{d}}$",
    transport=r"$\Omega_{ij} = V$",
    remark="Reversible if the kernel is symmetric up to factors of rows and columns, positive or not.",
)
def non_mercer(seed: int) -> Placed:
    """Attention as a kernel smoother with the exponentiated query-key kernel (Wright and Gonzalez 2021)."""
    tokens, width = 6, 4
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, width))
    w_q, w_k, w_v = rng.standard_normal((3, width, width)) / width**0.5

    def kappa(target: np.ndarray, source: np.ndarray) -> float:
        return np.exp((w_q @ target) @ (w_k @ source) / width**0.5)

    output = np.stack([sum(kappa(t, s) * (w_v @ s) for s in x) / sum(kappa(t, s) for s in x) for t in x])

    field, w_q, w_k, w_v = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    form = w_q.T @ w_k / width**0.5
    weight = (field @ form @ field.T).softmax(-1)
    symmetric = (-field @ w_q.T @ w_q @ field.T / width**0.5).exp()  # keys are minus queries: tokens repel
    spectrum = torch.linalg.eigvalsh(symmetric)
    circulation = field @ (form - form.T) @ field.T
    logs = weight.log() - weight.log().T

    def around(flow: Matrix) -> Float[Tensor, "i j k"]:
        return flow[:, :, None] + flow[None, :, :] + flow.T[:, None, :]

    say = "Non-Mercer kernel machine: "
    checks = (
        Check(
            say + "Q^T K symmetric: reversible in the row sums",
            *("pi_i W_ij", "pi_j W_ji"),
            *(reversibility_defect(symmetric / symmetric.sum(1, keepdim=True), symmetric.sum(1)), 1e-12),
        ),
        Check(
            say + "and that kernel is not positive",
            *("-smallest eigenvalue / largest", "0", float(-spectrum[0] / spectrum[-1]), 1e-3, False),
        ),
        compare(
            say + "cycle products are circulations of Q^T K - K^T Q",
            *(("log W_ij W_jk W_ki / W_ik W_kj W_ji", around(logs)), ("a_ij + a_jk + a_ki", around(circulation))),
        ),
        Check(say + "so cycles have a sense", "largest |log|", "0", float(around(logs).abs().max()), 0.1, False),
        Check(
            say + "this Q^T K is asymmetric: not reversible",
            *("pi_i W_ij", "pi_j W_ji", reversibility_defect(weight, best_measure(weight)), 1e-2, False),
        ),
    )
    return Placed(Pair.constant(weight, w_v), field, torch.from_numpy(output), None, checks)
