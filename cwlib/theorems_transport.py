r"""T6 and T7 as numerical checks: mixing heads contracts, and the number of heads bounds the rank of a transport.

Both are additions of this artifact. As in `cwlib.theorems`, left-hand sides are what the package computes and
right-hand sides explicit sums and dense matrices; every hypothesis is broken once, alone, and the conclusion must then
visibly fail.
"""

import torch
from torch import Tensor

from cwlib.checks import Check, compare
from cwlib.cores import HeadTransports
from cwlib.synthetic import generator, isometric_transports, random_orthogonal, random_walk, varied_shapes
from cwlib.walk import ConnectionWalk

F64 = torch.float64
FORMULA = "sum g_h |T_h|^2 - 1/2 sum g_h g_k |T_h - T_k|^2"


def _maps(walk: ConnectionWalk) -> Tensor:
    """The dense transports T_h = O_h V_h, (head, d_model, d_model)."""
    return walk.output @ walk.value.repeat_interleave(walk.groups, 0)


def _omegas(walk: ConnectionWalk, edges: list[list[int]], gauge: str = "sum") -> Tensor:
    return torch.stack([walk.transport(i, j, gauge) for i, j in edges])


def _grams(maps: Tensor) -> Tensor:
    return maps.transpose(-1, -2) @ maps


def _mean_less_spread(gates: Tensor, maps: Tensor) -> Tensor:
    """sum_h g_h |T_h|^2 - 1/2 sum_hk g_h g_k |T_h - T_k|^2, term by term."""
    return sum(g * t.square().sum() for g, t in zip(gates, maps, strict=True)) - _spread(gates, maps)


def _spread(gates: Tensor, maps: Tensor) -> Tensor:
    apart = (maps[:, None] - maps[None, :]).square().sum((2, 3))
    return (gates[:, None] * gates[None, :] * apart).sum() / 2


def check_t6(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T6 (addition): mixing heads contracts.

    For numbers :math:`\gamma_h` that sum to one,

    .. math::
        \Big|\sum_h\gamma_hT_h\Big|_F^2 = \sum_h\gamma_h|T_h|_F^2 - \tfrac12\sum_{hk}\gamma_h\gamma_k|T_h - T_k|_F^2 .

    So where all :math:`T_h` with :math:`\gamma_h > 0` (the active heads) are isometries of one scale s, their mixture
    is an isometry of scale s iff they agree: its :math:`|\cdot|_F^2` falls short of :math:`s^2d` by the last sum. It
    may be an isometry of a smaller scale, as mixtures of planar rotations are. For gates that are not negative,
    :math:`|\Omega_{ij}| \le \max_h|T_h|` over the active heads in every norm, in the sum gauge.

    Parameters
    ----------
    instances : int
        Seeded instances per statement; shapes vary with the seed.
    seed : int
        First seed.

    Returns
    -------
    list of Check
        The identity, the bound in two norms, both directions of the equivalence, and counterexamples: gates that do not
        sum to one (identity and bound), a negative gate (bound), isometries of two scales (equivalence), and a mixture
        that is an isometry of another scale.
    """
    checks = []
    for s in range(seed, seed + instances):
        walk = random_walk(s, causal=s % 3 == 0, **varied_shapes(s))
        maps, edges = _maps(walk), walk.support.nonzero().tolist()
        omegas, weights = _omegas(walk, edges), [walk.attention[:, i, j] for i, j in edges]
        squares = omegas.square().sum((1, 2))
        explicit = torch.stack([_mean_less_spread(a / a.sum(), maps) for a in weights])
        checks.append(compare("T6 mixture", ("|Omega_ij|_F^2", squares), (FORMULA, explicit)))
        leaky = torch.stack([_mean_less_spread(walk.heads * a / a.sum(), maps) for a in weights])
        checks.append(compare("T6 identity for gates that sum to H", ("|H Omega_ij|_F^2", walk.heads**2 * squares),
                              (FORMULA, leaky), holds=False))  # fmt: skip
        for norm, order in (("Frobenius", "fro"), ("spectral", 2)):
            largest = torch.stack([torch.linalg.matrix_norm(maps[a > 0], order).max() for a in weights])
            excess = float((torch.linalg.matrix_norm(omegas, order) / largest - 1).max().clamp_min(0))
            checks.append(Check(f"T6 bound, {norm} norm", "max(|Omega_ij| / max_h |T_h| - 1, 0)", "0", excess, 1e-12))
        checks += _isometries_of_one_scale(s)
    return checks


def _isometries_of_one_scale(s: int) -> list[Check]:
    """All heads but the last agree, and the last is active on loops only."""
    heads, d, scale = 2 + s % 3, 3 + s % 4, 0.5 + s % 5 / 2
    isometries = isometric_transports(s, heads + 1, d, scale)
    output = isometries.output[[0] * heads + [heads]]
    if (output[0] * output[-1]).sum() > 0:  # the last head turns away from the others: a mixture loses length for sure
        output[-1] = -output[-1]
    agreeing = HeadTransports(isometries.value, output)
    attention = random_walk(s, heads=heads + 1, tokens=4, d_model=d).attention / 2 + 1 / 8
    attention[-1] = torch.eye(4, dtype=F64)
    walk = ConnectionWalk.from_transports(attention, agreeing)
    pairs, loops = torch.argwhere(~torch.eye(4, dtype=torch.bool)).tolist(), [[i, i] for i in range(4)]
    s_squared = scale**2 * torch.eye(d, dtype=F64)
    target = ("s^2 I", s_squared.expand(12, d, d))
    gram, omegas = "Omega_ij^T Omega_ij", _omegas(walk, pairs)
    one = ("1", torch.ones(12, dtype=F64))
    found = torch.stack([walk.edge_isometry()[i, j] for i, j in pairs])
    checks = [
        compare("T6 active heads agree: Gram matrix", (gram, _grams(omegas)), target),
        compare("T6 active heads agree: isometry", ("isometry of Omega_ij", found), one),
    ]
    apart = _omegas(ConnectionWalk.from_transports(attention, isometries), pairs)
    checks.append(compare("T6 active heads differ", (gram, _grams(apart)), target, holds=False))
    mixed, gates = _omegas(walk, loops), attention / attention.sum(0)
    checks.append(compare("T6 one active head differs", (gram, _grams(mixed)), ("s^2 I", s_squared.expand(4, d, d)),
                          holds=False))  # fmt: skip
    missing = scale**2 * d - mixed.square().sum((1, 2))
    spread = torch.stack([_spread(gates[:, i, i], _maps(walk)) for i in range(4)])
    checks.append(compare("T6 what disagreement takes", ("s^2 d - |Omega_ij|_F^2", missing),
                          ("1/2 sum g_h g_k |T_h - T_k|^2", spread)))  # fmt: skip

    summed = float(torch.linalg.matrix_norm(_omegas(walk, pairs, "mean"), 2).min()) / scale - 1
    checks.append(
        Check("T6 bound for gates that sum to H", "|H Omega_ij|_2 / max_h |T_h| - 1", "0", summed, 1e-2, False)
    )
    return checks + _signed_gates(_maps(walk)[[0, -1]], scale) + _other_scales(s, _maps(walk)[0], s_squared)


def _signed_gates(maps: Tensor, scale: float) -> list[Check]:
    """Two isometries with the gates 2 and -1: the identity holds, the bound does not."""
    beyond = 2 * maps[0] - maps[1]
    explicit = _mean_less_spread(torch.tensor([2.0, -1.0], dtype=F64), maps)
    excess = float(torch.linalg.matrix_norm(beyond, 2)) / scale - 1
    return [
        compare("T6 mixture with a negative gate", ("|2 T_0 - T_1|_F^2", beyond.square().sum()), (FORMULA, explicit)),
        Check("T6 bound for a negative gate", "|2 T_0 - T_1|_2 / max_h |T_h| - 1", "0", excess, 1e-2, False),
    ]


def _other_scales(s: int, isometry: Tensor, s_squared: Tensor) -> list[Check]:
    """Mixtures that are isometries although heads differ: of two scales, or of a scale below that of the heads."""
    two = torch.stack([isometry, 3 * isometry])
    angles = torch.rand(2, dtype=F64, generator=generator(s)) + torch.tensor([0.0, 1.5], dtype=F64)
    turns = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], 1).reshape(2, 2, 2)
    plane, identity = ("mixture^T mixture", _grams(_even_mixture(turns))), torch.eye(2, dtype=F64)
    shrunk = torch.polar(torch.ones_like(angles), angles).mean().abs() ** 2
    return [
        compare("T6 two scales", ("mixture^T mixture", _grams(_even_mixture(two))), ("(2 s)^2 I", 4 * s_squared)),
        compare("T6 isometry of two scales: heads agree", ("T_0", two[0]), ("T_1", two[1]), holds=False),
        compare("T6 rotations of a plane", plane, ("|mean e^(i angle)|^2 I", shrunk * identity)),
        compare("T6 rotations of a plane keep their scale", plane, ("I", identity), holds=False),
    ]


def _even_mixture(maps: Tensor) -> Tensor:
    """The transport of heads with equal gates, in the sum gauge."""
    identity = torch.eye(maps.shape[-1], dtype=F64).expand(maps.shape)
    return ConnectionWalk(torch.ones(len(maps), 1, 1, dtype=F64), identity, maps).transport(0, 0, "sum")


def check_t7(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T7 (addition): heads bound the rank of a transport, and isometry is measured on that rank.

    :math:`rank\,\Omega_{ij} \le r_{ij}`, d_head times the number of value heads with an active query head, at most
    d_model: :math:`n_{kv}\,d_{head}` at most under grouped-query attention. Generic heads attain it. With singular
    values s of an operator T of rank at most r,

    .. math::
        isometry = \frac{(\sum s^2)^2}{r\sum s^4} \in (0, 1], \qquad
        \sqrt{1 - isometry} = \min_c\frac{|T^TT - c\,\Pi|_F}{|T^TT|_F},

    for any projection :math:`\Pi` of rank r whose range holds the row space of T. So isometry is one iff T is a scaled
    partial isometry of rank r.

    Parameters
    ----------
    instances, seed : int
        As in `check_t6`.

    Returns
    -------
    list of Check
        Ranks by singular values and isometry by least squares, on every edge of heads that attend to different tokens;
        prescribed singular values for both directions of the equivalence; and counterexamples: heads that are not
        generic, query heads counted for value heads, another projection, d_model or d_head in place of r, a partial
        isometry of smaller rank, unequal singular values.
    """
    checks = []
    for s in range(seed, seed + instances):
        kv_heads, d_head, groups = 2 + s % 3, 2 + s // 3 % 2, 1 + s % 2
        # below and above the point where the heads together could fill a fibre
        d_model = kv_heads * d_head + (2 if s % 4 < 2 else -1)
        dense = random_walk(s, kv_heads * groups, 5, d_model, d_head, groups)
        keep = torch.rand(dense.attention.shape, generator=generator(s)) < 0.5
        attention = dense.attention * (keep | torch.eye(5, dtype=torch.bool))
        walk = ConnectionWalk(attention / attention.sum(-1, keepdim=True), dense.value, dense.output, groups=groups)
        edges = walk.support.nonzero().tolist()
        omegas = _omegas(walk, edges)
        active = [{h // groups for h in range(walk.heads) if walk.attention[h, i, j] > 0} for i, j in edges]
        bound = torch.tensor([min(len(heads) * d_head, d_model) for heads in active], dtype=F64)
        ranks = _ranks(omegas)
        checks.append(compare("T7 rank bound", ("rank_bound", walk.rank_bound()[walk.support]),
                              ("min(d_head #active, d_model)", bound)))  # fmt: skip
        excess = float((ranks - bound).max().clamp_min(0))
        checks.append(Check("T7 rank", "max(rank Omega_ij - r_ij, 0)", "0", excess, 1e-12))
        checks.append(compare("T7 rank, generic heads", ("rank Omega_ij", ranks), ("r_ij", bound)))
        shared = ConnectionWalk(walk.attention, walk.value[:1].expand(walk.value.shape), walk.output, groups=groups)
        checks.append(compare("T7 rank, heads of one row space", ("rank Omega_ij", _ranks(_omegas(shared, edges))),
                              ("r_ij", bound), holds=False))  # fmt: skip

        isometry = walk.edge_isometry()[walk.support]
        outside = float(torch.maximum(isometry - 1, 1e-9 - isometry).max().clamp_min(0))
        checks.append(Check("T7 isometry in (0, 1]", "distance of isometry from (0, 1]", "0", outside, 1e-12))
        root = ("sqrt(1 - isometry)", (1 - isometry).clamp_min(0).sqrt())
        distance = ("min_c |T^T T - c Pi| / |T^T T|", _least_distances(omegas, bound))
        checks.append(compare("T7 isometry as a distance", root, distance, bound=1e-10))
        turned = omegas @ random_orthogonal(s, 1, d_model)
        other = ("min_c |T^T T - c Pi'| / |T^T T|", _least_distances(omegas, bound, rows_of=turned))
        checks.append(compare("T7 another projection", root, other, holds=False))
        checks += _grouped_queries(s) + _prescribed_singular_values(s)
    return checks


def _ranks(maps: Tensor) -> Tensor:
    return torch.linalg.matrix_rank(maps, rtol=1e-9).to(F64)


def _least_distances(maps: Tensor, ranks: Tensor, rows_of: Tensor | None = None) -> Tensor:
    """Least squares over c, with Pi on the leading right singular vectors of ``rows_of`` (by default of the maps)."""
    distances = []
    for t, rank, rows in zip(maps, ranks, maps if rows_of is None else rows_of, strict=True):
        basis = torch.linalg.svd(rows).Vh[: int(rank)]
        column, goal = (basis.T @ basis).reshape(-1, 1), (t.T @ t).reshape(-1, 1)
        c = torch.linalg.lstsq(column, goal).solution
        distances.append((goal - column @ c).norm() / goal.norm())
    return torch.stack(distances)


def _grouped_queries(s: int) -> list[Check]:
    kv_heads, d_head = 2 + s % 2, 1 + s % 3
    walk = random_walk(s, 2 * kv_heads, 3, 2 * kv_heads * d_head + 1, d_head, groups=2)
    ranks = ("rank Omega_ij", _ranks(_omegas(walk, walk.support.nonzero().tolist())))
    count = torch.full((9,), kv_heads * d_head, dtype=F64)
    return [
        compare("T7 rank, grouped queries", ranks, ("n_kv d_head", count)),
        compare("T7 rank, query heads counted", ranks, ("H d_head", 2 * count), holds=False),
    ]


def _prescribed_singular_values(s: int) -> list[Check]:
    """Heads with orthogonal row spaces and column spaces, and equal gates: singular values are those of the heads."""
    heads, d_head, scale = 2 + s % 2, 2, 0.5 + s % 5 / 2
    rank = heads * d_head
    d_model = rank + 1 + s % 3
    left, right = random_orthogonal(s, 2, d_model)[:, :, :rank]
    one = ("1", torch.ones((), dtype=F64))

    def isometry(values: Tensor) -> tuple[Tensor, Tensor]:
        output = (left * values).reshape(d_model, heads, d_head).transpose(0, 1)
        attention = torch.full((heads, 1, 1), 1.0, dtype=F64)
        walk = ConnectionWalk(attention, right.T.reshape(heads, d_head, d_model), output)
        return walk.edge_isometry()[0, 0], walk.transport(0, 0)

    flat, t = isometry(torch.full((rank,), scale, dtype=F64))
    stretched = scale * torch.linspace(1, 2, rank, dtype=F64)
    uneven, u = isometry(stretched)
    closed = stretched.square().sum() ** 2 / (rank * stretched.pow(4).sum())
    short = torch.where(torch.arange(rank) < d_head, 0.0, torch.full((rank,), scale, dtype=F64))
    fewer = isometry(short)[0]
    powers = [torch.linalg.svdvals(t).pow(p).sum() for p in (2, 4)]
    checks = [
        compare("T7 partial isometry: isometry", ("isometry", flat), one),
        compare("T7 partial isometry: operator", ("T T^T T", t @ t.T @ t), ("s^2 T", scale**2 * t)),
        compare("T7 prescribed singular values", ("isometry", uneven), ("(sum s^2)^2 / (r sum s^4)", closed)),
        compare("T7 unequal singular values: isometry", ("isometry", uneven), one, holds=False),
        compare("T7 unequal singular values: operator", ("T T^T T / |T T^T T|", u @ u.T @ u / (u @ u.T @ u).norm()),
                ("T / |T|", u / u.norm()), holds=False),
        compare("T7 rank below the bound", ("isometry", fewer), ("rank / r", one[1] * (rank - d_head) / rank)),
        compare("T7 partial isometry of smaller rank", ("isometry", fewer), one, holds=False),
        compare("T7 d_model in place of r", ("(sum s^2)^2 / (d sum s^4)", powers[0] ** 2 / (d_model * powers[1])), one,
                holds=False),
    ]  # fmt: skip
    overshoot = float(powers[0] ** 2 / (d_head * powers[1])) - 1
    checks.append(Check("T7 d_head in place of r", "(sum s^2)^2 / (d_head sum s^4) - 1", "0", overshoot, 1e-2, False))
    return checks
