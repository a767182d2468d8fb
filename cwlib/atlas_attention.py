"""Atlas: attention as it is used in transformers, and its close relatives."""

import numpy as np
import torch

from cwlib.atlas_pair import Pair, Placed, system
from cwlib.checks import compare
from cwlib.walk import ConnectionWalk


def _softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax of a vector of scores, the way a textbook writes it."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


@system(
    name="Transformer",
    paper="1706.03762",
    walk=r"$W = \frac1H \sum_h \mathrm{softmax}(Q_h K_h^{\mathsf T} / \sqrt{d_h})$",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h V_h$",
    remark="Heads that attend alike share an edge; their transports mix with the gates (T2).",
)
def transformer(seed: int) -> Placed:
    """Multi-head attention with biases, written head by head and token by token (Vaswani et al. 2017, section 3.2)."""
    tokens, d_model, heads, d_head = 6, 8, 2, 4
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, d_model))
    w_q, w_k, w_v = rng.standard_normal((3, heads, d_head, d_model)) / d_model**0.5
    b_v, w_o = rng.standard_normal((heads, d_head)), rng.standard_normal((d_model, heads * d_head))
    b_o = rng.standard_normal(d_model)
    output = np.empty((tokens, d_model))
    for i in range(tokens):
        joined = []
        for h in range(heads):
            weights = _softmax(np.array([w_q[h] @ x[i] @ (w_k[h] @ x[j]) for j in range(tokens)]) / d_head**0.5)
            joined.append(sum(weights[j] * (w_v[h] @ x[j] + b_v[h]) for j in range(tokens)))
        output[i] = w_o @ np.concatenate(joined) + b_o

    field, query, key, value = (torch.from_numpy(a) for a in (x, w_q, w_k, w_v))
    scores = torch.einsum("hae,ie,haf,jf->hij", query, field, key, field) / d_head**0.5
    out = torch.from_numpy(w_o).reshape(d_model, heads, d_head).transpose(0, 1)
    constant = torch.einsum("hda,ha->d", out, torch.from_numpy(b_v)) + torch.from_numpy(b_o)
    walk = ConnectionWalk(scores.softmax(-1), value, out, constant)
    placed = torch.from_numpy(output)
    checks = (
        compare("Transformer: the layer is its walk (T2)", ("attention", placed), ("P X + c", walk.apply(field))),
    )
    return Placed(Pair.from_walk(walk), field, placed, constant.expand(tokens, -1), checks)
