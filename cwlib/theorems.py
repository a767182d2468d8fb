r"""The theorems as numerical checks, shared by the notebooks and the tests.

Each ``check_tN`` draws seeded instances of varied shape, compares both sides of the statement, and adds cases that
break one hypothesis, where the conclusion must visibly fail. The right-hand sides here are explicit sums over tokens
and heads or dense matrices. T1 and T2 are the paper's statements, and the conditions of T4 (as our reading of its
abstract); the others are additions of this artifact. T4 to T8 live in modules of their own and are collected here.
"""

from itertools import product

import torch
from torch import Tensor

from cwlib.checks import TOLERANCE, Check, compare
from cwlib.synthetic import dependent_walk, generator, random_walk, varied_shapes
from cwlib.theorems_causal import check_t5
from cwlib.theorems_holonomy import check_t8
from cwlib.theorems_laplacian import check_t4
from cwlib.theorems_transport import check_t6, check_t7
from cwlib.walk import ConnectionWalk

F64 = torch.float64


def dense_transports(walk: ConnectionWalk) -> list[Tensor]:
    """The d_model x d_model matrices T_h = O_h V_h, one by one."""
    return [walk.output[h].to(F64) @ walk.value[h // walk.groups].to(F64) for h in range(walk.output.shape[0])]


def dense_operator(walk: ConnectionWalk) -> Tensor:
    r"""The operator :math:`\sum_h A^h \otimes T_h` by Kronecker products."""
    return sum(torch.kron(a.to(F64), t) for a, t in zip(walk.attention, dense_transports(walk), strict=True))


def realigned(dense: Tensor, n_dst: int, n_src: int) -> Tensor:
    """R: the operator with one row vec(K_ij) per edge (Van Loan-Pitsianis realignment)."""
    d = dense.shape[0] // n_dst
    return dense.reshape(n_dst, d, n_src, d).permute(0, 2, 1, 3).reshape(n_dst * n_src, d * d)


def _field(seed: int, tokens: int, d_model: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(tokens, d_model, dtype=F64, generator=generator(seed + 7919)).to(dtype)


def check_t1(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T1 (the paper's): one head is a connection step with constant transport.

    One head, :math:`Y = A X` transported by :math:`T = O V`, is :math:`P X` with :math:`W = A` and
    :math:`\Omega_{ij} = T` on every edge; as an operator :math:`K = A \otimes T`. Since :math:`A 1 = 1`, the biases
    :math:`b_V, b_O` add the constant section :math:`O b_V + b_O`.

    Parameters
    ----------
    instances : int
        Seeded instances per statement; shapes vary with the seed.
    seed : int
        First seed.

    Returns
    -------
    list of Check
        The identities, in every dtype for the first, and one counterexample: attention whose rows do not sum to one.
    """
    checks = []
    for s, dtype in product(range(seed, seed + instances), TOLERANCE):
        shape = varied_shapes(s) | {"heads": 1, "groups": 1}
        bare = random_walk(s, dtype=dtype, **shape)
        b_value, b_output = _field(s, 1, shape["d_head"], dtype)[0], _field(s + 1, 1, shape["d_model"], dtype)[0]
        a, v, o = bare.attention[0], bare.value[0], bare.output[0]
        x = _field(s + 2, shape["tokens"], shape["d_model"], dtype)
        # The head as a model computes it, in its own dtype.
        module = (a @ (x @ v.T + b_value)) @ o.T + b_output
        walk = ConnectionWalk(bare.attention, bare.value, bare.output, constant=o @ b_value + b_output)
        name = str(dtype).removeprefix("torch.")
        checks.append(
            compare(f"T1 output, {name}", ("A (X V^T + b_V) O^T + b_O", module), ("P X + O b_V + b_O", walk.apply(x)),
                    bound=TOLERANCE[dtype])
        )  # fmt: skip
        if dtype != F64:
            continue
        checks.append(compare("T1 operator", ("K", walk.to_dense()), ("A (x) T", torch.kron(a, o @ v))))
        edges = [walk.transport(i, j) for i, j in walk.support.nonzero().tolist()]
        constant = (o @ v).expand(len(edges), -1, -1)
        checks.append(compare("T1 transport", ("Omega_ij on every edge", torch.stack(edges)), ("T", constant)))
        leaky = a * torch.linspace(0.4, 0.9, a.shape[0], dtype=F64)[:, None]
        broken = (leaky @ (x @ v.T + b_value)) @ o.T
        constant_section = leaky @ x @ v.T @ o.T + o @ b_value
        checks.append(
            compare("T1 without A 1 = 1", ("A (X V^T + b_V) O^T", broken), ("P X + O b_V", constant_section),
                    holds=False)
        )  # fmt: skip
    return checks


def check_t2(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T2 (the paper's): many heads are one walk with an edge-dependent transport.

    :math:`\sum_h A^h \otimes T_h` is the connection walk with :math:`W = \frac1H \sum_h A^h` and
    :math:`\Omega_{ij} = H \sum_h \gamma^h_{ij} T_h`, where :math:`\gamma^h_{ij} = A^h_{ij} / \sum_k A^k_{ij}`,
    in the mean gauge, and likewise in the sum and norm gauges.

    Parameters
    ----------
    instances, seed : int
        As in `check_t1`. Instances alternate between causal and full attention, one and two query heads per value head.

    Returns
    -------
    list of Check
        The identities per gauge, the properties of W and the gates, and one counterexample: the same W with
        an edge-independent transport.
    """
    checks = []
    for s in range(seed, seed + instances):
        walk = random_walk(s, causal=s % 3 == 0, **varied_shapes(s))
        x = _field(s, walk.n_src, walk.d_model)
        transports = dense_transports(walk)
        heads = sum(a @ x @ t.T for a, t in zip(walk.attention, transports, strict=True))
        for gauge in ("mean", "sum", "norm"):
            w = walk.effective_walk(gauge)
            edges = torch.zeros_like(heads)
            for i, j in walk.support.nonzero().tolist():
                edges[i] += w[i, j] * (walk.transport(i, j, gauge) @ x[j])
            checks.append(
                compare(f"T2 {gauge} gauge", ("sum_h A^h X T_h^T", heads), ("sum_j W_ij Omega_ij x_j", edges))
            )
        pairs = walk.support.nonzero().tolist()
        omega = torch.stack([walk.transport(i, j) for i, j in pairs])
        totals = walk.attention.sum(0)
        mixture = torch.stack(
            [
                sum(walk.heads * walk.attention[h, i, j] / totals[i, j] * t for h, t in enumerate(transports))
                for i, j in pairs
            ]
        )
        checks.append(compare("T2 transport", ("Omega_ij", omega), ("H sum_h gamma^h_ij T_h", mixture)))
        ones = torch.ones(walk.n_dst, dtype=F64)
        checks.append(compare("T2 mean gauge is stochastic", ("W 1", walk.effective_walk().sum(1)), ("1", ones)))
        gates = walk.gates().sum(0)[walk.support]
        checks.append(compare("T2 gates", ("sum_h gamma^h_ij", gates), ("1", torch.ones_like(gates))))
        norms = torch.stack([walk.transport(i, j, "norm").norm() for i, j in pairs])
        root = torch.full_like(norms, walk.d_model**0.5)
        checks.append(compare("T2 norm gauge is normal", ("|Omega_ij|_F", norms), ("sqrt(d)", root)))
        if walk.n_src > 1:
            constant = walk.effective_walk() @ x @ sum(transports).T
            checks.append(
                compare("T2 with one constant transport", ("sum_h A^h X T_h^T", heads), ("W X (sum_h T_h)^T", constant),
                        holds=False)
            )  # fmt: skip
    return checks


def check_t3(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T3 (addition): operator Schmidt values count how many heads are really needed.

    The singular values of the realigned operator are the square roots of the eigenvalues of :math:`G_A G_T`; the rank
    is H iff both families of heads are linearly independent, and one iff K is a constant-transport walk. The best
    constant-transport approximation has relative error :math:`\sqrt{1 - s_1^2/\sum s^2}`.

    Parameters
    ----------
    instances, seed : int
        As in `check_t1`.

    Returns
    -------
    list of Check
        The identities, and the strictness of T1 within T2: heads that no single head can equal.
    """
    checks = []
    for s in range(seed, seed + instances):
        heads = 2 + s % 3
        walk = random_walk(s, heads=heads, tokens=4 + s % 3, d_model=6, d_head=2, causal=s % 2 == 0)
        dense = dense_operator(walk)
        matrix = realigned(dense, walk.n_dst, walk.n_src)
        left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
        values = walk.schmidt_values()
        checks.append(compare("T3 Schmidt values", ("sqrt eig(G_A G_T)", values), ("svd(R)", singular[:heads])))
        excess = float(singular[heads:].max() / singular[0])
        checks.append(Check("T3 rank <= H", "svd(R)[H:] / svd(R)[0]", "0", excess, 1e-12))
        best = singular[0] * torch.outer(left[:, 0], right[0])
        error = (matrix - best).norm() / matrix.norm()
        formula = (1 - values[0] ** 2 / (values**2).sum()).sqrt()
        checks.append(compare("T3 best single walk", ("sqrt(1 - s_1^2/sum s^2)", formula), ("|K - K_1|/|K|", error)))
        checks.append(
            Check("T3 one head cannot do it", "svd(R)[1]/svd(R)[0]", "0", float(singular[1] / singular[0]), 1e-2, False)
        )
        rank = 1 + s % (heads - 1)
        dependent = dependent_walk(s, heads=heads, rank=rank)
        spectrum = dependent.schmidt_values() / dependent.norm()
        beyond = float(spectrum[rank:].max())
        checks.append(Check("T3 dependent heads", "Schmidt values beyond the rank", "0", beyond, 1e-7))
        checks.append(
            Check("T3 independent heads", "Schmidt value at the rank", "0", float(spectrum[rank - 1]), 1e-2, False)
        )
    return checks


def check_t9(instances: int = 20, seed: int = 0) -> list[Check]:
    r"""T9 (addition): d_head x d_head cores replace every d_model x d_model matrix.

    With :math:`P_{kh} = O_k^T O_h` and :math:`B_{hl} = V_h V_l^T`:
    :math:`\langle T_h, T_k\rangle = tr(P_{kh} B_{hk})` and
    :math:`tr(T_k^T T_h T_l^T T_m) = tr(P_{kh} B_{hl} P_{lm} B_{mk})`.

    Parameters
    ----------
    instances, seed : int
        As in `check_t1`.

    Returns
    -------
    list of Check
        Closed forms against dense matrices: Gram matrix, quartic form, traces, singular values, and the isometry of
        every edge.
    """
    checks = []
    for s in range(seed, seed + instances):
        walk = random_walk(s, causal=s % 2 == 0, **varied_shapes(s))
        cores, maps = walk.transports, torch.stack(dense_transports(walk))
        gram = torch.einsum("hde,kde->hk", maps, maps)
        checks.append(compare("T9 Gram matrix", ("tr(P_kh B_hk)", cores.head_gram), ("<T_h, T_k>", gram)))
        quartic = torch.einsum("kba,hbc,ldc,mda->khlm", maps, maps, maps, maps)
        checks.append(compare("T9 quartic form", ("tr(P B P B)", cores.quartic), ("tr(T_k^T T_h T_l^T T_m)", quartic)))
        pairs = torch.einsum("hab,kba->hk", maps, maps)
        checks.append(compare("T9 product traces", ("tr(C_hk C_kh)", cores.product_traces), ("tr(T_h T_k)", pairs)))
        values = walk.head_singular_values()
        dense = torch.linalg.svdvals(maps)[:, : values.shape[1]]
        checks.append(compare("T9 singular values", ("svd(R_O R_V^T)", values), ("svd(T_h)", dense)))
        checks.append(compare("T9 norm", ("|K| from Gram matrices", torch.tensor(walk.norm(), dtype=F64)),
                              ("|sum_h A^h (x) T_h|_F", dense_operator(walk).norm())))  # fmt: skip
        isometry = walk.edge_isometry()
        edges = walk.support.nonzero().tolist()
        spectra = torch.stack([torch.linalg.svdvals(walk.transport(i, j)) for i, j in edges]) ** 2
        exact = spectra.sum(1) ** 2 / (walk.rank_bound()[walk.support] * (spectra**2).sum(1))
        checks.append(compare("T9 isometry of every edge", ("quadratic^2 / (r quartic)", isometry[walk.support]),
                              ("(sum s^2)^2 / (r sum s^4)", exact)))  # fmt: skip
    return checks


THEOREMS = {
    "T1": check_t1,
    "T2": check_t2,
    "T3": check_t3,
    "T4": check_t4,
    "T5": check_t5,
    "T6": check_t6,
    "T7": check_t7,
    "T8": check_t8,
    "T9": check_t9,
}
