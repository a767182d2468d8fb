"""Atlas: networks on graphs, whose walk follows edges and whose transports are maps of features."""

import numpy as np
import torch
from scipy.special import softmax
from torch import Tensor

from cwlib.atlas_pair import Pair, Placed, defects, system
from cwlib.checks import Check, compare
from cwlib.measures import reversibility_defect
from cwlib.walk import ConnectionWalk


def _graph(rng: np.random.Generator, tokens: int, chords: int) -> np.ndarray:
    """Adjacency of a ring with a few chords: connected, without loops."""
    graph = np.zeros((tokens, tokens))
    graph[np.arange(tokens), np.arange(tokens) - 1] = 1
    far = [(i, j) for j in range(tokens) for i in range(j - 1) if j - i < tokens - 1]
    for pick in rng.choice(len(far), chords, replace=False):
        graph[far[pick]] = 1
    return np.maximum(graph, graph.T)


@system(
    name="Graph attention network",
    paper="1710.10903",
    walk=r"$W = \frac{1}{H} \sum_h \mathrm{softmax}_j\, \mathrm{LeakyReLU}(l^h_i + r^h_j)$",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij} E_h \Theta_h$, $E_h$ a coordinate embedding",
    remark="Concatenated heads add up after coordinate embeddings (T2); a head without its LeakyReLU is reversible.",
)
def graph_attention_network(seed: int) -> Placed:
    """Two concatenated heads before the outer nonlinearity (Velickovic et al. 2018, equations 1 to 5)."""
    tokens, d_in, d_head, heads, slope = 7, 4, 3, 2, 0.2
    rng = np.random.default_rng(seed)
    graph = _graph(rng, tokens, 6) + np.eye(tokens)
    x = rng.standard_normal((tokens, d_in))
    theta, a = rng.standard_normal((heads, d_head, d_in)), rng.standard_normal((heads, 2 * d_head))
    output = np.empty((tokens, heads * d_head))
    for i in range(tokens):
        near, joined = np.flatnonzero(graph[i]), []
        for h in range(heads):
            raw = np.array([a[h] @ np.concatenate([theta[h] @ x[i], theta[h] @ x[j]]) for j in near])
            weights = softmax(np.where(raw > 0, raw, slope * raw))
            joined.append(sum(w * (theta[h] @ x[j]) for w, j in zip(weights, near, strict=True)))
        output[i] = np.concatenate(joined)

    field, maps, edges = torch.from_numpy(x), torch.from_numpy(theta), torch.from_numpy(graph) > 0
    features = torch.einsum("hae,ie->hia", maps, field)
    left, right = torch.einsum("hia,hsa->shi", features, torch.from_numpy(a).reshape(heads, 2, d_head))
    scores = left[:, :, None] + right[:, None, :]
    outside = torch.zeros(tokens, tokens, dtype=torch.float64).masked_fill(~edges, -torch.inf)
    heads_walk = (torch.nn.functional.leaky_relu(scores, slope) + outside).softmax(-1)
    embed = torch.eye(heads * d_head, dtype=torch.float64).reshape(heads * d_head, heads, d_head).transpose(0, 1)
    weight = heads_walk.mean(0)
    gates = heads_walk / (heads * weight).clamp_min(1e-300)
    pair = Pair(weight, heads * torch.einsum("hij,hda,hae->ijde", gates, embed, maps))
    wider = torch.nn.functional.pad(field, (0, heads * d_head - d_in))
    walk = ConnectionWalk(heads_walk, torch.nn.functional.pad(maps, (0, heads * d_head - d_in)), embed)

    linear = (scores + outside).softmax(-1)[0]
    law = right[0].exp() * (edges * right[0].exp()).sum(1)
    draws = torch.from_numpy(rng.standard_normal((2, 20, tokens)))
    bent = (torch.nn.functional.leaky_relu(draws[0, :, :, None] + draws[1, :, None, :], slope) + outside).softmax(-1)
    one = torch.eye(1, dtype=torch.float64)
    broken = sum(defects(Pair.constant(each, one))["reversible"] for each in bent) / len(bent)
    bowed = torch.nn.functional.leaky_relu(scores[0], slope)
    ranked = [each.argsort(-1).double() for each in (bowed, features[0] @ features[0].T)]
    alike = [(("for token i", rows), ("for token 0", rows[:1].expand_as(rows))) for rows in ranked]
    name, placed = "Graph attention network", torch.from_numpy(output)
    checks = (
        compare(f"{name}: concatenation is T2 with embeddings", ("layer", placed), ("P X", walk.apply(wider))),
        compare(f"{name}: on all pairs, tokens rank sources alike", *alike[0]),
        compare(f"{name}: with dot products they do not", *alike[1], holds=False),
        Check(f"{name}: a linear head is reversible", "flow", "transposed", reversibility_defect(linear, law), 1e-12),
        Check(f"{name}: LeakyReLU breaks detailed balance", "mean reversibility defect", "0", broken, 1e-2, False),
    )
    return Placed(pair, field, placed, checks=checks)


@system(
    name="Graph Transformer Network",
    paper="1911.06455",
    walk=r"$W = \frac{1}{2}(I + D^{-1} Q_1 Q_2)$, $Q_l = \sum_t \mathrm{softmax}(\phi_l)_t A_t$",
    transport=r"$\Omega_{ij} = \Theta^\top$",
    remark="A lazy walk along soft meta-paths; with a map per edge type, transports become means over paths.",
)
def graph_transformer_network(seed: int) -> Placed:
    """One Graph Transformer layer of two selections, then a graph convolution (Yun et al. 2019), before the ReLU."""
    tokens, d_model, kinds = 6, 4, 4
    rng = np.random.default_rng(seed)
    typed = np.stack([np.eye(tokens), *(rng.random((kinds - 1, tokens, tokens)) < 0.35)])
    phi, theta = rng.standard_normal((2, kinds)), rng.standard_normal((d_model, d_model))
    relations = np.linalg.qr(rng.standard_normal((kinds, d_model, d_model))).Q
    x = rng.standard_normal((tokens, d_model))
    paths = np.zeros((tokens, tokens))
    for s in range(kinds):
        for t in range(kinds):
            paths += softmax(phi[0])[s] * softmax(phi[1])[t] * typed[s] @ typed[t]
    looped = paths / paths.sum(1, keepdims=True) + np.eye(tokens)
    output = np.stack(
        [sum(looped[i, j] * (x[j] @ theta) for j in range(tokens)) / looped[i].sum() for i in range(tokens)]
    )
    carried = x
    for layer in (1, 0):  # relations act first along the second selection
        select, previous = softmax(phi[layer]), carried
        carried = np.zeros_like(x)
        for i in range(tokens):
            degree = sum(select[t] * typed[t, i].sum() for t in range(kinds))
            for t in range(kinds):
                for j in np.flatnonzero(typed[t, i]):
                    carried[i] += select[t] / degree * (relations[t] @ previous[j])

    field, soft = torch.from_numpy(x), torch.from_numpy(phi).softmax(-1)
    chosen = torch.einsum("lt,tij->ltij", soft, torch.from_numpy(typed))
    product = chosen[0].sum(0) @ chosen[1].sum(0)
    eye = torch.eye(tokens, dtype=torch.float64)
    pair = Pair.constant((eye + product / product.sum(1, keepdim=True)) / 2, torch.from_numpy(theta).T)
    steps = chosen / chosen.sum((1, 3), keepdim=True)
    first, second = (torch.einsum("tij,tab->ijab", each, torch.from_numpy(relations)) for each in steps)
    weight = steps[0].sum(0) @ steps[1].sum(0)
    blocks = torch.einsum("ikab,kjbc->ijac", first, second)
    composed = Pair(weight, blocks / torch.where(weight > 0, weight, 1.0)[..., None, None])
    lost = 1 - float((torch.linalg.matrix_norm(composed.blocks()) / d_model**0.5).sum(1).min())
    bent = defects(composed)["isometric"]
    name = "Graph Transformer Network"
    checks = (
        compare(
            f"{name}: relations compose to means over paths",
            ("two layers", torch.from_numpy(carried)),
            ("P X", composed @ field),
        ),
        Check(f"{name}: path means of isometries are none (T6)", "isometric", "0", bent, 1e-2, False),
        Check(f"{name}: paths that disagree carry less", "least row sum of |K|/sqrt d", "1", lost, 1e-2, False),
    )
    return Placed(pair, field, torch.from_numpy(output), checks=checks)


@system(
    name="Spectral attention network",
    paper="2106.03893",
    walk=r"$W = \frac{1}{H} \sum_h (A^h_E + \gamma A^h_{E^c}) / (1 + \gamma)$, $E$ the edges",
    transport=r"$\Omega_{ij} = H \sum_h \gamma^h_{ij}\, O_h V_h$",
    remark="A mixture of two walks, on edges and off them; its positions are eigenvectors, whose signs are arbitrary.",
)
def spectral_attention_network(seed: int) -> Placed:
    """Attention on a graph and on its complement (Kreuzer et al. 2021); the encoder of positions is cut to one layer.

    As the paper has it, each kind of pair has its own softmax; the authors' code normalises both kinds together.
    """
    tokens, d_model, heads, d_head, waves, gamma = 7, 6, 2, 3, 3, 0.4
    rng = np.random.default_rng(seed)
    graph = _graph(rng, tokens, 3)
    eigenvalues, eigenvectors = np.linalg.eigh(np.diag(graph.sum(1)) - graph)
    features, encoder = rng.standard_normal((tokens, d_model - waves)), rng.uniform(0.5, 1.0, (waves, 2))
    query, key = rng.standard_normal((2, 2, heads, d_head, d_model)) / 3  # [0] on edges, [1] off them
    bond = rng.standard_normal((2, heads, d_head))  # E e_ij, one kind of bond and one of absence
    value, out = rng.standard_normal((heads, d_head, d_model)), rng.standard_normal((heads, d_model, d_head))

    def placed_tokens(vectors: np.ndarray) -> np.ndarray:
        pairs = [[(eigenvalues[k], vectors[i, k]) for k in range(1, waves + 1)] for i in range(tokens)]
        codes = [sum(np.logaddexp(encoder @ pair, 0) for pair in each) for each in pairs]
        return np.concatenate([features, codes], 1)

    x, output = placed_tokens(eigenvectors), np.zeros((tokens, d_model))
    for i in range(tokens):
        for h in range(heads):
            for kind, share in ((0, 1 / (1 + gamma)), (1, gamma / (1 + gamma))):
                near = [j for j in range(tokens) if j != i and graph[i, j] == 1 - kind]
                scores = [((query[kind, h] @ x[i]) * (key[kind, h] @ x[j]) * bond[kind, h]).sum() for j in near]
                weights = softmax(np.array(scores) / d_head**0.5)
                output[i] += share * out[h] @ sum(w * (value[h] @ x[j]) for w, j in zip(weights, near, strict=True))

    edges = torch.from_numpy(graph) > 0
    eye = torch.eye(tokens, dtype=torch.bool)
    allowed = torch.stack([edges, ~edges & ~eye])[:, None]
    q, k, e, v, o = (torch.from_numpy(each) for each in (query, key, bond, value, out))

    def scores_of(tokens_in: Tensor) -> Tensor:
        raw = torch.einsum("rhae,ie,rha,rhaf,jf->rhij", q, tokens_in, e, k, tokens_in) / d_head**0.5
        return raw.masked_fill(~allowed, -torch.inf)

    field = torch.from_numpy(x)
    shares = torch.tensor([1.0, gamma], dtype=torch.float64)[:, None, None, None] / (1 + gamma)
    both = scores_of(field).softmax(-1)
    walk = ConnectionWalk((shares * both).sum(0), v, o)
    parts = [ConnectionWalk(each, v, o) @ field for each in both]
    mixture = (parts[0] + gamma * parts[1]) / (1 + gamma)
    flipped = placed_tokens(eigenvectors * np.array([1, -1, *[1] * (tokens - 2)]))
    turned = (shares * scores_of(torch.from_numpy(flipped)).softmax(-1)).sum(0).mean(0)
    together = shares * scores_of(field).exp()
    share = together[0].sum(-1) / together.sum((0, -1))
    stated = torch.full_like(share, 1 / (1 + gamma))
    name, signs = "Spectral attention network", (("W", walk.effective_walk()), ("with the other sign", turned))
    checks = (
        compare(f"{name}: P mixes two walks", ("P X", walk @ field), ("(P1 X + g P2 X)/(1 + g)", mixture)),
        compare(f"{name}: an eigenvector's sign changes W", *signs, 1e-3, False),
        compare(f"{name}: one softmax for both shares otherwise", ("edges", share), ("1/(1 + g)", stated), holds=False),
    )
    return Placed(Pair.from_walk(walk), field, torch.from_numpy(output), checks=checks)
