"""Atlas: what changes the transports: value maps that heads share, a latent they pass through, maps of the token."""

import numpy as np
import torch

from cwlib.atlas_attention import attend, dot_products, output_maps, scores
from cwlib.atlas_pair import Pair, Placed, defects, ranks, system
from cwlib.atlas_positions import causal_softmax, rotary_products, rotate
from cwlib.checks import Check, compare
from cwlib.walk import ConnectionWalk


def _reads(pair: Pair) -> int:
    """Dimension of what all transports together read of a token: the rank of their blocks stacked."""
    return int(torch.linalg.matrix_rank(pair.blocks().flatten(0, 2)))


@system(
    name="Grouped-query attention",
    paper="2305.13245",
    walk=r"$W = \frac1H \sum_h \mathrm{softmax}(Q_h K_{g(h)}^\top / \sqrt{d_h})$",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h V_{g(h)},\ \mathrm{rank} \leq n_{kv} d_h$",
    remark="Heads of a group share a value map: all transports read one space of dimension n_kv d_h, the cache.",
)
def grouped_query(seed: int) -> Placed:
    """Groups of query heads share a key and a value head; one group is multi-query (Ainslie et al. 2023)."""
    tokens, d_model, heads, d_head, groups = 6, 8, 4, 2, 2
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    w_q = rng.standard_normal((heads, d_head, d_model)) / d_model**0.5
    w_k, w_v = rng.standard_normal((2, groups, d_head, d_model)) / d_model**0.5
    w_o = rng.standard_normal((d_model, heads * d_head))
    group = [h * groups // heads for h in range(heads)]
    values = np.array([[w_v[group[h]] @ token for token in x] for h in range(heads)])
    output = attend(dot_products(w_q, x, w_k[group], x), values, w_o)

    field, query, key, value = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    out = output_maps(w_o, heads)
    attention = scores(query, field, key.repeat_interleave(heads // groups, 0), field).softmax(-1)
    walk = ConnectionWalk(attention, value, out, groups=heads // groups)
    placed, name = torch.from_numpy(output), "Grouped-query attention"
    checks = [compare(f"{name}: the layer is its walk (T2)", ("attention", placed), ("P X", walk.apply(field)))]
    own = torch.from_numpy(rng.standard_normal((heads, d_head, d_model)))
    for kv_heads in (heads, groups, 1):
        pair = Pair.from_walk(ConnectionWalk(attention, own[:kv_heads], out, groups=heads // kv_heads))
        gap = abs(ranks(pair)["transport_rank"] - kv_heads * d_head) + abs(_reads(pair) - kv_heads * d_head)
        sides = "largest rank, and what all read", f"{kv_heads * d_head} of {d_model}"
        checks.append(Check(f"{name}: rank n_kv d_h, {kv_heads} value heads", *sides, float(gap), 0.0))
    return Placed(Pair.from_walk(walk), field, placed, checks=tuple(checks))


@system(
    name="Multi-head latent attention",
    paper="2405.04434",
    walk=r"$W = \frac1H \sum_h \mathrm{softmax}_{j \leq i}(\mathrm{content} + \mathrm{rotary\ part})$",
    transport=r"$\Omega_{ij} = (H \sum_h \gamma^h_{ij}\, O_h U_h)\, D,\ \mathrm{rank} \leq d_c$",
    remark="Multi-query attention with the latent map D as its one value map: no transport has rank above d_c.",
)
def multi_head_latent(seed: int) -> Placed:
    """Keys and values from one latent of each token, positions in a part of their own (DeepSeek-V2, section 2.1)."""
    tokens, d_model, heads, d_head, d_rope, d_c, d_query = 6, 8, 4, 2, 2, 3, 5
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    w_dkv, w_dq, w_kr = (rng.standard_normal((width, d_model)) / d_model**0.5 for width in (d_c, d_query, d_rope))
    w_uk, w_uv = rng.standard_normal((2, heads, d_head, d_c))
    w_uq, w_qr = (rng.standard_normal((heads, width, d_query)) for width in (d_head, d_rope))
    w_o = rng.standard_normal((d_model, heads * d_head))
    latent, asked = [w_dkv @ token for token in x], [w_dq @ token for token in x]
    logits = np.empty((heads, tokens, tokens))
    for h, i, j in np.ndindex(logits.shape):
        query = np.concatenate([w_uq[h] @ asked[i], rotate(w_qr[h] @ asked[i], i)])
        key = np.concatenate([w_uk[h] @ latent[j], rotate(w_kr @ x[j], j)])
        logits[h, i, j] = query @ key / (d_head + d_rope) ** 0.5
    output = attend(logits, np.array([[w_uv[h] @ c for c in latent] for h in range(heads)]), w_o, causal=True)

    field, down, ask, turn = (torch.from_numpy(a) for a in (x, w_dkv, w_dq, w_kr))
    up_key, up_value, up_query, up_turn = (torch.from_numpy(a) for a in (w_uk, w_uv, w_uq, w_qr))
    content = torch.einsum("hia,hja->hij", field @ (up_query @ ask).mT, field @ (up_key @ down).mT)
    part = rotary_products(field @ (up_turn @ ask).mT, (field @ turn.T).expand(heads, -1, -1))
    attention, without = (causal_softmax(each / (d_head + d_rope) ** 0.5) for each in (content + part, content))
    # absorbed: the latent map is the one value map, and up-projections go into the output maps
    walk = ConnectionWalk(attention, down[None], output_maps(w_o, heads) @ up_value, groups=heads)
    pair, placed, name = Pair.from_walk(walk), torch.from_numpy(output), "Multi-head latent attention"
    gap = abs(ranks(pair)["transport_rank"] - d_c) + abs(_reads(pair) - d_c)
    sides = "largest rank, and what all read", f"{d_c}, below H d_h = {heads * d_head}"
    parts = ("W with the rotary part", attention.mean(0)), ("W without", without.mean(0))
    checks = (
        compare(f"{name}: multi-query, absorbed", ("attention", placed), ("P X, one value map D", walk.apply(field))),
        Check(f"{name}: all transports pass the latent", *sides, float(gap), 0.0),
        compare(f"{name}: rotary keys change W", *parts, holds=False),
    )
    return Placed(pair, field, placed, checks=checks)


@system(
    name="Tensor product attention",
    paper="2501.06425",
    walk=r"$W = \frac1H \sum_h \mathrm{softmax}(q_h k_h^\top / \sqrt{d_h}),\ q, k$ factored",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h\, \frac{1}{R} \sum_r a^h_r(x_j) B_r$",
    remark="Values are quadratic in a token, so each source has a transport of its own, even with a single head.",
)
def tensor_product(seed: int) -> Placed:
    r"""Queries, keys and values as averages of products of two linear factors (Zhang et al. 2025, section 3.1).

    Head h of :math:`\frac1R\sum_r a_r(x) \otimes b_r(x)`; without rotary, which changes W alone. A quadratic map has
    more than one freezing: with a_r held at the token the transport is a mixture of the B_r, with b_r held it has rank
    at most R per head. The output is the same; the first is placed.
    """
    tokens, d_model, heads, d_head, rank = 5, 8, 2, 4, 2
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    a_q, a_k, a_v = rng.standard_normal((3, rank, heads, d_model)) / d_model**0.5
    b_q, b_k, b_v = rng.standard_normal((3, rank, d_head, d_model)) / d_model**0.5
    w_o, fixed = rng.standard_normal((d_model, heads * d_head)), rng.standard_normal((rank, heads))
    logits = np.empty((heads, tokens, tokens))
    for i, j in np.ndindex(tokens, tokens):
        query, key = (a_q @ x[i]).T @ (b_q @ x[i]) / rank, (a_k @ x[j]).T @ (b_k @ x[j]) / rank
        for h in range(heads):
            logits[h, i, j] = query[h] @ key[h] / d_head**0.5

    def layer(factors: list[np.ndarray]) -> np.ndarray:
        values = np.array([a.T @ (b_v @ token) / rank for a, token in zip(factors, x, strict=True)])
        return attend(logits, values.swapaxes(0, 1), w_o)

    output, plain = layer([a_v @ token for token in x]), layer([fixed] * tokens)

    field, out, a_v, b_v, fixed = (torch.from_numpy(a) for a in (x, output_maps(w_o, heads).numpy(), a_v, b_v, fixed))
    factors = ((torch.from_numpy(a), torch.from_numpy(b)) for a, b in ((a_q, b_q), (a_k, b_k)))
    query, key = (torch.einsum("rhe,ie,raf,if->hia", a, field, b, field) / rank for a, b in factors)
    attention = (query @ key.mT / d_head**0.5).softmax(-1)
    held_a = torch.einsum("hda,rhe,je,raf->hjdf", out, a_v, field, b_v) / rank
    held_b = torch.einsum("hda,rae,je,rhf->hjdf", out, b_v, field, a_v) / rank
    weight, placed = attention.mean(0), torch.from_numpy(output)
    pair, other = (
        Pair(weight, torch.einsum("hij,hjab->ijab", attention, held) / weight[:, :, None, None])
        for held in (held_a, held_b)
    )
    constant = torch.einsum("rh,rae->hae", fixed, b_v) / rank
    single = defects(Pair(attention[0], held_a[0].expand(tokens, -1, -1, -1)))["constant"]
    terms = abs(ranks(pair)["schmidt_rank"] - heads * rank)
    name, mha = "Tensor product attention", ConnectionWalk(attention, constant, out)
    checks = (
        Check(f"{name}: one head has many transports", "error of the best single transport", "0", single, 0.01, False),
        Check(f"{name}: a sum of H R terms (T3)", "operator Schmidt rank", f"{heads * rank}", float(terms), 0.0),
        compare(
            f"{name}: constant a_r give multi-head attention",
            ("layer with a_r fixed", torch.from_numpy(plain)),
            ("P X, V_h = mean of a_r B_r", mha.apply(field)),
        ),
        compare(f"{name}: b_r may be frozen instead", ("layer", placed), ("P X, b_r held", other @ field)),
        compare(f"{name}: that is another transport", ("a_r held", pair.maps), ("b_r held", other.maps), holds=False),
    )
    return Placed(pair, field, placed, checks=checks)
