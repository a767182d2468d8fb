"""The identities cancel exactly, wrong ones do not, and the symbols mean what the package computes."""

import importlib
import sys

import numpy as np
import pandas as pd
import pytest
import sympy as sp
import torch

from cwlib import exact
from cwlib.cores import HeadTransports
from cwlib.edges import EdgeWalk
from cwlib.laplacian import dirichlet_energy, in_metric
from cwlib.walk import ConnectionWalk


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """Every identity, cancelled once."""
    return exact.symbolic_checks()


@pytest.mark.parametrize(
    "statement", [pytest.param(t, marks=pytest.mark.claim(t)) for t in ("T1", "T2", "T4", "T6", "T9")]
)
def test_both_sides_of_every_identity_cancel(statement: str, table: pd.DataFrame) -> None:
    rows = table[table["statement"] == statement]
    assert len(rows) and (rows["difference"] == "0").all() and rows["holds"].all()


def test_the_table_has_one_row_per_identity(table: pd.DataFrame) -> None:
    assert list(table.columns) == ["statement", "identity", "difference", "holds"]
    assert table["holds"].dtype == bool
    assert table["statement"].value_counts().to_dict() == {"T2": 5, "T9": 4, "T4": 2, "T1": 1, "T6": 1}
    assert table["identity"].is_unique
    assert {name.split(",")[-1].strip() for name in table["identity"] if "gauge" in name} == {
        "mean gauge",
        "sum gauge",
        "norm gauge",
    }


def test_no_identity_compares_numbers_or_a_side_with_itself() -> None:
    for theorem in exact.THEOREMS:
        for each in theorem():
            assert each.lhs.shape == each.rhs.shape
            assert each.lhs.free_symbols, each.identity
            assert each.lhs != each.rhs, each.identity


def test_wrong_statements_leave_a_difference(table: pd.DataFrame) -> None:
    wrong = exact.false_checks()
    assert list(wrong.columns) == list(table.columns)
    assert set(wrong["statement"]) == set(table["statement"])
    assert not wrong["holds"].any()
    for difference in wrong["difference"]:
        assert sp.sympify(difference).free_symbols
    for part in ("(a)", "(b)"):
        assert wrong["identity"].str.startswith(part).any()


@pytest.mark.parametrize(
    ("name", "wrong", "statements"),
    [
        ("HALF", sp.Integer(1), {"T4", "T6"}),
        ("_square_norm", lambda matrix: sum(entry**3 for entry in matrix), {"T2", "T6"}),
        ("_split", lambda weights, maps, _: (sum(weights), (maps[0] + maps[1]) / 2), {"T2"}),
        ("_stochastic", lambda name: sp.Matrix(2, 2, sp.symbols(f"{name}_:4")), {"T1", "T4"}),
    ],
)
def test_wrong_mathematics_leaves_a_difference(
    name: str, wrong: object, statements: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, name, wrong)
    monkeypatch.setattr(exact, "THEOREMS", exact.THEOREMS[:-1])  # T9 uses none of them, and takes longest
    found = exact.symbolic_checks()
    assert set(found[~found["holds"]]["statement"]) == statements


def test_the_difference_is_the_first_entry_that_does_not_vanish() -> None:
    a, b = sp.symbols("a b")
    lhs, rhs = sp.Matrix([[(a + b) ** 2, a]]), sp.Matrix([[a**2 + 2 * a * b + b**2, a / (1 - b)]])
    assert sp.cancel(exact.Identity("T0", "", lhs, rhs).difference - (a - a / (1 - b))) == 0
    assert exact.Identity("T0", "", lhs[:, :1], rhs[:, :1]).difference == 0


# --- symbols and the package's numbers -------------------------------------------------------------------------------


class Numbers:
    """Random numbers for the symbols of an identity.

    Parameters
    ----------
    identity : exact.Identity
        Its symbols get independent numbers in (0.1, 0.9): such may stand for weights and stochastic rows, too.
    """

    def __init__(self, identity: exact.Identity) -> None:
        symbols = sorted(identity.lhs.free_symbols | identity.rhs.free_symbols, key=str)
        drawn = np.random.default_rng(0).uniform(0.1, 0.9, len(symbols))
        self.values = dict(zip(symbols, map(float, drawn), strict=True))
        self.by_name = {str(symbol): value for symbol, value in self.values.items()}

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """Numbers of the symbols name_ij."""
        entries = [[self.by_name[f"{name}_{i}{j}"] for j in range(columns)] for i in range(rows)]
        return torch.tensor(entries, dtype=torch.float64)

    def stochastic(self, name: str) -> torch.Tensor:
        """Numbers of a matrix whose second column is one less the first."""
        first = self.matrix(name, 2, 1)
        return torch.cat([first, 1 - first], 1)

    def symmetric(self, name: str) -> torch.Tensor:
        """Numbers of a symmetric matrix, of which the lower half has no symbols."""
        entries = [[self.by_name[f"{name}_{min(i, j)}{max(i, j)}"] for j in range(2)] for i in range(2)]
        return torch.tensor(entries, dtype=torch.float64)

    def of(self, matrix: sp.Matrix) -> np.ndarray:
        """A symbolic matrix in numbers."""
        return np.array(matrix.evalf(30, subs=self.values).tolist(), dtype=float)


@pytest.mark.claim("T1")
def test_t1_is_about_the_walk_of_one_head() -> None:
    (identity,) = exact.t1()
    n = Numbers(identity)
    v, o = n.matrix("V", 1, 2), n.matrix("O", 2, 1)
    constant = o @ n.matrix("bV", 1, 1)[0] + n.matrix("bO", 2, 1)[:, 0]
    walk = ConnectionWalk(n.stochastic("A")[None], v[None], o[None], constant=constant)
    for side in (identity.lhs, identity.rhs):
        np.testing.assert_allclose(walk.apply(n.matrix("X", 2, 2)).numpy(), n.of(side), atol=1e-13)


@pytest.mark.claim("T2")
@pytest.mark.parametrize("position", range(3))
def test_t2_is_about_the_walk_of_two_heads(position: int) -> None:
    identity = exact.t2()[position]
    n = Numbers(identity)
    attention = torch.stack([n.stochastic(f"A{h}") for h in range(2)])
    maps = torch.stack([n.matrix(f"T{h}", 2, 2) for h in range(2)])
    walk = ConnectionWalk(attention, torch.eye(2, dtype=torch.float64).expand(2, 2, 2), maps)
    for side in (identity.lhs, identity.rhs):
        np.testing.assert_allclose((walk @ n.matrix("X", 2, 2)).numpy(), n.of(side), atol=1e-13)


@pytest.mark.claim("T4")
def test_t4_is_about_the_energy_of_a_walk() -> None:
    _, identity = exact.t4()
    n = Numbers(identity)
    for i in range(2):  # Gershgorin: a metric has to be positive definite
        for j in range(2):
            n.values[sp.Symbol(f"G{i}_{j}{j}")] = n.by_name[f"G{i}_{j}{j}"] = 1.0 + i + j / 4
    omega = torch.stack([torch.stack([n.matrix(f"Omega{i}{j}", 2, 2) for j in range(2)]) for i in range(2)])
    walk = EdgeWalk.from_dense(n.stochastic("W"), omega)
    pi = torch.tensor([n.by_name["pi_0"], n.by_name["pi_1"]], dtype=torch.float64)
    metrics = torch.stack([n.symmetric(f"G{i}") for i in range(2)])
    field = torch.stack([n.matrix(f"x{i}", 2, 1)[:, 0] for i in range(2)])
    values, vectors = torch.linalg.eigh(metrics)
    root = vectors @ torch.diag_embed(values.sqrt()) @ vectors.transpose(1, 2)
    size = torch.einsum("i,ia,iab,ib->", pi, field, metrics, field)
    energy = size * dirichlet_energy(in_metric(walk, metrics), torch.einsum("iab,ib->ia", root, field), pi)
    generated = torch.einsum("i,ia,iab,ib->", pi, field, metrics, field - walk @ field)
    np.testing.assert_allclose(float(energy - generated), n.of(identity.lhs)[0, 0], atol=1e-12)


@pytest.mark.claim("T9")
@pytest.mark.parametrize("width", [1, 2])
def test_t9_is_about_the_cores_of_two_heads(width: int) -> None:
    gram, quartic = exact.t9()[2 * width - 2 : 2 * width]
    n = Numbers(quartic)
    value = torch.stack([n.matrix(f"V{h}", width, 2) for h in range(2)])
    output = torch.stack([n.matrix(f"O{h}", 2, width) for h in range(2)])
    transports = HeadTransports(value, output)
    np.testing.assert_allclose(transports.head_gram.numpy().ravel(), n.of(gram.lhs).ravel(), atol=1e-13)
    np.testing.assert_allclose(transports.quartic.numpy().ravel(), n.of(quartic.lhs).ravel(), atol=1e-13)


# --- without sympy ---------------------------------------------------------------------------------------------------


def test_without_sympy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sympy", None)  # importing it now raises ImportError
    monkeypatch.delitem(sys.modules, "cwlib.exact")
    with pytest.raises(ImportError, match=r"pip install 'cwlib\[dev\]'"):
        importlib.import_module("cwlib.exact")
