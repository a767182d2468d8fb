"""Naive oracles: every quantity from its definition, with loops over tokens, heads and edges, in NumPy alone.

Nothing here knows torch or cwlib, so that a mistake would have to be made twice, in two ways, to go unseen. Dense
d_model x d_model transports and the dense operator are formed freely; sizes are small.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Layer:
    """One attention layer.

    ``attention`` is (head, dst, src), ``value`` (kv_head, d_head, d_model) and ``output`` (head, d_model, d_head).
    """

    attention: Array
    value: Array
    output: Array
    groups: int = 1

    @property
    def parts(self) -> tuple[Array, Array, Array]:
        return self.attention, self.value, self.output

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Heads, destinations, sources, d_model, d_head."""
        heads, n_dst, n_src = self.attention.shape
        return heads, n_dst, n_src, self.output.shape[1], self.output.shape[2]


# What each kind of layer fixes; the seed draws the other sizes. "tokens" fixes destinations and sources.
KINDS: dict[str, dict] = {
    "full": {},
    "causal": {"causal": True},
    "zeros": {"zeros": 0.5},
    "causal zeros": {"zeros": 0.4, "causal": True},
    "grouped": {"heads": 4, "groups": 2},
    "grouped causal": {"heads": 6, "groups": 2, "causal": True},
    "grouped zeros": {"heads": 6, "groups": 3, "zeros": 0.6},
    "one value head": {"heads": 3, "groups": 3},
    "more sources": {"n_dst": 3, "n_src": 7},
    "more destinations": {"n_dst": 6, "n_src": 2, "zeros": 0.3},
    "more heads than edges": {"heads": 6, "tokens": 2},
    "d_head above d_model": {"d_model": 3, "d_head": 5},
    "heads fill d_model": {"heads": 4, "d_model": 5, "d_head": 2},
    "one token": {"tokens": 1},
    "one source": {"n_dst": 4, "n_src": 1},
    "one head": {"heads": 1},
    "one of each": {"heads": 1, "tokens": 1, "d_model": 1, "d_head": 1},
    "thin heads": {"d_head": 1},
}


def instance(kind: str, seed: int) -> Layer:
    """A Gaussian layer of the kind, with softmax attention; exact zeros where the kind asks for them."""
    rng = np.random.default_rng([list(KINDS).index(kind), seed])
    tokens = int(rng.integers(3, 7))
    drawn = {"heads": int(rng.integers(2, 5)), "d_model": int(rng.integers(5, 10)), "d_head": int(rng.integers(2, 4))}
    shape = {"groups": 1, "zeros": 0.0, "causal": False, "tokens": tokens} | drawn | KINDS[kind]
    n_dst, n_src = shape.get("n_dst", shape["tokens"]), shape.get("n_src", shape["tokens"])
    heads, groups, d_model, d_head = shape["heads"], shape["groups"], shape["d_model"], shape["d_head"]
    attention = np.zeros((heads, n_dst, n_src))
    # Some edges carry no weight in any head, others in some heads only.
    cut = rng.random((n_dst, n_src)) < shape["zeros"] / 2
    for h in range(heads):
        for i in range(n_dst):
            weights = np.exp(1.5 * rng.standard_normal(n_src))
            for j in range(n_src):
                dropped = cut[i, j] or rng.random() < shape["zeros"] / 2
                if (dropped and j != i % n_src) or (shape["causal"] and j > i):
                    weights[j] = 0.0
            attention[h, i] = weights / weights.sum()
    value = rng.standard_normal((heads // groups, d_head, d_model)) / np.sqrt(d_model)
    output = rng.standard_normal((heads, d_model, d_head)) / np.sqrt(d_head)
    return Layer(attention, value, output, groups)


def agree(actual: ArrayLike, expected: ArrayLike, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Assert equality of shapes and entries; NaN equals NaN."""
    actual, expected = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


# --- transports and the operator -------------------------------------------------------------------------------------


def transports(layer: Layer) -> list[Array]:
    """T_h = O_h V_h; query head h reads value head h // groups."""
    return [layer.output[h] @ layer.value[h // layer.groups] for h in range(layer.shape[0])]


def total(layer: Layer) -> Array:
    return sum(transports(layer))


def apply(layer: Layer, field: Array) -> Array:
    """y_i = sum_h sum_j A^h_ij T_h x_j."""
    heads, n_dst, n_src, d_model, _ = layer.shape
    maps, result = transports(layer), np.zeros((n_dst, d_model))
    for h in range(heads):
        for i in range(n_dst):
            for j in range(n_src):
                result[i] += layer.attention[h, i, j] * (maps[h] @ field[j])
    return result


def block(layer: Layer, i: int, j: int) -> Array:
    """K_ij = sum_h A^h_ij T_h."""
    return sum(layer.attention[h, i, j] * t for h, t in enumerate(transports(layer)))


def operator(layer: Layer) -> Array:
    """K with block (i, j) at rows i d.. and columns j d.."""
    _, n_dst, n_src, d, _ = layer.shape
    dense = np.zeros((n_dst * d, n_src * d))
    for i in range(n_dst):
        for j in range(n_src):
            dense[i * d : (i + 1) * d, j * d : (j + 1) * d] = block(layer, i, j)
    return dense


def support(layer: Layer) -> list[tuple[int, int]]:
    _, n_dst, n_src, _, _ = layer.shape
    return [(i, j) for i in range(n_dst) for j in range(n_src) if any(a[i, j] > 0 for a in layer.attention)]


def walk(layer: Layer, gauge: str) -> Array:
    """W of the gauge, edge by edge."""
    heads, n_dst, n_src, d, _ = layer.shape
    matrix = np.zeros((n_dst, n_src))
    for i in range(n_dst):
        for j in range(n_src):
            if gauge == "norm":
                matrix[i, j] = np.sqrt((block(layer, i, j) ** 2).sum() / d)
            else:
                matrix[i, j] = sum(layer.attention[:, i, j]) / (heads if gauge == "mean" else 1)
    return matrix


def gates(layer: Layer) -> Array:
    """A^h_ij / sum_k A^k_ij on the support, zero off it."""
    result = np.zeros_like(layer.attention)
    for i, j in support(layer):
        for h in range(layer.shape[0]):
            result[h, i, j] = layer.attention[h, i, j] / sum(layer.attention[:, i, j])
    return result


def transport(layer: Layer, i: int, j: int, gauge: str = "mean") -> Array:
    """Omega_ij: H sum_h gamma T_h, sum_h gamma T_h, or the latter scaled to norm sqrt(d)."""
    heads, _, _, d, _ = layer.shape
    weights = gates(layer)[:, i, j]
    mixture = sum(weights[h] * t for h, t in enumerate(transports(layer)))
    return {"mean": heads, "sum": 1.0, "norm": np.sqrt(d) / np.linalg.norm(mixture)}[gauge] * mixture


def realigned(layer: Layer) -> Array:
    """R: one row vec(K_ij) per edge."""
    _, n_dst, n_src, _, _ = layer.shape
    return np.array([block(layer, i, j).reshape(-1) for i in range(n_dst) for j in range(n_src)])


def schmidt(layer: Layer) -> Array:
    """The H largest singular values of R, padded with zeros."""
    values = np.linalg.svd(realigned(layer), compute_uv=False)[: layer.shape[0]]
    return np.concatenate([values, np.zeros(layer.shape[0] - len(values))])


def attention_gram(left: Layer, right: Layer) -> Array:
    return np.array([[(a * b).sum() for b in right.attention] for a in left.attention])


# --- traces of products of transports --------------------------------------------------------------------------------


def gram(left: Layer, right: Layer) -> Array:
    return np.array([[np.trace(t.T @ s) for s in transports(right)] for t in transports(left)])


def quartic(layer: Layer) -> Array:
    """tr(T_k^T T_h T_l^T T_m) at [k, h, l, m]."""
    maps = transports(layer)
    return np.array(
        [[[[np.trace(k.T @ h @ u.T @ m) for m in maps] for u in maps] for h in maps] for k in maps]
    )  # fmt: skip


def cubic_of_paths(layer: Layer) -> Array:
    """tr((T_h T_l)^T T_m) at [h, l, m]."""
    maps = transports(layer)
    return np.array([[[np.trace((h @ u).T @ m) for m in maps] for u in maps] for h in maps])


def quartic_of_paths(layer: Layer) -> Array:
    """tr((T_h T_l)^T T_h' T_l') at [h, h', l, l']."""
    maps = transports(layer)
    return np.array(
        [[[[np.trace((h @ u).T @ g @ w) for w in maps] for u in maps] for g in maps] for h in maps]
    )  # fmt: skip


def product_traces(layer: Layer) -> Array:
    return np.array([[np.trace(t @ s) for s in transports(layer)] for t in transports(layer)])


def singular_values(layer: Layer) -> Array:
    """The min(d_head, d_model) largest singular values of every T_h."""
    rank = min(layer.shape[3], layer.shape[4])
    return np.array([np.linalg.svd(t, compute_uv=False)[:rank] for t in transports(layer)])


# --- isometry --------------------------------------------------------------------------------------------------------


def isometry(matrix: Array, rank: int) -> float:
    """(sum s^2)^2 / (r sum s^4) of the singular values s."""
    s = np.linalg.svd(matrix, compute_uv=False)
    return float((s**2).sum() ** 2 / (rank * (s**4).sum()))


def distance_from_scaled_projection(matrix: Array, rank: int) -> float:
    """min_c |T^T T - c Pi|_F / |T^T T|_F, Pi the projection on the r leading right singular vectors (T7)."""
    square = matrix.T @ matrix
    right = np.linalg.svd(matrix)[2][:rank]
    projection = right.T @ right
    c = (square * projection).sum() / (projection**2).sum()
    return float(np.linalg.norm(square - c * projection) / np.linalg.norm(square))


def rank_bound(layer: Layer, i: int, j: int) -> int:
    """Width of the active value heads, at most d_model (T7)."""
    active = {h // layer.groups for h in range(layer.shape[0]) if layer.attention[h, i, j] > 0}
    return min(len(active) * layer.shape[4], layer.shape[3])


def edge_isometries(layer: Layer) -> Array:
    """Isometry of every edge by SVD; NaN off the support."""
    result = np.full(layer.attention.shape[1:], np.nan)
    for i, j in support(layer):
        result[i, j] = isometry(block(layer, i, j), rank_bound(layer, i, j))
    return result


# --- token walks -----------------------------------------------------------------------------------------------------


def is_irreducible(matrix: Array) -> bool:
    """Every token reaches every other: breadth-first search from each."""
    n = len(matrix)
    for start in range(n):
        reached, frontier = {start}, [start]
        while frontier:
            i = frontier.pop()
            for j in range(n):
                if matrix[i, j] > 0 and j not in reached:
                    reached.add(j)
                    frontier.append(j)
        if len(reached) < n:
            return False
    return True


def stationary_law(matrix: Array) -> Array:
    """The left eigenvector of eigenvalue one, normalised to sum one."""
    values, vectors = np.linalg.eig(matrix.T)
    vector = vectors[:, np.argmin(abs(values - 1))].real
    return vector / vector.sum()


def measure(matrix: Array) -> Array:
    """Stationary if irreducible, else uniform."""
    return stationary_law(matrix) if is_irreducible(matrix) else np.full(len(matrix), 1 / len(matrix))


def reversibilised_walk(matrix: Array, pi: Array) -> Array:
    """The walk that follows the flow pi_i W_ij in either direction with equal probability."""
    n = len(matrix)
    flow = np.array([[(pi[i] * matrix[i, j] + pi[j] * matrix[j, i]) / 2 for j in range(n)] for i in range(n)])
    return np.array([row / row.sum() for row in flow])


def reversibilised_spectrum(matrix: Array, pi: Array) -> Array:
    """Eigenvalues of that walk, as of any matrix (not of a symmetric one), ascending."""
    values = np.linalg.eigvals(reversibilised_walk(matrix, pi))
    assert abs(np.imag(values)).max() < 1e-9
    return np.sort(np.real(values))


def reversibility_defect(matrix: Array, pi: Array) -> float:
    n, odd, even = len(matrix), 0.0, 0.0
    for i in range(n):
        for j in range(n):
            there, back = pi[i] * matrix[i, j], pi[j] * matrix[j, i]
            odd, even = odd + (there - back) ** 2, even + (there + back) ** 2
    return float(np.sqrt(odd / even))


def spectral_gap(matrix: Array) -> float:
    return float(1 - reversibilised_spectrum(matrix, measure(matrix))[-2])


def spectral_step(before: Array, after: Array) -> float:
    """Wasserstein-1 distance of two spectra of equal size: matched in order."""
    spectra = [reversibilised_spectrum(w, measure(w)) for w in (before, after)]
    return float(np.mean([abs(a - b) for a, b in zip(*spectra, strict=True)]))


def depth_step(before: Array, after: Array) -> float:
    rows = [sum(abs(b - a) for a, b in zip(u, v, strict=True)) / 2 for u, v in zip(before, after, strict=True)]
    return sum(rows) / len(rows)


def entropy_rate(matrix: Array, pi: Array) -> float:
    n = len(matrix)
    return -sum(pi[i] * w * np.log(w) for i in range(n) for w in matrix[i] if w > 0)


def sink_mass(matrix: Array) -> float:
    """Mean weight that tokens 8, 9, ... give token 0."""
    return float(np.mean([matrix[i, 0] for i in range(8, len(matrix))]))


# --- metrics of walks and transports ---------------------------------------------------------------------------------


def operator_cosine(before: Layer, after: Layer) -> float:
    left, right = operator(before), operator(after)
    return float((left * right).sum() / (np.linalg.norm(left) * np.linalg.norm(right)))


def schmidt_participation(layer: Layer) -> float:
    s = np.linalg.svd(realigned(layer), compute_uv=False)
    return float((s**2).sum() ** 2 / (s**4).sum())


def single_walk_error(layer: Layer) -> float:
    """Distance to the best a (x) T, built as a dense operator from the leading singular pair of R."""
    _, n_dst, n_src, d, _ = layer.shape
    left, s, right = np.linalg.svd(realigned(layer), full_matrices=False)
    best = np.kron(left[:, 0].reshape(n_dst, n_src), s[0] * right[0].reshape(d, d))
    dense = operator(layer)
    return float(np.linalg.norm(dense - best) / np.linalg.norm(dense))


def head_isometry(layer: Layer) -> Array:
    return np.array([isometry(t, min(layer.shape[3], layer.shape[4])) for t in transports(layer)])


def sum_isometry(layer: Layer) -> float:
    return isometry(total(layer), min(layer.shape[3], len(layer.value) * layer.shape[4]))


def edge_isometry(layer: Layer) -> float:
    """Mean over edges, weighted with W."""
    isometries, weights = edge_isometries(layer), walk(layer, "mean")
    edges = support(layer)
    return sum(weights[e] * isometries[e] for e in edges) / sum(weights[e] for e in edges)


def symmetry(layer: Layer) -> float:
    t = total(layer)
    return float((((t + t.T) / 2) ** 2).sum() / (t**2).sum())


def identity_alignment(layer: Layer) -> float:
    t, identity = total(layer), np.eye(layer.shape[3])
    return float((t * identity).sum() / (np.linalg.norm(t) * np.linalg.norm(identity)))


def norm_cv(layer: Layer, field: Array) -> float:
    """Standard deviation of the population, over the mean."""
    ratios = [np.linalg.norm(total(layer) @ x) / np.linalg.norm(x) for x in field]
    mean = sum(ratios) / len(ratios)
    return float(np.sqrt(sum((r - mean) ** 2 for r in ratios) / len(ratios)) / mean)


def angle_correlation(layer: Layer, field: Array) -> float:
    def cosines(vectors: list[Array]) -> Array:
        pairs = [(x, y) for i, x in enumerate(vectors) for y in vectors[i + 1 :]]
        return np.array([x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in pairs])

    before, after = cosines(list(field)), cosines([total(layer) @ x for x in field])
    before, after = before - before.mean(), after - after.mean()
    return float((before * after).sum() / np.sqrt((before**2).sum() * (after**2).sum()))


def holonomy_defect(layer: Layer, triangles: ArrayLike) -> float:
    """1 - |cos| between the path k -> j -> i and the direct edge k -> i, on average.

    K_ij stands for Omega_ij: a positive factor per edge does not change the cosine.
    """
    defects = []
    for i, j, k in np.asarray(triangles):
        path, direct = block(layer, i, j) @ block(layer, j, k), block(layer, i, k)
        cosine = (path * direct).sum() / (np.linalg.norm(path) * np.linalg.norm(direct))
        defects.append(1 - abs(cosine))
    return float(np.mean(defects))
