"""Atlas: attention as it is used in transformers, and its close relatives.

`dot_products` and `attend` are NumPy and write systems as their papers do; `scores` and `output_maps` are torch and
serve the pairs. No helper serves both halves of an entry.
"""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from scipy.special import softmax
from torch import Tensor

from cwlib.atlas_pair import Pair, Placed, fitted_slope, system
from cwlib.checks import Check, compare
from cwlib.walk import ConnectionWalk


def dot_products(
    w_q: Float[np.ndarray, "head d_head d_model"],
    x: Float[np.ndarray, "dst d_model"],
    w_k: Float[np.ndarray, "head d_head d_model"],
    y: Float[np.ndarray, "src d_model"],
) -> Float[np.ndarray, "head dst src"]:
    r"""Scaled products :math:`\langle Q_hx_i, K_hy_j\rangle/\sqrt{d_h}` of every query with every key, one by one."""
    return np.array([[[q @ a @ (k @ b) for b in y] for a in x] for q, k in zip(w_q, w_k, strict=True)]) / (
        w_q.shape[1] ** 0.5
    )


def attend(
    logits: Float[np.ndarray, "head dst src"],
    values: Float[np.ndarray, "head src d_head"],
    w_o: Float[np.ndarray, "d_model joined"],
    causal: bool = False,
) -> Float[np.ndarray, "dst d_model"]:
    """Multi-head attention token by token: average the values of every head, set heads side by side, map by w_o."""
    heads, n_dst, n_src = logits.shape
    output = np.empty((n_dst, len(w_o)))
    for i in range(n_dst):
        reach, joined = (i + 1 if causal else n_src), []
        for h in range(heads):
            weights = softmax(logits[h, i, :reach])
            joined.append(sum(weights[j] * values[h, j] for j in range(reach)))
        output[i] = w_o @ np.concatenate(joined)
    return output


def scores(
    query: Float[Tensor, "head d_head d_model"],
    field: Float[Tensor, "dst d_model"],
    key: Float[Tensor, "head d_head d_model"],
    other: Float[Tensor, "src d_model"],
) -> Float[Tensor, "head dst src"]:
    """Scores before the softmax, in one contraction."""
    return torch.einsum("hae,ie,haf,jf->hij", query, field, key, other) / query.shape[1] ** 0.5


def output_maps(w_o: Float[np.ndarray, "d_model joined"], heads: int) -> Float[Tensor, "head d_model d_head"]:
    """The output maps O_h, as the columns of w_o that each head meets."""
    return torch.from_numpy(w_o).unflatten(1, (heads, -1)).transpose(0, 1)


@system(
    name="Transformer",
    paper="1706.03762",
    walk=r"$W = \frac1H \sum_h \mathrm{softmax}(Q_h K_h^\top / \sqrt{d_h})$",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h V_h$",
    remark="Every edge mixes the transports of all heads, by how much each attends along it (T2).",
)
def transformer(seed: int) -> Placed:
    """Multi-head attention with biases, written head by head and token by token (Vaswani et al. 2017, section 3.2)."""
    tokens, d_model, heads, d_head = 6, 8, 2, 4
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    w_q, w_k, w_v = rng.standard_normal((3, heads, d_head, d_model)) / d_model**0.5
    b_v, w_o = rng.standard_normal((heads, d_head)), rng.standard_normal((d_model, heads * d_head))
    b_o = rng.standard_normal(d_model)
    values = np.array([[w_v[h] @ token + b_v[h] for token in x] for h in range(heads)])
    output = attend(dot_products(w_q, x, w_k, x), values, w_o) + b_o

    field, query, key, value = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    out = output_maps(w_o, heads)
    constant = torch.einsum("hda,ha->d", out, torch.from_numpy(b_v)) + torch.from_numpy(b_o)
    walk = ConnectionWalk(scores(query, field, key, field).softmax(-1), value, out, constant)
    placed = torch.from_numpy(output)
    checks = (
        compare("Transformer: the layer is its walk (T2)", ("attention", placed), ("P X + c", walk.apply(field))),
    )
    return Placed(Pair.from_walk(walk), field, placed, constant.expand(tokens, -1), checks)


@system(
    name="Cross-attention",
    paper="1706.03762",
    walk=r"$W = \frac1H \sum_h \mathrm{softmax}(Q_h K_h^\top / \sqrt{d_h}),\ n_{dst} \neq n_{src}$",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h V_h$",
    remark="A bipartite walk: on both fields together the encoder absorbs, and the step is a projection, P P = P.",
)
def cross_attention(seed: int) -> Placed:
    """A decoder asks and an encoder answers: queries from one field, keys and values from another (section 3.2.3)."""
    n_dst, n_src, d_model, heads, d_head = 5, 7, 8, 2, 4
    rng = np.random.default_rng(seed)
    decoder, encoder = rng.standard_normal((n_dst, d_model)), rng.standard_normal((n_src, d_model))
    w_q, w_k, w_v = rng.standard_normal((3, heads, d_head, d_model)) / d_model**0.5
    w_o = rng.standard_normal((d_model, heads * d_head))

    def layer(memory: np.ndarray) -> np.ndarray:
        values = np.array([[w_v[h] @ token for token in memory] for h in range(heads)])
        return attend(dot_products(w_q, decoder, w_k, memory), values, w_o)

    output, same = layer(encoder), np.tile(encoder[0], (n_src, 1))
    field, query, key, value = (torch.from_numpy(a) for a in (encoder, w_q, w_k, w_v))
    asking, out, placed = torch.from_numpy(decoder), output_maps(w_o, heads), torch.from_numpy(output)
    pair = Pair.from_walk(ConnectionWalk(scores(query, asking, key, field).softmax(-1), value, out))
    # the disjoint union, encoder first: its tokens stay where they are, and no edge leaves the decoder
    tokens = n_src + n_dst
    weight = torch.zeros(tokens, tokens, dtype=torch.float64)
    maps = torch.zeros(tokens, tokens, d_model, d_model, dtype=torch.float64)
    stay = range(n_src)
    weight[stay, stay], maps[stay, stay] = 1.0, torch.eye(d_model, dtype=torch.float64)
    weight[n_src:, :n_src], maps[n_src:, :n_src] = pair.weight, pair.maps
    union = Pair(weight, maps)
    twice = union @ (union @ torch.cat([field, asking]))
    lone = torch.einsum("hda,hae,e->d", out, value, field[0]).expand(n_dst, -1)
    checks = (
        compare(
            "Cross-attention: a projection of both fields", ("P P X", twice), ("X, P X", torch.cat([field, placed]))
        ),
        compare(
            "Cross-attention: a constant encoder answers every query alike",
            ("attention to equal tokens", torch.from_numpy(layer(same))),
            ("sum of T_h x", lone),
        ),
    )
    return Placed(pair, field, placed, checks=checks)


@system(
    name="Modern Hopfield network",
    paper="2008.02217",
    walk=r"$W = \mathrm{softmax}(\beta\, \Xi X),$ from patterns to states",
    transport=r"$\Omega = I$",
    remark="A step is a gradient step down an energy; large beta leaves one pattern, small beta the mean of all.",
)
def hopfield(seed: int) -> Placed:
    """Retrieval of stored patterns by one update of every state (Ramsauer et al. 2020, equations 2 and 3)."""
    stored, asked, width, beta, steps = 5, 4, 6, 1.0, 200
    rng = np.random.default_rng(seed)
    patterns = rng.standard_normal((width, stored))  # X of the paper: a pattern is a column
    patterns *= width**0.5 / np.linalg.norm(patterns, axis=0)
    states = rng.standard_normal((asked, width))
    output = np.array([patterns @ softmax(beta * patterns.T @ xi) for xi in states])

    field, start = torch.from_numpy(patterns.T.copy()), torch.from_numpy(states)
    radius, mean = field.norm(dim=1).max(), field.mean(0)

    def energy(xi: Tensor, beta: Tensor) -> Tensor:
        free = ((beta[..., None] * xi @ field.T).logsumexp(-1) - np.log(stored)) / beta
        return xi.square().sum(-1) / 2 - free + radius**2 / 2

    # all states under twelve betas at once; the walk is drawn anew at every step
    betas = [10 ** (k / 2) for k in range(-6, 6)]
    column = torch.tensor(betas, dtype=torch.float64)[:, None]
    xi, rise = start.expand(len(betas), -1, -1), -float("inf")
    for _ in range(steps):
        ahead = (column[..., None] * xi @ field.T).softmax(-1) @ field
        rise = max(rise, float((energy(ahead, column) - energy(xi, column)).max()))
        xi = ahead
    nearest = (torch.cdist(xi, field).amin(2).amax(1) / radius).tolist()
    spread = ((xi - mean).norm(dim=2).amax(1) / mean.norm()).tolist()
    variable = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(variable, torch.tensor([beta], dtype=torch.float64)).sum(), variable)
    slope, placed = fitted_slope(betas[:3], spread[:3]), torch.from_numpy(output)
    name = "Modern Hopfield network"
    checks = (
        compare(f"{name}: a gradient step of length one", ("P X", placed), ("state - grad E", start - gradient)),
        Check(f"{name}: the energy never rises", "largest rise in 200 steps, 12 betas", "0", rise, 1e-11),
        Check(f"{name}: one pattern for large beta", "distance to the nearest pattern", "0", nearest[-1], 1e-3),
        Check(f"{name}: the mean for small beta", "fitted exponent of the distance", "1", abs(slope - 1), 0.1),
        Check(f"{name}: the mean is no pattern", "distance to the nearest", "0", nearest[0], 0.1, False),
    )
    curve = pd.DataFrame({"x": betas * 2, "y": nearest + spread})
    curve["series"] = ["to the nearest pattern"] * len(betas) + ["to the mean"] * len(betas)
    pair = Pair.constant((beta * start @ field.T).softmax(-1), torch.eye(width, dtype=torch.float64))
    return Placed(pair, field, placed, checks=checks, curve=curve)


@system(
    name="Learned sink",
    paper="2508.10925",
    walk=r"$W = \frac1H \sum_h A^h,\quad A^h_{ij} = e^{s^h_{ij}} / (e^{b_h} + \sum_k e^{s^h_{ik}})$",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h V_h$",
    remark="Rows lose what the sink absorbs; with the sink as one more token that sends nothing they sum to one.",
    fails=("stochastic",),
)
def learned_sink(seed: int) -> Placed:
    """A logit per head joins the softmax and has no value, as in gpt-oss; at logit 0 the zero sink of Xiao et al."""
    tokens, d_model, heads, d_head = 6, 8, 2, 4
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    w_q, w_k, w_v = rng.standard_normal((3, heads, d_head, d_model)) / d_model**0.5
    w_o, b = rng.standard_normal((d_model, heads * d_head)), rng.standard_normal(heads)
    logits, output = dot_products(w_q, x, w_k, x), np.empty((tokens, d_model))
    for i in range(tokens):
        joined = []
        for h in range(heads):
            weights = softmax(np.append(logits[h, i], b[h]))[:-1]  # what the sink takes is dropped
            joined.append(sum(weights[j] * (w_v[h] @ x[j]) for j in range(tokens)))
        output[i] = w_o @ np.concatenate(joined)

    field, query, key, value, sink = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v, b))
    seen = scores(query, field, key, field)
    total = torch.logaddexp(seen.logsumexp(-1), sink[:, None])
    absorbed = (sink[:, None] - total).exp()
    walk = ConnectionWalk((seen - total[..., None]).exp(), value, output_maps(w_o, heads), absorption=absorbed)
    pair, lost, placed = Pair.from_walk(walk), absorbed.mean(0), torch.from_numpy(output)
    # the nearest walks: one more token, which keeps what it gets and sends nothing; or a damped transport
    weight = torch.zeros(tokens + 1, tokens + 1, dtype=torch.float64)
    weight[:-1, :-1], weight[:-1, -1], weight[-1, -1] = pair.weight, lost, 1.0
    maps = torch.nn.functional.pad(pair.maps, (0, 0, 0, 0, 0, 1, 0, 1))
    extended = Pair(weight, maps) @ torch.cat([field, field[:1]])
    kept = 1 - lost[:, None]
    damped = Pair(pair.weight / kept, kept[:, :, None, None] * pair.maps)
    ones = torch.ones(tokens + 1, dtype=torch.float64)
    ends = torch.linalg.solve(torch.eye(tokens, dtype=torch.float64) - pair.weight, lost)
    checks = (
        compare("Learned sink: rows with the sink sum to one", ("row sums", weight.sum(1)), ("1", ones)),
        compare("Learned sink: a walk on one more token", ("attention", placed), ("P X on n + 1", extended[:-1])),
        compare(
            "Learned sink: a walk of damped transports", ("attention", placed), ("P X, rows scaled", damped @ field)
        ),
        compare("Learned sink: all mass is absorbed in the end", ("absorption", ends), ("1", ones[1:])),
        compare(
            "Learned sink: W alone is not stochastic", ("row sums", pair.weight.sum(1)), ("1", ones[1:]), holds=False
        ),
    )
    return Placed(pair, field, placed, checks=checks)
