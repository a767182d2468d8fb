"""T4 and T5 hold on many instances, fail without each hypothesis, and their checks notice wrong mathematics."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from cwlib import dense, theorems_balance, theorems_causal, theorems_laplacian
from cwlib.checks import Check, check_table
from cwlib.dense import Space
from cwlib.edges import EdgeWalk
from cwlib.theorems_causal import check_t5
from cwlib.theorems_laplacian import check_t4

INSTANCES = 100
F64 = torch.float64
# the one statement about a limit, read off a finite power
LIMIT = "T5 rate, a long power"

T4_FAILURES = {
    "T4 (a) one edge out of balance",
    "T4 (b) without metric balance",
    "T4 (b) metric balance without isometry",
    "T4 (b) metric balance without (S)",
    "T4 (b) does not make L self-adjoint",
    "T4 (c) no parallel fields, no kernel",
    "T4 (c) without (R)",
    "T4 (c) without isometry",
    "T4 (c) without inverses",
    "T4 (c) energy without (S)",
    "T4 (c) energy without isometry",
    "T4 (c) spectrum without (S)",
    "T4 (c) parallel fields without (S)",
    "T4 (d) isometric without (R)",
    "T4 (d) isometric without inverses",
    "T4 (d) (R) without isometry",
    "T4 (d) inverses without isometry",
    "T4 (e) non-reversible A, reflection",
    "T4 (e) rotation is no involution",
    "T4 (e) reversible A, rotation",
    "T4 (e) symmetric GT, no isometry",
    "T4 (e) symmetric GT, no involution",
    "T4 (e) symmetric GT, spectrum",
    "T4 (f) spectrum without isometry",
    "T4 (f) two scales",
    "T4 (g) attention counted twice",
}
T5_FAILURES = {
    "T5 with W_ii = 1 for some i > 0, stationary laws",
    "T5 with W_ii = 1 for some i > 0, absorption",
    "T5 with W_ii = 1 for some i > 0, limit",
    "T5 without W 1 = 1, limit",
    "T5 without W 1 = 1, absorption",
    "T5 looking ahead, stationary law",
    "T5 looking ahead, limit",
    "T5 looking ahead, eigenvalues",
    *(f"T5 (R), {law} measure" for law in ("random", "uniform", "degree")),
    *(f"T5 causal layer, {law} measure" for law in ("random", "uniform", "degree")),
    "T5 reversibilised in another measure",
    "T5 degree measure is positive",
    "T5 teleporting walk, law is positive",
    "T5 lazy walk, (R) in uniform and degree measure",
    "T5 teleporting walk, (R) in its stationary law",
}


def assert_theorem(theorem: str, check: Callable[[int], list[Check]], statements: set[str], failures: set[str]) -> None:
    """Assert that all checks pass on 100 instances, and that they are the statements and counterexamples named."""
    checks = check(INSTANCES)
    for item in checks:
        assert item.passed, item
        assert item.name.startswith(theorem)
        if item.holds:
            assert item.tolerance <= (2e-2 if item.name == LIMIT else 1e-10), item
        else:
            assert item.tolerance >= 1e-2, item
    assert {item.name for item in checks if item.holds} >= statements
    assert {item.name for item in checks if not item.holds} == failures
    table = check_table(checks)
    assert table["passed"].all() and (table["instances"] >= INSTANCES).all()


@pytest.mark.claim("T4")
def test_t4_when_the_generator_is_a_connection_laplacian(unchecked: None) -> None:
    statements = {
        *("T4 (a) asymmetry of M L", "T4 (a) detailed balance => self-adjoint"),
        *("T4 (a) self-adjoint => detailed balance",),
        *("T4 (b) with (S)", "T4 (b) metric balance => identity", "T4 (b) identity => metric balance"),
        *("T4 (c) self-adjoint", "T4 (c) energy", "T4 (c) connection Laplacian", "T4 (c) spectrum"),
        *("T4 (c) kernel, generic connection", "T4 (c) kernel, flat connection"),
        *("T4 (d) asymmetry of isometric walks", "T4 (d) self-adjoint and isometric => (R)"),
        *("T4 (d) self-adjoint and isometric => inverses", "T4 (e) spectrum of one head"),
        *("T4 (e) asymmetry of one head", "T4 (e) reversible A, symmetric GT"),
        *("T4 (f) mass", "T4 (f) spectrum", "T4 (g) residual stream", "T4 (g) lazy step"),
    }  # fmt: skip
    assert_theorem("T4", check_t4, statements, T4_FAILURES)


@pytest.mark.claim("T5")
def test_t5_token_0_absorbs_a_causal_walk(unchecked: None) -> None:
    statements = {
        *("T5 eigenvalues", "T5 token 0 stays", "T5 token 0 absorbs", "T5 stationary laws", "T5 powers", LIMIT),
        *("T5 eigenvalues of the remainder", "T5 no faster", "T5 asymmetry of the flow"),
        *(f"T5 nearest self-adjoint operator, {law} measure" for law in ("uniform", "degree", "random")),
        *(f"T5 Laplacian defect, {law} measure" for law in ("uniform", "degree", "random")),
        *("T5 lazy walk stays causal", "T5 teleporting walk, stationary law", "T5 a diagonal walk is reversible"),
    }
    assert_theorem("T5", check_t5, statements, T5_FAILURES)


def test_instances_vary_in_tokens_and_dimension() -> None:
    shapes = {tuple(Space.drawn(seed).metrics.shape[:2]) for seed in range(15)}
    assert shapes == {(tokens, d) for tokens in range(3, 8) for d in range(2, 5)}


# --- the dense side, entry by entry ----------------------------------------------------------------------------------


def loops(space: Space, walk: EdgeWalk, field: np.ndarray) -> dict[str, np.ndarray | float]:
    """Energy, arriving metrics, K and M by Python loops over the entries of numpy arrays."""
    pi, g = space.measure.numpy(), space.metrics.numpy()
    n, d = field.shape
    energy, arriving, step = 0.0, np.zeros((n, d, d)), np.zeros((n * d, n * d))
    gram = np.zeros((n * d, n * d))
    for i in range(n):
        gram[i * d : i * d + d, i * d : i * d + d] = pi[i] * g[i]
    for edge in range(len(walk.weight)):
        i, j, w = int(walk.dst[edge]), int(walk.src[edge]), float(walk.weight[edge])
        omega = walk.maps[edge].numpy()
        difference = field[i] - omega @ field[j]
        energy += pi[i] * w * difference @ g[i] @ difference / 2
        arriving[j] += pi[i] * w * omega.T @ g[i] @ omega
        step[i * d : i * d + d, j * d : j * d + d] += w * omega
    return {"energy": energy, "arriving": arriving, "K": step, "M": gram}


def test_dense_sides_equal_loops() -> None:
    for seed in range(5):
        space = Space.drawn(seed)
        walk = space.walk(stochastic=False, reversible=False, isometric=False, inverse=False)
        x, y = space.field(), space.field(1)
        expected = loops(space, walk, x.numpy())
        flat = x.flatten()
        np.testing.assert_allclose(space.energy(walk, x), expected["energy"], rtol=1e-12)
        np.testing.assert_allclose(flat @ space.energy_form(walk) @ flat, expected["energy"], rtol=1e-12)
        np.testing.assert_allclose(space.arriving(walk), expected["arriving"], rtol=1e-12)
        np.testing.assert_allclose(space.m, expected["M"], rtol=1e-12)
        np.testing.assert_allclose(dense.laplacian(walk), np.eye(len(flat)) - expected["K"], atol=1e-14)
        np.testing.assert_allclose(
            dense.assembled(dense.taken_apart(dense.laplacian(walk), space.d_model)), dense.laplacian(walk), rtol=0
        )
        np.testing.assert_allclose(space.inner(x, y), flat @ torch.tensor(expected["M"]) @ y.flatten(), rtol=1e-12)
        adjoint = np.linalg.inv(expected["M"]) @ expected["K"].T @ expected["M"]
        np.testing.assert_allclose(space.adjoint(torch.tensor(expected["K"])), adjoint, atol=1e-12)
        size = np.trace(adjoint @ expected["K"])
        np.testing.assert_allclose(space.square(torch.tensor(expected["K"])), size, rtol=1e-12)


def test_projectors_and_spectra() -> None:
    matrix = torch.tensor([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]], dtype=F64)
    half = torch.tensor([[0.5, -0.5, 0.0], [-0.5, 0.5, 0.0], [0.0, 0.0, 1.0]], dtype=F64)
    torch.testing.assert_close(dense.null_projector(matrix), half)
    columns = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [3.0, 2.0]], dtype=F64)
    torch.testing.assert_close(dense.span_projector(columns), half)
    twice, once = torch.tensor([1.0, 2.0, 2.0], dtype=F64), torch.tensor([2.0, 1.0, 1.0], dtype=F64)
    assert dense.spectra_agree("order", ("l", twice), ("r", twice.flip(0))).passed
    assert not dense.spectra_agree("multiplicity", ("l", twice), ("r", once)).passed
    rotation = torch.tensor([[1.0, -0.5], [0.5, 1.0]], dtype=F64)
    outside = dense.spectrum_within("not real", rotation, 0.0, 2.0, "[0, 2]")
    assert not outside.passed and outside.residual == pytest.approx(0.5)
    assert dense.spectrum_within("too large", 2.5 * torch.eye(2, dtype=F64), 0.0, 2.0, "[0, 2]").residual == 0.5


# --- wrong mathematics must show -------------------------------------------------------------------------------------

B, C, L = theorems_balance, theorems_causal, theorems_laplacian
conditioned_walk, random_walk = dense.conditioned_walk, C.random_walk
flat_walk, in_metric, parallel_fields = L.flat_walk, L.in_metric, L.parallel_fields
energy = Space.energy


def parts_b_and_c(instances: int) -> list[Check]:
    """The parts of T4 that need (S); a head of attention without it is refused."""
    spaces = [Space.drawn(seed) for seed in range(instances)]
    return [c for s in spaces for part in (B.energy_identity, L.connection_laplacian) for c in part(s)]


def ignores(switch: str) -> Callable[..., EdgeWalk]:
    """A `conditioned_walk` which keeps a condition that it was to break."""
    return lambda *args, **switches: conditioned_walk(*args, **switches | {switch: True})


def breaks(switch: str) -> Callable[..., EdgeWalk]:
    """A `conditioned_walk` which breaks a condition that it was to keep."""
    return lambda *args, **switches: conditioned_walk(*args, **switches | {switch: False})


def unscaled(*args: object, **switches: object) -> EdgeWalk:
    return conditioned_walk(*args, **switches | {"scale": 1.0})


def inverted_frames(seed: int, measure: Tensor, frames: Tensor) -> EdgeWalk:
    return flat_walk(seed, measure, torch.linalg.inv(frames))


def one_field_short(walk: EdgeWalk, measure: Tensor) -> Tensor:
    return parallel_fields(walk, measure)[1:]


def metric_for_its_root(walk: EdgeWalk, metric: Tensor) -> EdgeWalk:
    return in_metric(walk, metric @ metric)


def outgoing(self: Space, walk: EdgeWalk) -> Tensor:
    """Metrics gathered at the destination."""
    return torch.zeros_like(self.metrics).index_add(0, walk.dst, self.edge_flow(walk) * self.pulled_back(walk))


def along_the_reverse(self: EdgeWalk, field: Tensor) -> Tensor:
    messages = self.weight[:, None] * torch.einsum("eba,eb->ea", self.maps, field[self.src])
    return torch.zeros_like(field).index_add(0, self.dst, messages)


def all_heads_look_ahead(seed: int, causal: bool = False, **shape: int) -> object:
    return random_walk(seed, **shape)


def transpose(self: Space, operator: Tensor) -> Tensor:
    return operator.T


def column_sums(matrix: Tensor) -> Tensor:
    return matrix.sum(0) / matrix.sum()


def lazy_both_ways(matrix: Tensor, stay: float) -> Tensor:
    return (1 - stay) * matrix + stay * matrix.T


def restart_only(matrix: Tensor, restart: float) -> Tensor:
    return torch.full_like(matrix, 1 / len(matrix))


def uniform(matrix: Tensor) -> Tensor:
    return torch.full((len(matrix),), 1 / len(matrix), dtype=F64)


def scaled(function: Callable[..., float], factor: float) -> Callable[..., float]:
    return lambda *args: factor * function(*args)


WRONG: dict[str, tuple[Callable[[int], list[Check]], object, str, object, set[str]]] = {
    "(S) never broken": (check_t4, dense, "conditioned_walk", ignores("stochastic"), {"T4 (c) energy without (S)"}),
    "(R) never broken": (
        check_t4, dense, "conditioned_walk", ignores("reversible"),
        {"T4 (c) without (R)", "T4 (b) does not make L self-adjoint", "T4 (d) isometric without (R)"},
    ),
    "isometry never broken": (
        check_t4, dense, "conditioned_walk", ignores("isometric"),
        {"T4 (c) without isometry", "T4 (c) energy without isometry", "T4 (b) without metric balance",
         "T4 (d) inverses without isometry"},
    ),
    "inverses never broken": (
        check_t4, dense, "conditioned_walk", ignores("inverse"),
        {"T4 (c) without inverses", "T4 (d) isometric without inverses"},
    ),
    "(S) always broken": (
        parts_b_and_c, dense, "conditioned_walk", breaks("stochastic"),
        {"T4 (c) energy", "T4 (b) with (S)", "T4 (b) metric balance => identity", "T4 (c) connection Laplacian"},
    ),
    "(R) always broken": (
        check_t4, dense, "conditioned_walk", breaks("reversible"),
        {"T4 (c) self-adjoint", "T4 (c) graph weights", "T4 (e) reversible A, reflection"},
    ),
    "isometry always broken": (
        check_t4, dense, "conditioned_walk", breaks("isometric"),
        {"T4 (c) self-adjoint", "T4 (c) energy", "T4 (b) identity without (R)", "T4 (d) asymmetry of isometric walks",
         "T4 (d) self-adjoint and isometric => inverses", "T4 (d) operator read off, isometry"},
    ),
    "inverses always broken": (
        check_t4, dense, "conditioned_walk", breaks("inverse"),
        {"T4 (c) self-adjoint", "T4 (d) rescaled edges, L", "T4 (d) rescaled edges, inverses"},
    ),
    "energy not halved": (
        check_t4, Space, "energy", lambda self, *args: 2 * energy(self, *args),
        {"T4 (b) energy form", "T4 (b) identity => metric balance", "T4 (c) energy"},
    ),
    "metrics gathered at the destination": (
        check_t4, Space, "arriving", outgoing, {"T4 (b) with (S)", "T4 (b) metric balance => identity"}
    ),
    "way back not adjoint": (
        check_t4, B, "way_back_by_adjoint", lambda space, walk: walk,
        {"T4 (a) detailed balance => self-adjoint", "T4 (a) detailed balance => self-adjoint, fields"},
    ),
    "flat walk of inverse frames": (check_t4, L, "flat_walk", inverted_frames, {"T4 (c) kernel of a flat connection"}),
    "one parallel field short": (
        check_t4, L, "parallel_fields", one_field_short, {"T4 (c) parallel_fields, flat connection"}
    ),
    "metric for its root, fields": (
        check_t4, L, "in_metric", metric_for_its_root, {"T4 (c) parallel_fields, flat connection"}
    ),
    "metric for its root, defects": (
        check_t4, B, "in_metric", metric_for_its_root, {"T4 (a) detailed_balance_defect", "T4 (b) dirichlet_energy"}
    ),
    "defect not halved": (
        check_t4, B, "detailed_balance_defect", scaled(B.detailed_balance_defect, 2), {"T4 (a) detailed_balance_defect"}
    ),
    "energy off by one percent": (
        check_t4, B, "dirichlet_energy", scaled(B.dirichlet_energy, 1.01), {"T4 (b) dirichlet_energy"}
    ),
    "transposed transports": (
        check_t4, EdgeWalk, "__matmul__", along_the_reverse,
        {"T4 (g) residual stream", "T4 (g) after a norm", "T4 (c) energy"},
    ),
    "scale forgotten": (check_t4, dense, "conditioned_walk", unscaled, {"T4 (f) mass", "T4 (f) spectrum"}),
    "attention that looks ahead": (
        check_t5, C, "random_walk", all_heads_look_ahead,
        {"T5 token 0 stays", "T5 eigenvalues", "T5 stationary laws", "T5 powers", "T5 asymmetry of the flow",
         "T5 no faster", "T5 lazy walk stays causal", LIMIT},
    ),
    "transpose for adjoint": (
        check_t5, Space, "adjoint", transpose,
        {"T5 reversibilised, degree measure", "T5 nearest self-adjoint operator, degree measure",
         "T5 Laplacian defect, degree measure", "T5 reversibilised, uniform measure"},
    ),
    "metric for its root, T5": (
        check_t5, C, "in_metric", metric_for_its_root, {"T5 Laplacian defect, uniform measure"}
    ),
    "defect off by one percent": (
        check_t5, C, "laplacian_defect", scaled(C.laplacian_defect, 1.01),
        {f"T5 Laplacian defect, {law} measure" for law in ("uniform", "degree", "random")},
    ),
    "column sums for degrees": (
        check_t5, C, "degree_measure", column_sums,
        {"T5 degree measure", "T5 degree measure is stationary", "T5 degree measure is positive"},
    ),
    "lazy both ways": (
        check_t5, C, "lazy_walk", lazy_both_ways,
        {"T5 lazy walk stays causal", "T5 lazy walk, eigenvalues", "T5 lazy walk, stationary laws"},
    ),
    "nothing but restarts": (
        check_t5, C, "teleporting_walk", restart_only, {"T5 teleporting walk, (R) in its stationary law"}
    ),
    "uniform for stationary": (
        check_t5, C, "stationary_measure", uniform,
        {"T5 teleporting walk, stationary law", "T5 teleporting walk, one law"},
    ),
    "everything reversible": (
        check_t5, C, "reversibility_defect", lambda *_: 0.0,
        {"T5 (R), random measure", "T5 lazy walk, (R) in uniform and degree measure"},
    ),
    "NaN": (check_t5, C, "laplacian_defect", lambda *_: np.nan, {"T5 Laplacian defect, uniform measure"}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_mathematics_fails_a_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check, owner, attribute, wrong, noticed = WRONG[name]
    monkeypatch.setattr(owner, attribute, wrong)
    failed = {c.name for c in check(6) if not c.passed}
    assert noticed <= failed, noticed - failed
