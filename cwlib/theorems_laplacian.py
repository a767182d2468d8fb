r"""T4 as numerical checks: when the generator of a walk is a random-walk connection Laplacian.

Instances differ in tokens, fibre dimension, measure :math:`\pi` and fibre metrics :math:`G_i`. The right-hand sides are
sums over edges or the dense matrices K, :math:`M = blockdiag(\pi_iG_i)` and :math:`L = I - K` of `cwlib.dense`. Where
a condition is broken, the conclusion that rests on it must visibly fail.
"""

from dataclasses import replace

import torch
from torch import Tensor

from cwlib.checks import Check, compare
from cwlib.dense import (
    F64,
    Space,
    assembled,
    blocks,
    incidence,
    laplacian,
    normal,
    null_projector,
    self_adjoint,
    span_projector,
    spectra_agree,
    spectrum_within,
    taken_apart,
)
from cwlib.edges import EdgeWalk
from cwlib.holonomy import parallel_fields
from cwlib.laplacian import in_metric
from cwlib.synthetic import flat_walk, generator, random_orthogonal
from cwlib.theorems_balance import BROKEN, detailed_balance, energy_identity, heaviest_edge, way_back_by_adjoint
from cwlib.walk import ConnectionWalk


def check_t4(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T4 (the conditions are the paper's; their separation, the converses and counterexamples are additions).

    Let :math:`\pi > 0`, :math:`G_i` symmetric positive definite and :math:`M = blockdiag(\pi_iG_i)`. Conditions:
    (S) :math:`W1 = 1`; (R) :math:`\pi_iW_{ij} = \pi_jW_{ji}`; (M) :math:`\Omega_{ij}^TG_i\Omega_{ij} = G_j` and
    :math:`\Omega_{ji} = \Omega_{ij}^{-1}`.

    (a) L is self-adjoint iff :math:`\pi_iG_iK_{ij} = \pi_jK_{ji}^TG_j` for all i, j; no other condition is needed.
    (b) Under (S), :math:`\langle X, LX\rangle = \frac12\sum_{ij}\pi_iW_{ij}|x_i - \Omega_{ij}x_j|^2_{G_i}` for all X
    iff :math:`\sum_i\pi_iW_{ij}\Omega_{ij}^TG_i\Omega_{ij} = \pi_jG_j` for every j ("metric balance"). That is weaker
    than isometry on every edge, and does not make L self-adjoint.
    (c) (S), (R), (M) imply both: L is the random-walk connection Laplacian of the graph :math:`w_{ij} = \pi_iW_{ij}`,
    positive semidefinite, with spectrum in [0, 2] and the parallel fields :math:`x_i = \Omega_{ij}x_j` as kernel.
    (d) If every :math:`\Omega_{ij}` is an isometry and L is self-adjoint, then (R) and
    :math:`\Omega_{ji} = \Omega_{ij}^{-1}`, whether or not (S) holds: with :math:`f_{ij} = \pi_iW_{ij}` and norms of the
    fibre metrics, :math:`|ML - (ML)^T|^2 = \sum_{ij}d(f_{ij} - f_{ji})^2 +
    f_{ij}f_{ji}|\Omega_{ij} - \Omega_{ji}^{-1}|^2`.
    (e) One head: the eigenvalues of :math:`A\otimes T` are the products. In one metric G for all tokens, L is
    self-adjoint iff A is reversible and GT symmetric (unless T = 0). (M) makes T an isometry with :math:`T^2 = I`, so
    that a head which is self-adjoint *and* isometric is an orthogonal involution; one which is only self-adjoint
    need not be.
    (f) If :math:`\Omega = sO` with one scale s > 0, :math:`L = (1-s)I + s(I - P_O)`; if O meets (S), (R), (M), the
    spectrum lies in [1-s, 1+s].
    (g) :math:`X + PX = 2(I - \frac12L)X`, twice a lazy step; under (S), (R), (M) the eigenvalues of
    :math:`I - \frac12L` lie in [0, 1].

    Parameters
    ----------
    instances : int
        Seeded instances per statement, of 3 to 7 tokens and 2 to 4 dimensions.
    seed : int
        First seed.

    Returns
    -------
    list of Check
        The identities and implications, and for every condition the counterexamples without it.
    """
    checks = []
    for s in range(seed, seed + instances):
        space = Space.drawn(s)
        for part in (detailed_balance, energy_identity, connection_laplacian, converse, single_head, massive, residual):
            checks += part(space)
    return checks


def connection_laplacian(space: Space) -> list[Check]:
    """T4 (c), and what fails without each of its conditions."""
    m, d, walk, x = space.m, space.d_model, space.walk(), space.field()
    operator, flow = laplacian(walk), space.flow(walk)
    steps = x[walk.dst] - torch.einsum("eab,eb->ea", walk.maps, x[walk.src])
    summed = torch.zeros_like(x).index_add(0, walk.dst, flow[walk.dst, walk.src, None] * steps)
    checks = [
        self_adjoint("T4 (c) self-adjoint", operator, m),
        compare("T4 (c) energy", ("<X, L X>", space.inner(x, x - walk @ x)),
                ("1/2 sum_ij w_ij |x_i - Omega_ij x_j|^2", space.energy(walk, x)), bound=1e-10),
        compare("T4 (c) graph weights", ("w_ij", flow), ("w_ji", flow.T)),
        compare("T4 (c) connection Laplacian", ("L X", (operator @ x.flatten()).reshape(x.shape)),
                ("sum_j w_ij (x_i - Omega_ij x_j) / sum_j w_ij", summed / flow.sum(1, keepdim=True)), bound=1e-10),
        spectrum_within("T4 (c) spectrum", operator, 0.0, 2.0, "[0, 2]"),
    ]  # fmt: skip

    frames = space.frames @ random_orthogonal(space.seed + 3, space.tokens, d)
    flat = flat_walk(space.seed, space.measure, frames)
    for name, case in (("generic", walk), ("flat", flat)):
        kernel, parallel = null_projector(laplacian(case)), null_projector(incidence(case).flatten(0, 1))
        found = parallel_fields(in_metric(case, space.metrics), space.measure)
        ours = span_projector(torch.einsum("iab,pib->iap", space.frames, found).flatten(0, 1))
        checks += [
            compare(f"T4 (c) kernel, {name} connection", ("ker L", kernel), ("parallel fields", parallel), bound=1e-10),
            compare(f"T4 (c) parallel_fields, {name} connection", ("parallel_fields", ours),
                    ("null space of all x_i - Omega_ij x_j", parallel), bound=1e-10),
        ]  # fmt: skip
    checks.append(
        compare("T4 (c) kernel of a flat connection", ("ker L", kernel),
                ("span of x_i = g_i v", span_projector(frames.flatten(0, 1))), bound=1e-10)
    )  # fmt: skip
    # Every triangle of the complete graph turns vectors round: no field is parallel, the kernel is zero.
    sign = torch.where(flat.dst == flat.src, 1.0, -1.0)[:, None, None]
    bottom = float(torch.linalg.eigvals(laplacian(replace(flat, maps=sign * flat.maps))).abs().min())
    checks.append(Check("T4 (c) no parallel fields, no kernel", "smallest |eig(L)|", "0", bottom, 1e-2, False))

    for condition, name in (("reversible", "(R)"), ("isometric", "isometry"), ("inverse", "inverses")):
        checks.append(self_adjoint(f"T4 (c) without {name}", laplacian(space.walk(**{condition: False})), m, False))
    for condition, name in (("stochastic", "(S)"), ("isometric", "isometry")):
        broken = space.walk(**{condition: False})
        product = m @ laplacian(broken)
        checks.append(compare(f"T4 (c) energy without {name}", ("energy", space.energy_form(broken)),
                              ("<X, L X>", (product + product.T) / 2), holds=False))  # fmt: skip
    # (R) and (M) stay, rows sum to more than one.
    more = 1.1 + 0.5 * torch.rand(space.tokens, dtype=F64, generator=generator(space.seed))
    raised = replace(flat, weight=flat.weight * more[flat.dst] * more[flat.src])
    constant = frames[:, :, 0].flatten()
    checks += [
        spectrum_within("T4 (c) spectrum without (S)", laplacian(raised), 0.0, 2.0, "[0, 2]", holds=False),
        compare("T4 (c) parallel fields without (S)", ("X - L X", constant - laplacian(raised) @ constant),
                ("X", constant), holds=False),
    ]  # fmt: skip
    return checks


def converse(space: Space) -> list[Check]:
    """T4 (d): an exact formula for the asymmetry of isometric walks, and what fails without isometry."""
    g, m, d = space.metrics, space.m, space.d_model

    def inverses(parts: Tensor) -> Tensor:
        return torch.linalg.inv(parts).transpose(0, 1)  # Omega_ji^-1 at (i, j)

    # (S) is broken throughout this part.
    walk = space.walk(stochastic=False, reversible=False, inverse=False)
    product, flow = m @ laplacian(walk), space.flow(walk)
    frames = torch.block_diag(*space.frames)
    asymmetry = (frames.T @ (product - product.T) @ frames).square().sum()
    transports = blocks(walk) / walk.effective_walk()[:, :, None, None]
    turns = torch.einsum("iab,ijbc,jcd->ijad", space.roots, transports - inverses(transports), space.frames)
    formula = d * (flow - flow.T).square().sum() + (flow * flow.T * turns.square().sum((2, 3))).sum()
    checks = [
        compare("T4 (d) asymmetry of isometric walks", ("|M L - (M L)^T|^2", asymmetry),
                ("sum_ij d (f_ij - f_ji)^2 + f_ij f_ji |Omega_ij - Omega_ji^-1|^2", formula), bound=1e-10)
    ]  # fmt: skip
    for condition, name in (("reversible", "(R)"), ("inverse", "inverses")):
        broken = laplacian(space.walk(stochastic=False, **{condition: False}))
        checks.append(self_adjoint(f"T4 (d) isometric without {name}", broken, m, holds=False))

    # Isometric blocks above the diagonal, completed to a self-adjoint operator; W and Omega are read off it.
    upper = m @ assembled(blocks(walk))
    parts = taken_apart(torch.linalg.solve(m, upper.triu() + upper.triu(1).T), d)
    weight = torch.einsum("iab,ijbc,jcd->ijad", space.roots, parts, space.frames).square().sum((2, 3)).sqrt() / d**0.5
    transports, flow = parts / weight[:, :, None, None], space.measure[:, None] * weight
    pulled = torch.einsum("ijba,ibc,ijcd->ijad", transports, g, transports)
    checks += [
        compare("T4 (d) operator read off, isometry", ("Omega_ij^T G_i Omega_ij", pulled),
                ("G_j", g.expand_as(pulled))),
        compare("T4 (d) self-adjoint and isometric => (R)", ("pi_i W_ij", flow), ("pi_j W_ji", flow.T)),
        compare("T4 (d) self-adjoint and isometric => inverses", ("Omega_ij", transports),
                ("Omega_ji^-1", inverses(transports)), bound=1e-10),
    ]  # fmt: skip

    # Self-adjoint without isometry. The same K with W and Omega rescaled along one edge and back: inverses, not (R).
    walk = space.walk()
    there, back = heaviest_edge(space, walk)
    scale = torch.where(there, 2.0, torch.where(back, 0.5, 1.0)).to(F64)
    rescaled = replace(walk, weight=walk.weight / scale, maps=walk.maps * scale[:, None, None])
    flow = space.flow(rescaled)
    transports = blocks(rescaled) / rescaled.effective_walk()[:, :, None, None]
    stretched = way_back_by_adjoint(space, space.walk(isometric=False, inverse=False))
    adjoint = blocks(stretched) / stretched.effective_walk()[:, :, None, None]
    checks += [
        self_adjoint("T4 (d) rescaled edges, L", laplacian(rescaled), m),
        compare("T4 (d) rescaled edges, inverses", ("Omega_ij", transports), ("Omega_ji^-1", inverses(transports)),
                bound=1e-10),
        compare("T4 (d) (R) without isometry", ("pi_i W_ij", flow), ("pi_j W_ji", flow.T), holds=False),
        self_adjoint("T4 (d) adjoint transports, L", laplacian(stretched), m),
        compare("T4 (d) adjoint transports, (R)", ("pi_i W_ij", space.flow(stretched)),
                ("pi_j W_ji", space.flow(stretched).T)),
        compare("T4 (d) inverses without isometry", ("Omega_ij", adjoint), ("Omega_ji^-1", inverses(adjoint)),
                holds=False),
    ]  # fmt: skip
    return checks


def single_head(space: Space) -> list[Check]:
    """T4 (e): which heads are self-adjoint, and which of them are connection Laplacians."""
    d, g, frame = space.d_model, space.metrics[0], space.frames[0]
    m = torch.kron(torch.diag(space.measure), g)
    reversible, current = space.walk().effective_walk(), space.walk(reversible=False).effective_walk()
    size = torch.eye(space.tokens * d, dtype=F64)

    def head(attention: Tensor, transport: Tensor) -> Tensor:
        return size - torch.kron(attention, transport)

    def in_frame(matrix: Tensor) -> Tensor:
        return frame @ matrix @ torch.linalg.inv(frame)

    generic = normal(space.seed + 4, d, d)
    walk = ConnectionWalk(current[None], torch.eye(d, dtype=F64)[None], generic[None])
    products = torch.outer(torch.linalg.eigvals(current), torch.linalg.eigvals(generic))
    product, flow, lowered = m @ head(current, generic), space.measure[:, None] * current, g @ generic
    squares = [((s + o * s.T) / 2).square().sum() for s in (flow, lowered) for o in (1, -1)]
    checks = [
        spectra_agree("T4 (e) spectrum of one head", ("eig(A (x) T)", torch.linalg.eigvals(walk.to_dense())),
                      ("eig(A) eig(T)", products)),
        compare("T4 (e) asymmetry of one head", ("|M L - (M L)^T|^2", (product - product.T).square().sum()),
                ("4 |sym F|^2 |skew GT|^2 + 4 |skew F|^2 |sym GT|^2",
                 4 * (squares[0] * squares[3] + squares[1] * squares[2]))),
    ]  # fmt: skip

    axes = random_orthogonal(space.seed + 5, 1, d)[0]
    mirror = axes[:, : 1 + space.seed % (d - 1)]
    reflection = in_frame(torch.eye(d, dtype=F64) - 2 * mirror @ mirror.T)
    angle = torch.tensor(0.8 + 0.1 * (space.seed % 15), dtype=F64)  # far from 0 and pi, where a turn is an involution
    turn = torch.eye(d, dtype=F64)
    turn[:2, :2] = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2)
    rotation = in_frame(axes @ turn @ axes.T)
    stretch = in_frame(axes @ torch.diag(torch.linspace(1.5, 0.5, d, dtype=F64)) @ axes.T)
    identity, labels = torch.eye(d, dtype=F64), ("T^T G T", "G")
    mirrored = EdgeWalk.from_dense(reversible, reflection.expand(space.tokens, space.tokens, d, d))
    pairs = mirrored.support.nonzero().tolist()
    returns = torch.stack([mirrored.transport(i, j) @ mirrored.transport(j, i) for i, j in pairs])
    checks += [
        compare("T4 (e) reflection is an isometry", (labels[0], reflection.T @ g @ reflection), (labels[1], g)),
        compare("T4 (e) reflection is its own way back", ("Omega_ij Omega_ji", returns),
                ("I", identity.expand(returns.shape))),
        self_adjoint("T4 (e) reversible A, reflection", head(reversible, reflection), m),
        spectrum_within("T4 (e) reversible A, reflection, spectrum", head(reversible, reflection), 0.0, 2.0, "[0, 2]"),
        self_adjoint("T4 (e) non-reversible A, reflection", head(current, reflection), m, holds=False),
        compare("T4 (e) rotation is an isometry", (labels[0], rotation.T @ g @ rotation), (labels[1], g)),
        compare("T4 (e) rotation is no involution", ("T^2", rotation @ rotation), ("I", identity), holds=False),
        self_adjoint("T4 (e) reversible A, rotation", head(reversible, rotation), m, holds=False),
        # self-adjoint, yet neither isometric nor an involution: (M) cannot be left out
        self_adjoint("T4 (e) reversible A, symmetric GT", head(reversible, stretch), m),
        compare("T4 (e) symmetric GT, no isometry", (labels[0], stretch.T @ g @ stretch), (labels[1], g), holds=False),
        compare("T4 (e) symmetric GT, no involution", ("T^2", stretch @ stretch), ("I", identity), holds=False),
        spectrum_within("T4 (e) symmetric GT, spectrum", head(reversible, stretch), 0.0, 2.0, "[0, 2]", holds=False),
    ]  # fmt: skip
    return checks


def massive(space: Space) -> list[Check]:
    """T4 (f): scaled isometries add a mass to the connection Laplacian of the isometries."""
    s = 0.4 + 0.25 * (space.seed % 8)  # on both sides of one, and never one
    isometric, scaled = space.walk(), space.walk(scale=s)
    operator, base = laplacian(scaled), laplacian(isometric)
    identity = torch.eye(len(base), dtype=F64)
    stretch = torch.diag(torch.linspace(1.5, 0.5, space.d_model, dtype=F64))
    along = space.frames[isometric.dst] @ stretch @ space.roots[isometric.src]
    broken = laplacian(replace(isometric, maps=s * along))
    # two scales on the same connection: the nearest single scale is not enough
    alternating = torch.where((isometric.dst + isometric.src) % 2 == 0, 0.5, 1.5)[:, None, None]
    mixed = identity - laplacian(replace(isometric, maps=isometric.maps * alternating))
    step = identity - base
    nearest = (mixed * step).sum() / (step * step).sum()
    return [
        compare("T4 (f) mass", ("L", operator), ("(1 - s) I + s (I - P_O)", (1 - s) * identity + s * base)),
        spectrum_within("T4 (f) spectrum", operator, 1 - s, 1 + s, "[1 - s, 1 + s]"),
        spectrum_within("T4 (f) spectrum without isometry", broken, 1 - s, 1 + s, "[1 - s, 1 + s]", holds=False),
        compare("T4 (f) two scales", ("L", identity - mixed),
                ("(1 - s) I + s (I - P_O), best s", (1 - nearest) * identity + nearest * base), holds=False),
    ]  # fmt: skip


def residual(space: Space) -> list[Check]:
    """T4 (g): the residual stream takes lazy steps, up to the factor that the next norm removes."""
    x, d = space.field(), space.d_model
    walk, broken = space.walk(), space.walk(**BROKEN)
    identity = torch.eye(space.tokens * d, dtype=F64)
    half, other = identity - laplacian(walk) / 2, identity - laplacian(broken) / 2

    def lazy(step: Tensor) -> Tensor:
        return (step @ x.flatten()).reshape(x.shape)

    def normed(field: Tensor) -> Tensor:
        return field / field.square().mean(1, keepdim=True).sqrt()

    return [
        compare("T4 (g) residual stream", ("X + P X", x + broken @ x), ("2 (I - L/2) X", 2 * lazy(other))),
        compare("T4 (g) after a norm", ("norm(X + P X)", normed(x + broken @ x)), ("norm((I - L/2) X)",
                normed(lazy(other))), bound=1e-10),
        spectrum_within("T4 (g) lazy step", half, 0.0, 1.0, "[0, 1]"),
        # attention added with another weight is a step of another laziness
        compare("T4 (g) attention counted twice", ("norm(X + 2 P X)", normed(x + 2 * (walk @ x))),
                ("norm((I - L/2) X)", normed(lazy(half))), holds=False),
    ]  # fmt: skip
