r"""The polynomial identities behind the theorems in exact arithmetic, with a free symbol for every number.

A numerical check samples an identity. Here both sides are polynomials or rational functions in all entries of
attention, maps, metrics and fields, and their difference must cancel to zero: a proof, at the smallest sizes that show
the indices. Needs sympy, which the extra ``dev`` of the package brings.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import pandas as pd

try:
    import sympy as sp
except ImportError as error:
    raise ImportError("cwlib.exact needs sympy; install it with: pip install 'cwlib[dev]'") from error

TOKENS, D_MODEL = 2, 2
ONES = sp.ones(TOKENS, 1)
HALF = sp.Rational(1, 2)


@dataclass(frozen=True)
class Identity:
    """Two symbolic matrices that should be equal.

    Attributes
    ----------
    statement : str
        The theorem's ID.
    identity : str
        Both sides, as a reader would write them.
    lhs, rhs : sympy.Matrix
        The two sides, of equal shape.
    """

    statement: str
    identity: str
    lhs: sp.Matrix
    rhs: sp.Matrix

    @property
    def difference(self) -> sp.Expr:
        """Of the entries of lhs - rhs, in lowest terms, the first that does not vanish: 0 iff the sides are equal."""
        entries = (_lowest_terms(entry) for entry in self.lhs - self.rhs)
        return next((entry for entry in entries if entry != 0), sp.Integer(0))


def _lowest_terms(entry: sp.Expr) -> sp.Expr:
    # collecting a polynomial takes a twentieth of the time of cancelling a fraction
    polynomial = entry.free_symbols and entry.is_polynomial(*entry.free_symbols)
    return sp.Poly(entry, *entry.free_symbols).as_expr() if polynomial else sp.cancel(entry)


def _free(name: str, rows: int, columns: int) -> sp.Matrix:
    """A matrix of independent symbols."""
    return sp.Matrix(rows, columns, lambda i, j: sp.Symbol(f"{name}_{i}{j}"))


def _stochastic(name: str) -> sp.Matrix:
    """The general 2 x 2 matrix whose rows sum to one."""
    first = _free(name, TOKENS, 1)
    return sp.Matrix.hstack(first, ONES - first)


def _symmetric(name: str) -> sp.Matrix:
    return sp.Matrix(D_MODEL, D_MODEL, lambda i, j: sp.Symbol(f"{name}_{min(i, j)}{max(i, j)}"))


def _square_norm(matrix: sp.Matrix) -> sp.Expr:
    return sum(entry**2 for entry in matrix)


def _scalar(value: sp.Expr) -> sp.Matrix:
    return sp.Matrix([[value]])


def t1(false: bool = False) -> list[Identity]:
    """T1, one head of width 1 with biases; false without A 1 = 1."""
    a = _free("A", TOKENS, TOKENS) if false else _stochastic("A")
    x, v, o = _free("X", TOKENS, D_MODEL), _free("V", 1, D_MODEL), _free("O", D_MODEL, 1)
    b_v, b_o = _free("bV", 1, 1), _free("bO", D_MODEL, 1)
    head = a * (x * v.T + ONES * b_v.T) * o.T + ONES * b_o.T
    k = sp.Matrix(sp.kronecker_product(a, o * v))
    step = (k * x.reshape(TOKENS * D_MODEL, 1)).reshape(TOKENS, D_MODEL)
    constant = ONES * (o * b_v + b_o).T
    return [Identity("T1", "A (X V^T + b_V) O^T + b_O = (A (x) O V) X + O b_V + b_O", head, step + constant)]


def t2(false: bool = False) -> list[Identity]:
    """T2, two heads in each gauge; false with one transport for all edges."""
    attention = [_stochastic(f"A{h}") for h in range(2)]
    maps = [_free(f"T{h}", D_MODEL, D_MODEL) for h in range(2)]
    x = _free("X", TOKENS, D_MODEL)
    heads = sum((a * x * t.T for a, t in zip(attention, maps, strict=True)), sp.zeros(TOKENS, D_MODEL))
    total = attention[0] + attention[1]
    if false:
        constant = total * x * (maps[0] + maps[1]).T / 2
        return [Identity("T2", "sum_h A^h X T_h^T = W X (T_0 + T_1)^T", heads, constant)]
    found = []
    for gauge in ("mean", "sum", "norm"):
        edges = sp.zeros(TOKENS, D_MODEL)
        for i, j in product(range(TOKENS), repeat=2):
            weight, transport = _split([a[i, j] for a in attention], maps, gauge)
            edges[i, :] += weight * (transport * x[j, :].T).T
        found.append(Identity("T2", f"sum_h A^h X T_h^T = sum_j W_ij Omega_ij x_j, {gauge} gauge", heads, edges))
    gates = [attention[h].multiply_elementwise(total.applyfunc(lambda entry: 1 / entry)) for h in range(2)]
    _, normal = _split([a[0, 1] for a in attention], maps, "norm")
    return [
        *found,
        Identity("T2", "sum_h gamma^h_ij = 1", gates[0] + gates[1], sp.ones(TOKENS, TOKENS)),
        Identity("T2", "|Omega_ij|_F^2 = d, norm gauge", _scalar(_square_norm(normal)), _scalar(sp.Integer(D_MODEL))),
    ]


def _split(weights: list[sp.Expr], maps: list[sp.Matrix], gauge: str) -> tuple[sp.Expr, sp.Matrix]:
    """W_ij and Omega_ij of one edge."""
    total = sum(weights)
    if gauge == "norm":
        block = weights[0] * maps[0] + weights[1] * maps[1]
        size = sp.sqrt(_square_norm(block) / D_MODEL)
        return size, block / size
    mixture = weights[0] / total * maps[0] + weights[1] / total * maps[1]
    return (total, mixture) if gauge == "sum" else (total / 2, 2 * mixture)


def t4(false: bool = False) -> list[Identity]:
    """T4 (a) and (b) for any pi, G, W, Omega; (a) false with the transport there for that back, (b) without W 1 = 1."""
    tokens, size = range(TOKENS), TOKENS * D_MODEL
    pi, metrics = [sp.Symbol(f"pi_{i}") for i in tokens], [_symmetric(f"G{i}") for i in tokens]
    omega = [[_free(f"Omega{i}{j}", D_MODEL, D_MODEL) for j in tokens] for i in tokens]
    m = sp.diag(*(p * g for p, g in zip(pi, metrics, strict=True)))

    def generator(w: sp.Matrix) -> sp.Matrix:
        return sp.eye(size) - _blocks([[w[i, j] * omega[i][j] for j in tokens] for i in tokens])

    w = _free("W", TOKENS, TOKENS)
    there = _blocks([[pi[i] * metrics[i] * w[i, j] * omega[i][j] for j in tokens] for i in tokens])
    transport = omega if false else [list(column) for column in zip(*omega, strict=True)]  # [i][j] is that of j, i
    back = _blocks([[pi[j] * w[j, i] * transport[i][j].T * metrics[j] for j in tokens] for i in tokens])
    adjoint = m * generator(w) - generator(w).T * m
    detailed = Identity("T4", "(a) (M L - L^T M)_ij = pi_j K_ji^T G_j - pi_i G_i K_ij", adjoint, back - there)

    w = w if false else _stochastic("W")
    x = [_free(f"x{i}", D_MODEL, 1) for i in tokens]
    field = sp.Matrix.vstack(*x)
    energy, excess = sp.zeros(1, 1), sp.zeros(1, 1)
    for j in tokens:
        arriving = sp.zeros(D_MODEL)
        for i in tokens:
            step = x[i] - omega[i][j] * x[j]
            energy += HALF * pi[i] * w[i, j] * step.T * metrics[i] * step
            arriving += pi[i] * w[i, j] * omega[i][j].T * metrics[i] * omega[i][j]
        excess += HALF * x[j].T * (arriving - pi[j] * metrics[j]) * x[j]
    sides = "1/2 sum pi_i W_ij |x_i - Omega_ij x_j|^2 - <X, L X> = 1/2 sum_j x_j^T (B_j - pi_j G_j) x_j"
    balance = Identity("T4", f"(b) {sides}", energy - field.T * m * generator(w) * field, excess)
    return [detailed, balance]


def _blocks(rows: list[list[sp.Matrix]]) -> sp.Matrix:
    return sp.Matrix.vstack(*(sp.Matrix.hstack(*row) for row in rows))


def t6(false: bool = False) -> list[Identity]:
    """T6, three heads; false for gates that do not sum to one."""
    gates = list(sp.symbols("gamma_0:3")) if false else [*sp.symbols("gamma_0:2"), 1 - sum(sp.symbols("gamma_0:2"))]
    maps = [_free(f"T{h}", D_MODEL, D_MODEL) for h in range(3)]
    mixture = sum((g * t for g, t in zip(gates, maps, strict=True)), sp.zeros(D_MODEL))
    mean = sum(g * _square_norm(t) for g, t in zip(gates, maps, strict=True))
    spread = HALF * sum(gates[h] * gates[k] * _square_norm(maps[h] - maps[k]) for h, k in product(range(3), repeat=2))
    formula = "|sum g_h T_h|_F^2 = sum g_h |T_h|_F^2 - 1/2 sum g_h g_k |T_h - T_k|_F^2"
    return [Identity("T6", formula, _scalar(_square_norm(mixture)), _scalar(mean - spread))]


def t9(false: bool = False) -> list[Identity]:
    """T9, two heads of width 1 and of width 2; false with cores in another order (of width 1 they commute)."""
    return [identity for width in ((2,) if false else (1, 2)) for identity in _cores(width, false)]


def _cores(width: int, false: bool) -> list[Identity]:
    outputs = [_free(f"O{h}", D_MODEL, width) for h in range(2)]
    values = [_free(f"V{h}", width, D_MODEL) for h in range(2)]
    maps = [o * v for o, v in zip(outputs, values, strict=True)]

    def p(k: int, h: int) -> sp.Matrix:
        return outputs[k].T * outputs[h]

    def b(h: int, k: int) -> sp.Matrix:
        return values[h] * values[k].T

    gram, pairs, quartic, chains = [], [], [], []
    for h, k in product(range(2), repeat=2):
        gram.append((maps[h].T * maps[k]).trace())
        pairs.append((p(k, h) * (b(k, h) if false else b(h, k))).trace())
    for k, h, n, m in product(range(2), repeat=4):
        quartic.append((maps[k].T * maps[h] * maps[n].T * maps[m]).trace())
        middle = p(n, m) * b(h, n) if false else b(h, n) * p(n, m)
        chains.append((p(k, h) * middle * b(m, k)).trace())
    name = f"tr(T_k^T T_h T_n^T T_m) = tr(P_kh B_hn P_nm B_mk), d_head = {width}"
    return [
        Identity("T9", f"<T_h, T_k>_F = tr(P_kh B_hk), d_head = {width}", sp.Matrix(gram), sp.Matrix(pairs)),
        Identity("T9", name, sp.Matrix(quartic), sp.Matrix(chains)),
    ]


THEOREMS = (t1, t2, t4, t6, t9)


def symbolic_checks() -> pd.DataFrame:
    """Every identity with the difference of its sides, on two tokens and in two dimensions.

    Returns
    -------
    pandas.DataFrame
        Columns ``statement`` (the theorem's ID), ``identity``, ``difference`` (as text: ``0``, or the first entry that
        does not vanish) and ``holds``.
    """
    return _table(identity for theorem in THEOREMS for identity in theorem())


def false_checks() -> pd.DataFrame:
    """Statements like those of `symbolic_checks`, in the same columns, each made false in one place: none holds."""
    return _table(identity for theorem in THEOREMS for identity in theorem(false=True))


def _table(identities: Iterable[Identity]) -> pd.DataFrame:
    found = [(each.statement, each.identity, str(each.difference)) for each in identities]
    rows = [(*row, row[-1] == "0") for row in found]
    return pd.DataFrame(rows, columns=["statement", "identity", "difference", "holds"])
