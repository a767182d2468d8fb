"""Every theorem's checks pass on many instances, and fail when the mathematics is made wrong."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import oracles
import pytest
import torch
from oracles import Layer, agree
from torch import Tensor

from cwlib import theorems
from cwlib.checks import TOLERANCE, Check, check_table
from cwlib.cores import HeadTransports
from cwlib.synthetic import random_walk
from cwlib.theorems import THEOREMS, check_t1, check_t2, check_t3, check_t9, dense_operator, dense_transports, realigned
from cwlib.walk import ConnectionWalk

INSTANCES = 100


def assert_theorem(theorem: str, statements: set[str], counterexamples: set[str]) -> None:
    """Assert that the checks of a theorem pass, at least 100 times each, within the bounds of exact identities.

    Parameters
    ----------
    theorem : str
        The ID.
    statements, counterexamples : set of str
        The right-hand sides (identities) and the names (cases that break a hypothesis) which must occur.
    """
    checks = THEOREMS[theorem](INSTANCES)
    for check in checks:
        assert check.passed, check
        assert check.name.startswith(theorem), "a check names its theorem"
        # nothing looser than the coarsest dtype, nothing that fails invisibly
        assert check.tolerance <= TOLERANCE[torch.bfloat16] if check.holds else check.residual >= 1e-2
    exact = [c for c in checks if c.holds and not any(t in c.name for t in ("float32", "float16"))]
    assert all(c.tolerance <= 1e-7 for c in exact)
    assert {c.rhs for c in checks if c.holds} >= statements
    assert {c.name for c in checks if not c.holds} == counterexamples
    table = check_table(checks)
    assert list(table.columns) == ["instances", "compares", "residual", "bound", "passed"]
    assert table["passed"].all() and (table["instances"] >= INSTANCES).all()


@pytest.mark.claim("T1")
def test_t1_one_head_is_a_constant_transport(unchecked: None) -> None:
    assert_theorem("T1", {"P X + O b_V + b_O", "A (x) T", "T"}, {"T1 without A 1 = 1"})
    names = {check.name for check in check_t1(1)}
    assert {f"T1 output, {dtype}" for dtype in ("float64", "float32", "float16", "bfloat16")} <= names


@pytest.mark.claim("T2")
def test_t2_many_heads_are_one_walk(unchecked: None) -> None:
    statements = {"sum_j W_ij Omega_ij x_j", "1", "sqrt(d)"}
    assert_theorem("T2", statements, {"T2 with one constant transport"})
    assert {f"T2 {gauge} gauge" for gauge in ("mean", "sum", "norm")} <= {check.name for check in check_t2(1)}


@pytest.mark.claim("T3")
def test_t3_schmidt_values_count_heads(unchecked: None) -> None:
    assert_theorem("T3", {"svd(R)", "|K - K_1|/|K|", "0"}, {"T3 one head cannot do it", "T3 independent heads"})


@pytest.mark.claim("T9")
def test_t9_cores_replace_dense_matrices(unchecked: None) -> None:
    statements = {"<T_h, T_k>", "tr(T_k^T T_h T_l^T T_m)", "tr(T_h T_k)", "svd(T_h)", "|sum_h A^h (x) T_h|_F"}
    assert_theorem("T9", statements | {"(sum s^2)^2 / (r sum s^4)"}, set())


def test_every_check_is_registered_under_its_theorem() -> None:
    checks = {name for name in vars(theorems) if name.startswith("check_t")}
    assert {f"check_{theorem.lower()}" for theorem in THEOREMS} == checks
    assert all(check.__name__ == f"check_{theorem.lower()}" for theorem, check in THEOREMS.items())


@pytest.mark.parametrize("theorem", THEOREMS)
def test_the_seed_fixes_the_checks(theorem: str) -> None:
    for one, two in zip(THEOREMS[theorem](3, seed=5), THEOREMS[theorem](3, seed=5), strict=True):
        assert replace(one, residual=0.0) == replace(two, residual=0.0)
        # digits at rounding may differ with where arrays lie in memory
        assert one.residual == pytest.approx(two.residual, rel=1e-6, abs=1e-11)
    residuals = [{c.residual for c in THEOREMS[theorem](3, seed=seed)} for seed in (5, 50)]
    assert residuals[0] != residuals[1]
    assert all(c.passed for c in THEOREMS[theorem](10, seed=1000))


# --- the dense sides -------------------------------------------------------------------------------------------------


def test_dense_sides_equal_the_oracles() -> None:
    for seed in range(4):
        walk = random_walk(seed, heads=4, groups=2, tokens=3, sources=5)
        layer = Layer(walk.attention.numpy(), walk.value.numpy(), walk.output.numpy(), 2)
        agree(torch.stack(dense_transports(walk)), oracles.transports(layer))
        agree(dense_operator(walk), oracles.operator(layer))
        agree(realigned(dense_operator(walk), 3, 5), oracles.realigned(layer))


# --- wrong mathematics must show -------------------------------------------------------------------------------------


def wrong_transport(self: ConnectionWalk, dst: int, src: int, gauge: str = "mean") -> Tensor:
    return (self.operator_block(dst, src) / self.effective_walk(gauge)[dst, src]).T


def constant_forgotten(self: ConnectionWalk, field: Tensor) -> Tensor:
    return self @ field


def constant_twice(self: ConnectionWalk, field: Tensor) -> Tensor:
    return self @ field + 2 * self.constant


def first_head_for_all(self: ConnectionWalk, gauge: str = "mean") -> Tensor:
    return self.attention[0]


def sum_for_mean(self: ConnectionWalk, gauge: str = "mean") -> Tensor:
    return self.attention.sum(0)


def ungated(self: ConnectionWalk) -> Tensor:
    return self.attention


def squared_values(self: ConnectionWalk) -> Tensor:
    return torch.linalg.eigvals(self.attention_gram() @ self.transports.head_gram).real.sort(descending=True).values


def eigenvalues_of_sum(self: ConnectionWalk) -> Tensor:
    return torch.linalg.svdvals(self.attention_gram() + self.transports.head_gram).sqrt()


def undefined(self: ConnectionWalk, *_: object) -> Tensor:
    return torch.full((self.heads,), torch.nan, dtype=torch.float64)


def undefined_section(self: ConnectionWalk, _: Tensor) -> Tensor:
    return torch.full((self.n_dst, self.d_model), torch.nan, dtype=torch.float64)


def transposed_pairs(self: HeadTransports) -> Tensor:
    return self.head_gram


def asymmetric_quartic(self: HeadTransports) -> Tensor:
    p, b = self.output_cores(), self.value_cores()
    return torch.einsum("khab,hlbc,lmcd,kmda->khlm", p, b, p, b)


def heads_on_the_wrong_values(self: HeadTransports, cores: Tensor, *dims: int) -> Tensor:
    for dim in dims or (0,):
        cores = torch.cat([cores] * self.groups, dim)
    return cores


WRONG: dict[str, tuple[Callable[[int], list[Check]], type, str, object, float]] = {
    "transport transposed, T1": (check_t1, ConnectionWalk, "transport", wrong_transport, 0.1),
    "transport transposed, T2": (check_t2, ConnectionWalk, "transport", wrong_transport, 0.1),
    "constant forgotten": (check_t1, ConnectionWalk, "apply", constant_forgotten, 0.1),
    "constant twice": (check_t1, ConnectionWalk, "apply", constant_twice, 0.1),
    "first head for all": (check_t2, ConnectionWalk, "effective_walk", first_head_for_all, 0.1),
    "sum for mean": (check_t2, ConnectionWalk, "effective_walk", sum_for_mean, 0.1),
    "gates not normalised": (check_t2, ConnectionWalk, "gates", ungated, 0.1),
    "Schmidt values squared": (check_t3, ConnectionWalk, "schmidt_values", squared_values, 0.1),
    "sum of Gram matrices": (check_t3, ConnectionWalk, "schmidt_values", eigenvalues_of_sum, 0.1),
    "NaN in the output": (check_t1, ConnectionWalk, "apply", undefined_section, np.nan),
    "NaN in Schmidt values": (check_t3, ConnectionWalk, "schmidt_values", undefined, np.nan),
    "traces of T_h^T T_k": (check_t9, HeadTransports, "product_traces", property(transposed_pairs), 0.1),
    "quartic form misindexed": (check_t9, HeadTransports, "quartic", property(asymmetric_quartic), 0.01),
    "wrong value heads": (check_t9, HeadTransports, "per_head", heads_on_the_wrong_values, 0.1),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_mathematics_fails_a_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, owner, attribute, wrong, least = WRONG[name]
    monkeypatch.setattr(owner, attribute, wrong)
    failed = [c for c in check(10) if not c.passed]
    assert failed and not check_table(failed)["passed"].any()
    residuals = [c.residual for c in failed]
    assert np.isnan(residuals).any() if np.isnan(least) else max(residuals) > least


# every quantity that a check compares: the theorem, whose attribute it is, and the checks that must notice
COMPARED: dict[str, tuple[str, type, set[str]]] = {
    "apply": ("T1", ConnectionWalk, {"T1 output, float64", "T1 output, float32", "T1 output, float16"}),
    "to_dense": ("T1", ConnectionWalk, {"T1 operator"}),
    "transport": ("T2", ConnectionWalk, {"T2 mean gauge", "T2 sum gauge", "T2 norm gauge"}),
    "effective_walk": ("T2", ConnectionWalk, {"T2 mean gauge is stochastic"}),
    "gates": ("T2", ConnectionWalk, {"T2 gates"}),
    "schmidt_values": ("T3", ConnectionWalk, {"T3 Schmidt values"}),
    "head_gram": ("T9", HeadTransports, {"T9 Gram matrix", "T9 norm", "T9 isometry of every edge"}),
    "quartic": ("T9", HeadTransports, {"T9 quartic form", "T9 isometry of every edge"}),
    "product_traces": ("T9", HeadTransports, {"T9 product traces"}),
    "head_singular_values": ("T9", ConnectionWalk, {"T9 singular values"}),
    "norm": ("T9", ConnectionWalk, {"T9 norm"}),
    "edge_isometry": ("T9", ConnectionWalk, {"T9 isometry of every edge"}),
}


@pytest.mark.parametrize("attribute", COMPARED)
def test_an_error_of_one_percent_fails_every_check_of_the_quantity(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check compares a quantity with itself."""
    theorem, owner, names = COMPARED[attribute]
    right = vars(owner)[attribute]

    def call(self: object, *arguments: object) -> object:
        return 1.01 * right(self, *arguments)

    def read(self: object) -> Tensor:
        return 1.01 * right.func(self)

    monkeypatch.setattr(owner, attribute, call if callable(right) else property(read))
    failed = {check.name for check in THEOREMS[theorem](3) if not check.passed}
    assert names <= failed
