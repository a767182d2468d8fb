r"""Parts (a) and (b) of T4: self-adjointness and the energy identity, each equivalent to a balance condition.

Both conditions are weaker than those of a connection Laplacian, which `cwlib.theorems_laplacian` adds. The notation is
that of its ``check_t4``.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from cwlib.checks import Check, compare
from cwlib.dense import F64, Blocks, Space, assembled, blocks, laplacian, normal, self_adjoint, taken_apart
from cwlib.edges import EdgeWalk
from cwlib.laplacian import detailed_balance_defect, dirichlet_energy, in_metric

BROKEN = {"stochastic": False, "reversible": False, "isometric": False, "inverse": False}


def detailed_balance(space: Space) -> list[Check]:
    """T4 (a), both directions."""
    measure, g, m = space.measure, space.metrics, space.m
    weighted = measure[:, None, None, None] * g[:, None]

    def both_sides(parts: Blocks) -> tuple[Tensor, Tensor]:
        ways = weighted @ parts  # pi_i G_i K_ij
        return ways, ways.transpose(0, 1).mT

    walk = space.walk(**BROKEN)
    operator = laplacian(walk)
    there, back = both_sides(blocks(walk))
    checks = [
        compare("T4 (a) asymmetry of M L", ("M L - (M L)^T", m @ operator - (m @ operator).T),
                ("blocks pi_j K_ji^T G_j - pi_i G_i K_ij", assembled(back - there))),
    ]  # fmt: skip
    ours = torch.tensor(detailed_balance_defect(in_metric(walk, g), measure), dtype=F64)
    roots = torch.block_diag(*space.frames)  # blocks of M K in orthonormal frames of the fibres
    there, back = (roots.T @ assembled(side) @ roots for side in (there, back))
    dense = (there - back).norm() / (2 * there.norm())
    checks.append(compare("T4 (a) detailed_balance_defect", ("from two numbers per edge", ours),
                          ("|M K - K^T M| / 2 |M K|", dense)))  # fmt: skip

    # <=: the way back is made the adjoint of the way there, of transports that are no isometries
    walk = way_back_by_adjoint(space, space.walk(**BROKEN))
    operator, x, y = laplacian(walk), space.field(), space.field(1)
    checks.append(self_adjoint("T4 (a) detailed balance => self-adjoint", operator, m))
    images = [(operator @ v.flatten()).reshape(v.shape) for v in (x, y)]
    checks.append(compare("T4 (a) detailed balance => self-adjoint, fields", ("<X, L Y>", space.inner(x, images[1])),
                          ("<L X, Y>", space.inner(images[0], y)), bound=1e-10))  # fmt: skip
    # =>: any symmetric matrix gives a self-adjoint L
    symmetric = normal(space.seed + 2, *m.shape)
    steps = torch.eye(len(m), dtype=F64) - torch.linalg.solve(m, symmetric + symmetric.T)
    there, back = both_sides(taken_apart(steps, space.d_model))
    checks.append(compare("T4 (a) self-adjoint => detailed balance", ("pi_i G_i K_ij", there),
                          ("pi_j K_ji^T G_j", back)))  # fmt: skip
    there, _ = heaviest_edge(space, walk)
    turned = replace(walk, maps=torch.where(there[:, None, None], -walk.maps, walk.maps))
    checks.append(self_adjoint("T4 (a) one edge out of balance", laplacian(turned), m, holds=False))
    return checks


def way_back_by_adjoint(space: Space, walk: EdgeWalk) -> EdgeWalk:
    """Replace the transports of edges from earlier to later tokens so that connection detailed balance holds."""
    flow, g = space.flow(walk), space.metrics
    position = {(int(i), int(j)): e for e, (i, j) in enumerate(zip(walk.dst, walk.src, strict=True))}
    maps = walk.maps.clone()
    for (i, j), edge in position.items():
        if i > j:
            there = walk.maps[position[j, i]]
            maps[edge] = flow[j, i] / flow[i, j] * torch.linalg.solve(g[i], there.T @ g[j])
    return replace(walk, maps=maps)


def heaviest_edge(space: Space, walk: EdgeWalk) -> tuple[Bool[Tensor, " edge"], Bool[Tensor, " edge"]]:
    """The edge of largest flow between two tokens, and its reverse, as masks of edges."""
    flow = space.edge_flow(walk)[:, 0, 0] * (walk.dst != walk.src)
    i, j = walk.dst[flow.argmax()], walk.src[flow.argmax()]
    return (walk.dst == i) & (walk.src == j), (walk.dst == j) & (walk.src == i)


def energy_identity(space: Space) -> list[Check]:
    """T4 (b), both directions, and what it does not imply."""
    measure, g, m = space.measure, space.metrics, space.m

    def forms(walk: EdgeWalk) -> tuple[Tensor, Tensor]:
        product = m @ laplacian(walk)
        return space.energy_form(walk), (product + product.T) / 2

    weighted = measure[:, None, None] * g
    walk, x = space.walk(**BROKEN | {"stochastic": True}), space.field()
    energy, quadratic = forms(walk)
    imbalance = space.arriving(walk) - weighted
    checks = [
        compare("T4 (b) with (S)", ("energy - <X, L X>", energy - quadratic),
                ("blockdiag(sum_i pi_i W_ij Omega_ij^T G_i Omega_ij - pi_j G_j) / 2",
                 torch.block_diag(*imbalance) / 2), bound=1e-10),
        compare("T4 (b) energy form", ("X^T E X", x.flatten() @ energy @ x.flatten()),
                ("1/2 sum_ij pi_i W_ij |x_i - Omega_ij x_j|^2", space.energy(walk, x))),
        compare("T4 (b) without metric balance", ("energy", energy), ("<X, L X>", quadratic), holds=False),
    ]  # fmt: skip
    # If the identity held for all X, it would for fields at one token, whose excess is the imbalance there.
    token, d = space.seed % space.tokens, space.d_model

    def excess(vector: Tensor) -> Tensor:
        field = torch.zeros_like(x)
        field[token] = vector
        return space.energy(walk, field) - space.inner(field, field - walk @ field)

    unit = torch.eye(d, dtype=F64)
    polarised = [[excess(a + b) - excess(a) - excess(b) for b in unit] for a in unit]
    checks.append(compare("T4 (b) identity => metric balance", ("excess at one token, polarised",
                          torch.stack([torch.stack(row) for row in polarised])),
                          ("sum_i pi_i W_ij Omega_ij^T G_i Omega_ij - pi_j G_j", imbalance[token]), bound=1e-10)
    )  # fmt: skip

    # Metric balance by a change of each source's frame; edges are no isometries, and there is no way back.
    narrow, wide = torch.linalg.cholesky(space.arriving(walk)), torch.linalg.cholesky(weighted)
    balanced = replace(walk, maps=walk.maps @ torch.linalg.solve(narrow.mT, wide.mT)[walk.src])
    energy, quadratic = forms(balanced)
    size = space.inner(x, x - balanced @ x)
    rayleigh = dirichlet_energy(in_metric(balanced, g), torch.einsum("iab,ib->ia", space.roots, x), measure)
    checks += [
        compare("T4 (b) metric balance => identity", ("energy", energy), ("<X, L X>", quadratic)),
        compare("T4 (b) metric balance => identity, fields", ("energy", space.energy(balanced, x)), ("<X, L X>", size),
                bound=1e-10),
        compare("T4 (b) dirichlet_energy", ("dirichlet_energy", torch.tensor(rayleigh, dtype=F64)),
                ("<X, L X> / <X, X>", size / space.inner(x, x)), bound=1e-10),
        compare("T4 (b) metric balance without isometry", ("Omega_ij^T G_i Omega_ij", space.pulled_back(balanced)),
                ("G_j", g[balanced.src]), holds=False),
    ]  # fmt: skip
    # Isometries, flows out of every source j adding up to pi_j, but rows that do not sum to one.
    whole = space.walk()
    links = whole.dst != whole.src
    dst, src = whole.dst[links], whole.src[links]
    uneven = space.flow(whole)[dst, src] * 4.0**dst
    leaving = torch.zeros_like(measure).index_add(0, src, uneven)
    leaky = EdgeWalk(space.tokens, dst, src, uneven * (measure / leaving)[src] / measure[dst], whole.maps[links])
    energy, quadratic = forms(leaky)
    checks += [
        compare("T4 (b) metric balance of a walk without (S)", ("sum_i pi_i W_ij Omega_ij^T G_i Omega_ij",
                space.arriving(leaky)), ("pi_j G_j", weighted)),
        compare("T4 (b) metric balance without (S)", ("energy", energy), ("<X, L X>", quadratic), holds=False),
    ]  # fmt: skip
    current = space.walk(reversible=False)
    energy, quadratic = forms(current)
    checks += [
        compare("T4 (b) identity without (R)", ("energy", energy), ("<X, L X>", quadratic)),
        self_adjoint("T4 (b) does not make L self-adjoint", laplacian(current), m, holds=False),
    ]
    return checks
