r"""T5 as numerical checks: causal attention as a walk into the first token, and what makes it self-adjoint.

The walks are the mean attention of causal layers with random heads; the right-hand sides are dense matrices, explicit
sums, and powers.
"""

import torch
from torch import Tensor

from cwlib._types import Walk
from cwlib.checks import Check, compare
from cwlib.dense import F64, Space, normal, null_projector, self_adjoint
from cwlib.laplacian import in_metric, laplacian_defect
from cwlib.measures import (
    Measure,
    degree_measure,
    lazy_walk,
    reversibility_defect,
    stationary_measure,
    teleporting_walk,
    uniform_measure,
)
from cwlib.synthetic import random_measure, random_metrics, random_orthogonal, random_walk
from cwlib.walk import ConnectionWalk

LONG = 4096  # steps: a power of polynomial size then moves its root by a per cent or so


def check_t5(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T5 (addition): a causal layer is never a connection Laplacian; token 0, the attention sink, absorbs its walk.

    Let W be lower-triangular and row-stochastic with :math:`W_{ii} < 1` for i > 0. Then

    - the eigenvalues of W are its diagonal (this needs the triangle alone);
    - token 0 is absorbing and reached from every token with probability one, and :math:`\pi = e_0` is the only
      stationary law;
    - :math:`W^k - 1e_0^T = (W - 1e_0^T)^k` for k >= 1, so that :math:`W^k \to 1e_0^T` at the rate of the spectral
      radius of :math:`W - 1e_0^T`, which is :math:`\max_{i>0}W_{ii}`;
    - for every :math:`\pi > 0` the flow :math:`F = \Pi W` has
      :math:`|F - F^T|^2 = 2\sum_{i>j}(\pi_iW_{ij})^2`, so that (R) holds only if W is diagonal, that is, for a
      stochastic W, the identity.

    Remedies. In :math:`l^2(\pi\times G)` of any stated :math:`\pi > 0`, such as the uniform one or the degree of the
    symmetrised walk, :math:`\frac12(K + K^*)` is self-adjoint and nearest to K: for every self-adjoint S,
    :math:`|K - S|_M^2 = |K - \frac12(K + K^*)|_M^2 + |\frac12(K + K^*) - S|_M^2`. Its relative distance is the
    Laplacian defect. A teleporting walk is irreducible and has a positive stationary law, in which it need not be
    reversible; it still has to be reversibilised. Laziness is no remedy: the lazy walk of a causal walk is causal and
    meets the hypotheses above.

    Parameters
    ----------
    instances : int
        Seeded instances per statement, of 3 to 8 tokens, 2 to 4 heads and 2 to 4 dimensions.
    seed : int
        First seed.

    Returns
    -------
    list of Check
        The identities, and the counterexamples without each hypothesis. All are exact but the rate of convergence,
        which is read off a long power.
    """
    checks = []
    for s in range(seed, seed + instances):
        shape = {"heads": 2 + s % 3, "tokens": 3 + s % 6, "d_model": 2 + s % 3, "d_head": 1 + s % 2}
        walk = random_walk(s, causal=True, **shape)
        checks += absorption(walk.effective_walk(), s)
        checks += broken_hypotheses(walk.effective_walk(), random_walk(s, **shape).effective_walk())
        checks += irreversibility(walk.effective_walk(), s)
        checks += reversibilisation(walk, s)
        # On three or four tokens a teleporting walk may come close to reversibility.
        checks += other_walks(random_walk(s, causal=True, **shape | {"tokens": 5 + s % 4}).effective_walk(), s)
    return checks


def limit(tokens: int) -> Walk:
    """1 e_0^T: everything ends on token 0."""
    return torch.eye(tokens, dtype=F64)[0].expand(tokens, -1)


def sink(tokens: int) -> Walk:
    """The projector on e_0."""
    return torch.diag(torch.eye(tokens, dtype=F64)[0])


def stationary_laws(matrix: Walk) -> Walk:
    """The projector on all pi with pi^T W = pi^T."""
    return null_projector(matrix.T - torch.eye(len(matrix), dtype=F64))


def eventually_absorbed(matrix: Walk) -> Tensor:
    """The probability, from each token but 0, to end on token 0: the solution of h = W_0 + Q h, least if many."""
    tokens = len(matrix)
    inner = torch.eye(tokens - 1, dtype=F64) - matrix[1:, 1:]
    return torch.linalg.pinv(inner, rtol=1e-12) @ matrix[1:, 0]


def spectrum_is(name: str, label: str, matrix: Walk, values: tuple[str, Tensor], seed: int) -> Check:
    """Whether det(z - W) is the product of z - value: eigenvalues with multiplicities, well-conditioned if multiple.

    Compared at 2n points of the circle of radius two, and in a random orthonormal basis, in which nothing shows
    that W is a triangle.
    """
    tokens = len(matrix)
    basis = random_orthogonal(seed, 1, tokens)[0]
    points = torch.polar(torch.tensor(2.0, dtype=F64), torch.arange(2 * tokens, dtype=F64) * torch.pi / tokens)
    turned = (basis @ matrix @ basis.T).to(points.dtype)
    polynomial = torch.linalg.det(points[:, None, None] * torch.eye(tokens, dtype=points.dtype) - turned)
    product = (points[:, None] - values[1]).prod(1)
    return compare(name, (f"det(z - {label})", torch.view_as_real(polynomial)),
                   (f"prod_i (z - {values[0]})", torch.view_as_real(product)), bound=1e-10)  # fmt: skip


def absorption(matrix: Walk, seed: int) -> list[Check]:
    """Spectrum, absorption, the stationary law and the rate."""
    tokens, end, diagonal = len(matrix), limit(len(matrix)), matrix.diagonal()
    powers = [torch.linalg.matrix_power(matrix, k) for k in range(1, 9)]
    remainder, repeated = matrix - end, torch.eye(tokens, dtype=F64)
    products = [repeated := repeated @ remainder for _ in powers]
    slowest, others = diagonal[1:].max(), torch.cat([torch.zeros(1, dtype=F64), diagonal[1:]])
    # In units of the rate a long power neither vanishes nor drowns in the rounding of its limit.
    root = slowest * torch.linalg.matrix_norm(torch.linalg.matrix_power(remainder / slowest, LONG)) ** (1 / LONG)
    diagonals = torch.stack([power.diagonal() for power in powers])
    return [
        spectrum_is("T5 eigenvalues", "W", matrix, ("W_ii", diagonal), seed),
        compare("T5 token 0 stays", ("row 0 of W", matrix[0]), ("e_0", end[0])),
        compare("T5 token 0 absorbs", ("probability to end on token 0", eventually_absorbed(matrix)),
                ("1", torch.ones(tokens - 1, dtype=F64)), bound=1e-10),
        compare("T5 stationary laws", ("projector on ker(W^T - I)", stationary_laws(matrix)),
                ("e_0 e_0^T", sink(tokens)), bound=1e-10),
        compare("T5 powers", ("W^k - 1 e_0^T, k = 1..8", torch.stack(powers) - end),
                ("(W - 1 e_0^T)^k", torch.stack(products))),
        spectrum_is("T5 eigenvalues of the remainder", "(W - 1 e_0^T)", remainder, ("[i > 0] W_ii", others), seed),
        compare("T5 no faster", ("(W^k)_ii, k = 1..8", diagonals),
                ("W_ii^k", torch.stack([diagonal**k for k in range(1, 9)]))),
        compare("T5 rate, a long power", (f"|W^k - 1 e_0^T|^(1/k), k = {LONG}", root), ("max_{i>0} W_ii", slowest),
                bound=2e-2),
    ]  # fmt: skip


def broken_hypotheses(matrix: Walk, full: Walk) -> list[Check]:
    """A second absorbing token, a row that leaks, and attention that looks ahead."""
    tokens = len(matrix)
    end, last = limit(tokens), tokens - 1
    second, leaky = matrix.clone(), matrix.clone()
    second[last] = torch.eye(tokens, dtype=F64)[last]
    leaky[1:] *= 0.8
    both = sink(tokens) + torch.diag(torch.eye(tokens, dtype=F64)[last])

    def after(walk: Walk) -> tuple[str, Tensor]:
        return f"W^k, k = {LONG}", torch.linalg.matrix_power(walk, LONG)

    ones = torch.ones(last, dtype=F64)
    return [
        compare("T5 with W_ii = 1 for some i > 0, stationary laws", ("projector on ker(W^T - I)",
                stationary_laws(second)), ("e_0 e_0^T", sink(tokens)), holds=False),
        compare("T5 a second absorbing token, its law", ("projector on ker(W^T - I)", stationary_laws(second)),
                ("e_0 e_0^T + e_i e_i^T", both), bound=1e-10),
        compare("T5 with W_ii = 1 for some i > 0, absorption", ("probability to end on token 0",
                eventually_absorbed(second)), ("1", ones), holds=False),
        compare("T5 with W_ii = 1 for some i > 0, limit", after(second), ("1 e_0^T", end), holds=False),
        compare("T5 without W 1 = 1, limit", after(leaky), ("1 e_0^T", end), holds=False),
        compare("T5 without W 1 = 1, absorption", ("probability to end on token 0", eventually_absorbed(leaky)),
                ("1", ones), holds=False),
        compare("T5 looking ahead, stationary law", ("e_0^T W", full[0]), ("e_0^T", end[0]), holds=False),
        compare("T5 looking ahead, limit", after(full), ("1 e_0^T", end), holds=False),
        compare("T5 looking ahead, eigenvalues", ("sum of eig(W)^2", (full @ full).trace()),
                ("sum of W_ii^2", full.diagonal().square().sum()), holds=False),
    ]  # fmt: skip


def irreversibility(matrix: Walk, seed: int) -> list[Check]:
    """No positive measure makes a causal walk reversible."""
    tokens = len(matrix)
    measure = random_measure(seed + 1, tokens)
    flow = measure[:, None] * matrix
    below = sum((measure[i] * matrix[i, j]) ** 2 for i in range(tokens) for j in range(i))
    diagonal = torch.diag(matrix.diagonal())
    checks = [
        compare("T5 asymmetry of the flow", ("|F - F^T|^2", (flow - flow.T).square().sum()),
                ("2 sum_{i>j} (pi_i W_ij)^2", 2 * below)),
        Check("T5 a diagonal walk is reversible", "reversibility_defect", "0",
              reversibility_defect(diagonal, measure), 1e-12),
    ]  # fmt: skip
    laws = {"random": measure, "uniform": uniform_measure(tokens), "degree": degree_measure(matrix)}
    for name, law in laws.items():
        defect = reversibility_defect(matrix, law)
        checks.append(Check(f"T5 (R), {name} measure", "reversibility_defect", "0", defect, 1e-2, False))
    return checks


def reversibilisation(walk: ConnectionWalk, seed: int) -> list[Check]:
    """The nearest self-adjoint operator, in three measures and a metric."""
    tokens, metric = walk.n_dst, random_metrics(seed + 1, 1, walk.d_model)[0]
    matrix = walk.effective_walk()
    # sum_h A^h (x) T_h
    dense = sum(
        torch.kron(a, walk.output[h] @ walk.value[h // walk.groups]) for h, a in enumerate(walk.attention)
    )  # fmt: skip
    identity = torch.eye(len(dense), dtype=F64)
    checks = []

    def halves(space: Space) -> Tensor:
        return (dense + space.adjoint(dense)) / 2

    laws: dict[str, Measure] = {
        "uniform": uniform_measure(tokens), "degree": degree_measure(matrix), "random": random_measure(seed, tokens)
    }  # fmt: skip
    spaces = {name: Space(seed, law, metric.expand(tokens, -1, -1)) for name, law in laws.items()}
    for name, space in spaces.items():
        nearest = halves(space)
        symmetric = normal(seed + 2, *dense.shape)
        other = torch.linalg.solve(space.m, symmetric + symmetric.T)
        distance = space.square(dense - nearest)
        relative = (distance / space.square(dense)).sqrt()
        defect = torch.tensor(laplacian_defect(in_metric(walk, metric), space.measure), dtype=F64)
        checks += [
            self_adjoint(f"T5 causal layer, {name} measure", identity - dense, space.m, holds=False),
            self_adjoint(f"T5 reversibilised, {name} measure", identity - nearest, space.m),
            compare(f"T5 nearest self-adjoint operator, {name} measure", ("|K - S|^2", space.square(dense - other)),
                    ("|K - (K + K*)/2|^2 + |(K + K*)/2 - S|^2", distance + space.square(nearest - other))),
            compare(f"T5 Laplacian defect, {name} measure", ("laplacian_defect", defect),
                    ("|K - (K + K*)/2| / |K|", relative)),
        ]  # fmt: skip
    # The degree favours early tokens, which all others look at.
    rising = torch.arange(1, tokens + 1, dtype=F64)
    late = Space(seed, rising / rising.sum(), metric.expand(tokens, -1, -1))
    checks.append(
        self_adjoint("T5 reversibilised in another measure", identity - halves(late), spaces["degree"].m, holds=False)
    )  # fmt: skip
    return checks


def other_walks(matrix: Walk, seed: int) -> list[Check]:
    """Positive measures, the lazy walk and the teleporting walk."""
    tokens, stay, restart = len(matrix), 0.3 + 0.05 * (seed % 8), 0.2 + 0.05 * (seed % 8)
    uniform, degree, ones = uniform_measure(tokens), degree_measure(matrix), torch.ones(tokens, dtype=F64)
    joint = (matrix + matrix.T) / 2
    degrees = torch.stack([sum(joint[i, j] for j in range(tokens)) for i in range(tokens)])
    lazy, teleporting = lazy_walk(matrix, stay), teleporting_walk(matrix, restart)
    law = stationary_measure(teleporting)
    # pi^T (W - I + 1 1^T) = 1^T says pi^T W = pi^T and sum pi = 1, since rows of W - I add up to zero.
    solved = torch.linalg.solve((teleporting - torch.eye(tokens, dtype=F64) + torch.ones_like(matrix)).T, ones)
    checks = [
        compare("T5 uniform measure", ("n pi_i", tokens * uniform), ("1", ones)),
        compare("T5 degree measure", ("pi_i", degree), ("sum_j (W_ij + W_ji), normalised", degrees / degrees.sum())),
        compare("T5 degree measure is stationary", ("pi^T D^-1 (W + W^T)/2", degree @ (joint / degrees[:, None])),
                ("pi^T", degree)),
        Check("T5 degree measure is positive", "n min pi_i", "0", float(tokens * degree.min()), 0.5, False),
        compare("T5 lazy walk stays causal", ("upper triangle", lazy.triu(1)), ("0", torch.zeros_like(lazy))),
        spectrum_is("T5 lazy walk, eigenvalues", "((1 - a) W + a)", lazy,
                    ("((1 - a) W_ii + a)", (1 - stay) * matrix.diagonal() + stay), seed),
        compare("T5 lazy walk, stationary laws", ("projector on ker(W^T - I)", stationary_laws(lazy)),
                ("e_0 e_0^T", sink(tokens)), bound=1e-10),
        compare("T5 teleporting walk, stationary law", ("stationary_measure", law),
                ("pi^T W = pi^T, sum pi = 1", solved), bound=1e-10),
        compare("T5 teleporting walk, one law", ("projector on ker(W^T - I)", stationary_laws(teleporting)),
                ("pi pi^T / |pi|^2", torch.outer(law, law) / (law @ law)), bound=1e-10),
        # a restart puts a / n on every token
        Check("T5 teleporting walk, law is positive", "n min pi_i / a", "0", float(tokens * solved.min() / restart),
              0.99, False),
    ]  # fmt: skip
    for name, walk, measure in (("lazy", lazy, uniform), ("lazy", lazy, degree), ("teleporting", teleporting, law)):
        where = "its stationary law" if name == "teleporting" else "uniform and degree measure"
        defect = reversibility_defect(walk, measure)
        checks.append(Check(f"T5 {name} walk, (R) in {where}", "reversibility_defect", "0", defect, 1e-2, False))
    return checks
