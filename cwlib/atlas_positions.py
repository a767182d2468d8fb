"""Atlas: what changes the weights alone: positions, differences of attention, and attention taken from the identity."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from scipy.special import softmax
from torch import Tensor

from cwlib.atlas_attention import attend, dot_products, output_maps, scores
from cwlib.atlas_pair import Pair, Placed, defects, system
from cwlib.checks import Check, compare
from cwlib.measures import lazy_walk
from cwlib.walk import ConnectionWalk


def rotate(vector: Float[np.ndarray, " d_head"], position: int) -> Float[np.ndarray, " d_head"]:
    r"""Rotary embedding: plane k of the vector turned by :math:`p\,10000^{-2k/d}` (Su et al. 2021, equation 15)."""
    turned = np.empty_like(vector)
    for k in range(len(vector) // 2):
        angle = position * 10000.0 ** (-2 * k / len(vector))
        plane = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        turned[2 * k : 2 * k + 2] = plane @ vector[2 * k : 2 * k + 2]
    return turned


def rotary_products(
    query: Float[Tensor, "head dst d_head"], key: Float[Tensor, "head src d_head"]
) -> Float[Tensor, "head dst src"]:
    r"""Products of rotated queries and keys, :math:`\mathrm{Re}\sum_k \bar q_k k_k e^{i(n - m)\theta_k}`.

    With planes as complex numbers the two rotations meet in one phase, of the distance n - m alone.
    """
    left, right = (torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) for each in (query, key))
    planes = left.shape[-1]
    speed = 10000.0 ** -(torch.arange(planes, dtype=torch.float64) / planes)
    ahead = torch.arange(key.shape[1])[None, :] - torch.arange(query.shape[1])[:, None]
    phase = torch.exp(1j * ahead[..., None] * speed)
    return torch.einsum("hik,hjk,ijk->hij", left.conj(), right, phase).real


def causal_softmax(logits: Float[Tensor, "head token token"]) -> Float[Tensor, "head token token"]:
    """Softmax over the tokens up to one's own."""
    later = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
    return logits.masked_fill(later, -torch.inf).softmax(-1)


def _lone_maps(layer: Callable, w_o: np.ndarray, heads: int) -> Tensor:
    """What each head does to a token alone in its context: the weight is one, so that these are the T_h themselves."""
    maps = []
    for head in np.split(np.arange(w_o.shape[1]), heads):
        only = np.zeros_like(w_o)
        only[:, head] = w_o[:, head]
        maps.append(np.stack([layer(unit[None], only)[0] for unit in np.eye(len(w_o))], 1))
    return torch.from_numpy(np.array(maps))


def _changes_weights_alone(name: str, walk: ConnectionWalk, plain: ConnectionWalk, lone: Tensor) -> tuple[Check, Check]:
    """Positions change W and not the head maps, which the system itself gave."""
    product = torch.einsum("hda,hae->hde", walk.output, walk.value)
    weights = ("W with positions", walk.effective_walk()), ("W without", plain.effective_walk())
    return (
        compare(f"{name}: W changes", *weights, holds=False),
        compare(f"{name}: a lone token is moved by T_h", ("layer on one token", lone), ("O_h V_h", product)),
    )


@system(
    name="ALiBi",
    paper="2108.12409",
    walk=r"$W = \frac1H \sum_h \mathrm{softmax}_{j \leq i}(s^h_{ij} - m_h (i - j))$",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h V_h$",
    remark="Distance discounts the edges of each head and W is normalised again; no transport of a head changes.",
)
def alibi(seed: int) -> Placed:
    """Causal attention with a penalty linear in the distance, slopes 2^(-8h/H) (Press et al. 2021, section 3)."""
    tokens, d_model, heads, d_head = 7, 8, 4, 2
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    w_q, w_k, w_v = rng.standard_normal((3, heads, d_head, d_model)) / d_model**0.5
    w_o = rng.standard_normal((d_model, heads * d_head))

    def layer(x: np.ndarray, w_o: np.ndarray, bias: bool) -> np.ndarray:
        logits = dot_products(w_q, x, w_k, x)
        for h, i, j in np.ndindex(logits.shape):
            logits[h, i, j] -= bias * 2.0 ** (-8 * (h + 1) / heads) * (i - j)
        return attend(logits, np.array([[v @ token for token in x] for v in w_v]), w_o, causal=True)

    output = layer(x, w_o, True)
    lone = _lone_maps(lambda x, only: layer(x, only, True), w_o, heads)

    field, query, key, value = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    out, seen, place = output_maps(w_o, heads), scores(query, field, key, field), torch.arange(tokens)
    slope = 0.5 ** (8 / heads * torch.arange(1, heads + 1, dtype=torch.float64))
    penalty = slope[:, None, None] * (place[:, None] - place[None, :])
    walk = ConnectionWalk(causal_softmax(seen - penalty), value, out)
    plain = ConnectionWalk(causal_softmax(seen), value, out)
    discounted = plain.attention * (-penalty).exp()
    discounted = discounted / discounted.sum(-1, keepdim=True)
    checks = (
        *_changes_weights_alone("ALiBi", walk, plain, lone),
        compare(
            "ALiBi: a discount of every edge by its length",
            ("A", walk.attention),
            ("A without times exp(-m distance), normalised", discounted),
        ),
    )
    return Placed(Pair.from_walk(walk), field, torch.from_numpy(output), checks=checks)


@system(
    name="Rotary positions",
    paper="2104.09864",
    walk=r"$W = \frac1H \sum_h \mathrm{softmax}(\langle R_i Q_h x_i, R_j K_h x_j \rangle / \sqrt{d_h})$",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h V_h$",
    remark="The rotations act on queries and keys, hence on W, through i - j alone; no transport of a head turns.",
)
def rotary(seed: int) -> Placed:
    """Attention whose queries and keys are turned by angles proportional to their position (Su et al. 2021)."""
    tokens, d_model, heads, d_head = 6, 8, 2, 4
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    w_q, w_k, w_v = rng.standard_normal((3, heads, d_head, d_model)) / d_model**0.5
    w_o = rng.standard_normal((d_model, heads * d_head))

    def layer(x: np.ndarray, w_o: np.ndarray, places: Sequence[int]) -> np.ndarray:
        logits = np.empty((heads, len(x), len(x)))
        for h, i, j in np.ndindex(logits.shape):
            turned = rotate(w_q[h] @ x[i], places[i]), rotate(w_k[h] @ x[j], places[j])
            logits[h, i, j] = turned[0] @ turned[1] / d_head**0.5
        return attend(logits, np.array([[v @ token for token in x] for v in w_v]), w_o)

    output = layer(x, w_o, range(tokens))
    lone, bare = (_lone_maps(lambda x, only, at=at: layer(x, only, [at]), w_o, heads) for at in (17, 0))

    field, query, key, value = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    out, placed = output_maps(w_o, heads), torch.from_numpy(output)
    queries, keys = (torch.einsum("hae,ie->hia", each, field) for each in (query, key))
    walk = ConnectionWalk((rotary_products(queries, keys) / d_head**0.5).softmax(-1), value, out)
    plain = ConnectionWalk(scores(query, field, key, field).softmax(-1), value, out)
    shifted, stretched = (
        torch.from_numpy(layer(x, w_o, at)) for at in (range(11, tokens + 11), range(0, 3 * tokens, 3))
    )
    checks = (
        *_changes_weights_alone("Rotary positions", walk, plain, lone),
        Check(
            "Rotary positions: the transport of every head is the same to the bit",
            *("T_h at position 17", "T_h at position 0", float((lone - bare).abs().max()), 0.0),
        ),
        compare("Rotary positions: only i - j matters", ("positions shifted by 11", shifted), ("not shifted", placed)),
        compare(
            "Rotary positions: i - j matters", ("positions times 3", stretched), ("as they were", placed), 1e-3, False
        ),
    )
    return Placed(Pair.from_walk(walk), field, placed, checks=checks)


def _sign_holonomy(weight: Tensor) -> float:
    """1 - cos of the worst cycle if signs of W are moved into the transport: 2 if some cycle flips vectors, else 0."""
    return defects(Pair(weight.abs(), weight.sign()[:, :, None, None]))["flat"]


@system(
    name="Differential attention",
    paper="2410.05258",
    walk=r"$W = A_1 - \lambda A_2,$ rows sum to $1 - \lambda$",
    transport=r"$\Omega = V$",
    remark="W is signed; as two heads, A1 with V and A2 with -lambda V, it is a walk exactly: the sign is transport.",
    fails=("nonnegative", "stochastic"),
)
def differential(seed: int) -> Placed:
    """One head of differential attention up to its norm (Ye et al. 2024, equations 1 and 2).

    The paper then divides each token's head output by its root mean square, which is not linear, and maps the joined
    heads by W_O. Here the head is placed before that norm; values are twice as wide as queries, so that V is square.
    """
    tokens, d_head, depth = 6, 4, 4
    rng = np.random.default_rng(seed)
    x, w_v = rng.standard_normal((tokens, 2 * d_head)), rng.standard_normal((2 * d_head, 2 * d_head))
    w_q, w_k = rng.standard_normal((2, 2, d_head, 2 * d_head)) / d_head**0.5
    q_1, k_1, q_2, k_2 = 0.1 * rng.standard_normal((4, d_head))
    initial = 0.8 - 0.6 * np.exp(-0.3 * (depth - 1))
    lam = np.exp(q_1 @ k_1) - np.exp(q_2 @ k_2) + initial
    logits, output = dot_products(w_q, x, w_k, x), np.empty_like(x)
    for i in range(tokens):
        row = softmax(logits[0, i]) - lam * softmax(logits[1, i])
        output[i] = sum(row[j] * (w_v @ x[j]) for j in range(tokens))

    field, query, key, value = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    first, second = torch.from_numpy(np.array([[q_1, k_1], [q_2, k_2]])).prod(1).sum(1).exp()
    rate = float(first - second + initial)
    attention = scores(query, field, key, field).softmax(-1)
    pair, placed = Pair.constant(attention[0] - rate * attention[1], value), torch.from_numpy(output)
    eye = torch.eye(2 * d_head, dtype=torch.float64)
    heads = ConnectionWalk(attention, value.expand(2, -1, -1), torch.stack([eye, -rate * eye]))
    positive = pair.weight.clamp_min(0)
    nearest = Pair.constant(positive / positive.sum(1, keepdim=True), (1 - rate) * value) @ field
    mass, ones = pair.weight.sum(1), torch.ones(tokens, dtype=torch.float64)
    rows = pair.weight.abs().sum(1)
    name, spin = "Differential attention", _sign_holonomy(pair.weight)
    checks = (
        compare(f"{name}: rows sum to 1 - lambda", ("row sums", mass), ("1 - lambda", (1 - rate) * ones)),
        compare(f"{name}: two heads of a walk", ("head", placed), ("P X, T and -lambda T", heads.apply(field))),
        compare(
            f"{name}: its positive part is another layer",
            ("head", placed),
            ("P X, positive part", nearest),
            holds=False,
        ),
        compare(f"{name}: |W| is not stochastic", ("rows of |W|", rows), ("1", ones), holds=False),
        Check(f"{name}: signs in the transport are not flat", "holonomy of sign W", "1", spin, 1.0, False),
    )
    return Placed(pair, field, placed, checks=checks)


@system(
    name="Laplacian heads",
    paper="2602.09297",
    walk=r"$W = \frac{1}{2}(A^1 + I - A^2),$ rows of $I - A^2$ sum to 0",
    transport=r"$\Omega_{ij} = (A^1_{ij} T_1 + (\delta_{ij} - A^2_{ij})\, T_2) / W_{ij}$",
    remark="W is signed; as three heads, A1 with T1, I with T2 and A2 with -T2, the layer is a walk exactly.",
    fails=("nonnegative", "stochastic"),
)
def laplacian_heads(seed: int) -> Placed:
    """A head that averages beside one that subtracts the average (Papyan and Zhang 2026), without the residual."""
    tokens, d_model, d_head = 6, 8, 4
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    w_q, w_k, w_v = rng.standard_normal((3, 2, d_head, d_model)) / d_model**0.5
    w_o = rng.standard_normal((2, d_model, d_head))
    logits, output = dot_products(w_q, x, w_k, x), np.empty_like(x)
    for i in range(tokens):
        averages = [sum(a * token for a, token in zip(softmax(logits[h, i]), x, strict=True)) for h in range(2)]
        output[i] = w_o[0] @ w_v[0] @ averages[0] + w_o[1] @ w_v[1] @ (x[i] - averages[1])

    field, query, key, value, out = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v, w_o))
    attention, eye = scores(query, field, key, field).softmax(-1), torch.eye(tokens, dtype=torch.float64)
    laplacian, maps = eye - attention[1], out @ value
    weight = (attention[0] + laplacian) / 2
    blocks = torch.einsum("hij,hab->ijab", torch.stack([attention[0], laplacian]), maps)
    pair, placed = Pair(weight, blocks / weight[:, :, None, None]), torch.from_numpy(output)
    heads = torch.stack([*attention, eye])
    walk = ConnectionWalk(heads, value[[0, 1, 1]], torch.stack([out[0], -out[1], out[1]]))
    share = abs(defects(Pair(laplacian, eye[:1, :1].expand(tokens, tokens, 1, 1)))["nonnegative"] - 0.5)
    time, name, spin = 0.3, "Laplacian heads", _sign_holonomy(laplacian)
    heat = lazy_walk(attention[1], 1 - time) @ field
    checks = (
        compare(f"{name}: three heads of a walk", ("layer", placed), ("P X, T1, -T2 and T2", walk.apply(field))),
        Check(f"{name}: half the weight of I - P is negative", "share of negative weight", "1/2", share, 1e-12),
        compare(f"{name}: a lazy walk if T = -t", ("X - t (I - P) X", field - time * laplacian @ field), ("P X", heat)),
        Check(f"{name}: signs in the transport are not flat", "holonomy of sign(I - P)", "1", spin, 1.0, False),
    )
    return Placed(pair, field, placed, checks=checks)
