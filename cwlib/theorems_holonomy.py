r"""T8 as a numerical check: flat connections are those without holonomy, and what holonomy does to a spectrum.

An addition of this artifact. As in `cwlib.theorems`, left-hand sides are what the package computes and right-hand
sides dense products, closed forms and explicit frames.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from scipy.optimize import linear_sum_assignment
from scipy.sparse.csgraph import breadth_first_order
from torch import Tensor

from cwlib.checks import Check, compare
from cwlib.edges import EdgeWalk
from cwlib.holonomy import cycle_defect, holonomy, parallel_fields, triangle_defect
from cwlib.laplacian import AnyWalk
from cwlib.synthetic import (
    conditioned_walk,
    cycle_walk,
    flat_walk,
    generator,
    random_measure,
    random_metrics,
    random_orthogonal,
    random_walk,
)
from cwlib.walk import ConnectionWalk

F64 = torch.float64
SPECTRAL = 1e-10  #: bound on eigenvalues, inverses of frames and null spaces, which lose a few digits


def check_t8(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T8 (addition): a connection is flat iff no closed walk has holonomy.

    If :math:`\Omega_{ij} = g_ig_j^{-1}` on every edge (flat), then transport around every closed walk is the identity,
    spec(L) = spec(I - W) with every eigenvalue d times, and, if W 1 = 1 and W is irreducible, the kernel of L is
    :math:`x_i = g_ic`, of dimension d. Conversely, if transport around every closed walk is the identity (of which
    :math:`\Omega_{ji} = \Omega_{ij}^{-1}` is the case of length two), transport along a spanning tree gives frames with
    :math:`\Omega_{ij} = g_ig_j^{-1}`.

    A change of frames h conjugates holonomy, :math:`h_{c_0}Hol_ch_{c_0}^{-1}`, and keeps the spectrum. Where an edge
    has no way back its adjoint is used: the inverse for isometries, so that a flat causal walk of isometries has no
    holonomy; without isometry it may have some. The simple walk on an n-cycle whose holonomy is a planar rotation by
    :math:`\theta` has the eigenvalues :math:`1 - \cos((2\pi k \pm \theta)/n)`.

    Parameters
    ----------
    instances : int
        Seeded instances per statement, of 3 to 7 tokens and fibres of dimension 2 to 4.
    seed : int
        First seed.

    Returns
    -------
    list of Check
        Both directions, the defects against dense products, gauge covariance, and counterexamples: prescribed
        holonomy, one transport reversed, no inverse on the way back, a graph of two components, rows that do not sum to
        one, adjoints of transports that are no isometries.
    """
    checks = []
    for s in range(seed, seed + instances):
        tokens, d = 3 + s % 5, 2 + s // 5 % 3
        frames = random_metrics(s, tokens, d) @ random_orthogonal(s + 50, tokens, d)
        checks += _flat(s, frames) + _no_holonomy(s, tokens, d) + _cycle(s, tokens)
        checks += _dense_products(s) + _change_of_frames(s, frames) + _adjoints(s, frames)
    return checks


def _flat(s: int, frames: Tensor) -> list[Check]:
    """Frames give trivial holonomy, the spectrum of W and d parallel fields per component."""
    tokens, d = frames.shape[:2]
    w = random_walk(s, tokens=tokens).effective_walk()  # every edge present, not reversible
    maps = frames[:, None] @ torch.linalg.inv(frames)[None]
    walk, identity, dimension = EdgeWalk.from_dense(w, maps), torch.eye(d, dtype=F64), ("d", _number(d))
    closed = [_closed_walk(walk, 10 * s + k) for k in range(3)]
    arounds, defect = torch.stack([holonomy(walk, c) for c in closed]), max(cycle_defect(walk, c) for c in closed)
    generator_matrix = torch.eye(tokens * d, dtype=F64) - walk.to_dense()
    expected = torch.linalg.eigvals(torch.eye(tokens, dtype=F64) - w).repeat_interleave(d)
    apart = _spectral_distance(torch.linalg.eigvals(generator_matrix), expected)
    basis = _null_space(generator_matrix)
    reversible = flat_walk(s, random_measure(s, tokens), frames)
    parallel = parallel_fields(reversible, random_measure(s, tokens)).flatten(1).T
    spanned = ("span of x_i = g_i c", _projection(frames.flatten(0, 1)))
    double = EdgeWalk.from_dense(torch.block_diag(w, w), maps.repeat(2, 2, 1, 1))
    in_two = _null_space(torch.eye(2 * tokens * d, dtype=F64) - double.to_dense())
    leaky = EdgeWalk.from_dense(w * torch.linspace(0.5, 0.8, tokens, dtype=F64)[:, None], maps)
    leaked = _null_space(torch.eye(tokens * d, dtype=F64) - leaky.to_dense())
    return [
        compare("T8 flat: no holonomy", ("Hol_c", arounds), ("I", identity.expand(3, d, d)), bound=SPECTRAL),
        Check("T8 flat: spectrum", "spec(L)", "spec(I - W), each d times", apart, SPECTRAL),
        Check("T8 flat: defect", "largest squared defect of a closed walk", "0", defect**2, 1e-12),
        compare("T8 flat: dimension of the kernel", ("dim ker L", _count(basis)), dimension),
        compare("T8 flat: kernel", ("ker L", _projection(basis)), spanned, bound=SPECTRAL),
        compare("T8 flat: parallel fields", ("parallel_fields", _projection(parallel)), spanned, bound=SPECTRAL),
        compare("T8 flat, two components", ("dim ker L", _count(in_two)), ("2 d", _number(2 * d))),
        compare("T8 flat, not connected", ("dim ker L", _count(in_two)), dimension, holds=False),
        compare("T8 flat, without W 1 = 1", ("dim ker L", _count(leaked)), dimension, holds=False),
    ]


def _no_holonomy(s: int, tokens: int, d: int) -> list[Check]:
    """Transport along a spanning tree gives frames iff no closed walk has holonomy."""
    walk = _tree_and_chords(s, tokens, d)
    closed = [_closed_walk(walk, 10 * s + k) for k in range(3)]
    arounds = torch.stack([holonomy(walk, cycle) for cycle in closed])
    sign = torch.ones(len(walk.maps), 1, 1, dtype=F64)
    sign[[len(sign) // 2 - 1, -1]] = -1  # the last chord and its way back
    twisted = replace(walk, maps=sign * walk.maps)
    kernel = _null_space(torch.eye(tokens * d, dtype=F64) - twisted.to_dense())
    tree = _tree_and_chords(s, tokens, d, chords=False)
    downward = tree.maps @ random_metrics(s + 9, len(tree.maps), d)
    one_way = replace(tree, maps=torch.where((tree.dst < tree.src)[:, None, None], downward, tree.maps))
    edges, product = "Omega_ij on every edge", "g_i g_j^-1, g along a spanning tree"
    return [
        compare("T8 no holonomy on the walks sampled", ("Hol_c", arounds),
                ("I", torch.eye(d, dtype=F64).expand(3, d, d)), bound=SPECTRAL),
        compare("T8 no holonomy: flat", (edges, walk.maps), (product, _along_a_tree(walk)), bound=SPECTRAL),
        compare("T8 one transport reversed: not flat", (edges, twisted.maps), (product, _along_a_tree(twisted)),
                holds=False),
        compare("T8 one transport reversed: kernel", ("dim ker L", _count(kernel)), ("d", _number(d)), holds=False),
        compare("T8 no inverse on the way back", (edges, one_way.maps), (product, _along_a_tree(one_way)), holds=False),
    ]  # fmt: skip


def _cycle(s: int, tokens: int) -> list[Check]:
    """A cycle with prescribed holonomy."""
    theta = 1 + (torch.pi - 1) * torch.rand((), dtype=F64, generator=generator(s))
    turn = torch.stack([theta.cos(), -theta.sin(), theta.sin(), theta.cos()]).reshape(2, 2)
    walk, cycle = cycle_walk(tokens, turn), [0, *range(tokens - 1, 0, -1)]
    k = 2 * torch.pi * torch.arange(tokens, dtype=F64)
    closed = torch.cat([1 - ((k + theta) / tokens).cos(), 1 - ((k - theta) / tokens).cos()]).sort().values
    spectrum = ("spec(L)", torch.linalg.eigvalsh(torch.eye(2 * tokens, dtype=F64) - walk.to_dense()))
    untwisted = (1 - (k / tokens).cos()).repeat_interleave(2).sort().values
    flat = cycle_walk(tokens, torch.eye(2, dtype=F64))
    dims = [_count(parallel_fields(w, torch.ones(tokens, dtype=F64)).flatten(1).T) for w in (flat, walk)]
    least = theta.sin() if theta < torch.pi / 2 else torch.ones((), dtype=F64)  # s = 0 beyond a right angle
    return [
        compare("T8 cycle: holonomy", ("Hol_c", holonomy(walk, cycle)), ("rotation by theta", turn)),
        compare("T8 cycle: spectrum", spectrum, ("1 - cos((2 pi k +- theta)/n)", closed), bound=SPECTRAL),
        compare("T8 cycle: defect", ("defect of the cycle", _number(cycle_defect(walk, cycle))),
                ("sin theta, or 1 beyond a right angle", least), bound=SPECTRAL),
        compare("T8 cycle: theta = 0", ("dim parallel fields", dims[0]), ("d", _number(2))),
        compare("T8 cycle: theta > 0", ("dim parallel fields", dims[1]), ("0", _number(0))),
        compare("T8 prescribed holonomy", spectrum, ("spec(I - W), each d times", untwisted), holds=False),
    ]  # fmt: skip


def _dense_products(s: int) -> list[Check]:
    """Defects of attention layers and of explicit walks, against blocks of the dense operator."""
    full, causal = (_tempered(random_walk(s, 3, 5, 3, 2, causal=causal)) for causal in (False, True))
    explicit = conditioned_walk(s, random_measure(s, 5), 3, isometric=False, inverse=False)
    frames = random_metrics(s, 5, 4)
    # a direction that every transport forgets: the products of these have rank 3, too
    deficient = replace(explicit, maps=torch.nn.functional.pad(explicit.maps, (0, 1, 0, 1))).change_frames(frames)
    checks = []
    for walk in (full, causal, explicit, deficient):
        order = torch.randperm(walk.n_dst, generator=generator(s)).tolist()
        cycle = order[: 3 if isinstance(walk, ConnectionWalk) else 3 + s % 3]
        around = _dense_holonomy(walk, cycle)
        defect = _number(cycle_defect(walk, cycle))
        checks.append(compare("T8 holonomy", ("Hol_c", holonomy(walk, cycle)), ("product of blocks of K", around)))
        checks.append(compare("T8 defect of a closed walk", ("from the trace", defect),
                              ("min_s |s Hol_c - Pi_c|/|Pi_c|", _least_defect(around)), bound=SPECTRAL))  # fmt: skip
        i, j, k = sorted(order[:3], reverse=True)  # downwards, so that causal walks have all three edges
        path, direct = _block(walk, i, j) @ _block(walk, j, k), _block(walk, i, k)
        cosine = (path * direct).sum() / (path.square().sum() * direct.square().sum()).sqrt()
        found = ("triangle_defect", _number(triangle_defect(walk, i, j, k)))
        checks.append(compare("T8 defect of a triangle", found, ("1 - |cos(path, direct)|", 1 - cosine.abs())))
    return checks


def _change_of_frames(s: int, frames: Tensor) -> list[Check]:
    tokens, d = frames.shape[:2]
    walk = conditioned_walk(s, random_measure(s, tokens), d, isometric=s % 2 == 0, inverse=s % 3 == 0)
    moved, cycle = walk.change_frames(frames), _closed_walk(walk, s)
    conjugate = frames[cycle[0]] @ holonomy(walk, cycle) @ torch.linalg.inv(frames[cycle[0]])
    spectra = [torch.linalg.eigvals(w.to_dense()) for w in (moved, walk)]
    kept = _spectral_distance(*spectra)
    return [
        compare("T8 change of frames: holonomy", ("Hol_c after", holonomy(moved, cycle)), ("h Hol_c h^-1", conjugate),
                bound=SPECTRAL),
        Check("T8 change of frames: spectrum", "spec(P) after", "spec(P)", kept, SPECTRAL),
    ]  # fmt: skip


def _adjoints(s: int, frames: Tensor) -> list[Check]:
    """A flat causal walk: transports back are adjoints."""
    tokens, d = frames.shape[:2]
    w = random_walk(s, tokens=tokens, causal=True).effective_walk()
    arounds = []
    for g in (random_orthogonal(s, tokens, d), frames):
        walk = EdgeWalk.from_dense(w, g[:, None] @ torch.linalg.inv(g)[None])
        arounds.append(holonomy(walk, range(tokens)))
    identity = ("I", torch.eye(d, dtype=F64))
    return [
        compare("T8 flat causal walk of isometries", ("Hol_c with adjoints", arounds[0]), identity),
        compare("T8 adjoints without isometry", ("Hol_c with adjoints", arounds[1]), identity, holds=False),
    ]


# --- instances and dense sides ---------------------------------------------------------------------------------------


def _tree_and_chords(s: int, tokens: int, d: int, chords: bool = True) -> EdgeWalk:
    """The simple walk on a random tree and half of the other edges, which carry the transport along the tree."""
    rng = generator(s)
    parent = [int(torch.randint(0, max(i, 1), (), generator=rng)) for i in range(tokens)]
    up = random_metrics(s, tokens, d) @ random_orthogonal(s + 50, tokens, d)  # Omega_{i, parent of i}

    def from_root(i: int) -> Tensor:
        return up[i] @ from_root(parent[i]) if i else torch.eye(d, dtype=F64)

    maps = {(i, parent[i]): up[i] for i in range(1, tokens)}
    others = [(i, j) for i in range(tokens) for j in range(i) if (i, j) not in maps]
    if chords:
        maps |= {(i, j): from_root(i) @ torch.linalg.inv(from_root(j)) for i, j in others[::2]}
    dst, src = torch.tensor([*maps, *[(j, i) for i, j in maps]]).T
    matrices = torch.stack(list(maps.values()))
    degree = torch.bincount(dst).to(F64)
    return EdgeWalk(tokens, dst, src, 1 / degree[dst], torch.cat([matrices, torch.linalg.inv(matrices)]))


def _tree(walk: EdgeWalk) -> tuple[list[int], list[int]]:
    """Tokens in breadth-first order from the last one, and the predecessor of each."""
    order, before = breadth_first_order(walk.support.numpy(), walk.tokens - 1)
    return order.tolist(), before.tolist()


def _along_a_tree(walk: EdgeWalk) -> Tensor:
    """g_i g_j^-1 on every edge, with frames by transport along a spanning tree."""
    order, before = _tree(walk)
    frames = torch.eye(walk.d_model, dtype=F64).repeat(walk.tokens, 1, 1)
    for token in order[1:]:
        frames[token] = walk.transport(token, before[token]) @ frames[before[token]]
    return frames[walk.dst] @ torch.linalg.inv(frames)[walk.src]


def _closed_walk(walk: EdgeWalk, seed: int) -> list[int]:
    """Six random steps from the last token, and back to it along a spanning tree."""
    rng, before = generator(seed), _tree(walk)[1]
    cycle = [walk.tokens - 1]
    for _ in range(6):
        onward = walk.src[walk.dst == cycle[-1]]
        cycle.append(int(onward[int(torch.randint(len(onward), (), generator=rng))]))
    while cycle[-1] != walk.tokens - 1:
        cycle.append(before[cycle[-1]])
    return cycle[:-1]


def _tempered(walk: ConnectionWalk) -> ConnectionWalk:
    """The same heads, whose attention is mixed with the uniform one, so that no gate is tiny."""
    even = walk.support / walk.support.sum(1, keepdim=True)
    return replace(walk, attention=(walk.attention + even) / 2)


def _block(walk: AnyWalk, i: int, j: int) -> Tensor:
    d = walk.d_model
    return walk.to_dense()[i * d : (i + 1) * d, j * d : (j + 1) * d] / walk.effective_walk()[i, j]


def _dense_holonomy(walk: AnyWalk, cycle: Sequence[int]) -> Tensor:
    product = torch.eye(walk.d_model, dtype=F64)
    for i, j in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        product = product @ (_block(walk, i, j) if walk.effective_walk()[i, j] > 0 else _block(walk, j, i).T)
    return product


def _least_defect(around: Tensor) -> Tensor:
    """Least squares over the scale; three rows span the row space."""
    rows = _projection(around[:3].T)
    s = torch.linalg.lstsq(around.reshape(-1, 1), rows.reshape(-1, 1)).solution.clamp_min(0)
    return (s * around - rows).norm() / rows.norm()


def _spectral_distance(left: Tensor, right: Tensor) -> float:
    """Largest distance between eigenvalues of two spectra, matched one to one, over the largest eigenvalue."""
    apart = (left[:, None] - right[None, :]).abs()
    rows, columns = linear_sum_assignment(apart.numpy())
    return float(apart[rows, columns].max() / right.abs().max())


def _null_space(matrix: Tensor) -> Tensor:
    _, values, rows = torch.linalg.svd(matrix)
    return rows[values <= 1e-9 * values[0]].T


def _projection(columns: Tensor) -> Tensor:
    basis = torch.linalg.qr(columns).Q
    return basis @ basis.T


def _count(columns: Tensor) -> Tensor:
    return _number(columns.shape[1])


def _number(value: float | int) -> Tensor:
    return torch.tensor(value, dtype=F64)
