"""Dynamics and energies of the atlas by other routes, and with mistakes put in, which their checks must find."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from cwlib import atlas_dynamics, atlas_energies
from cwlib.atlas_pair import SYSTEMS, Pair, Placed
from cwlib.checks import relative_residual

MODULES = (atlas_dynamics.__name__, atlas_energies.__name__)
NAMES = [name for name, entry in SYSTEMS.items() if entry.place.__module__ in MODULES]
SEED = 5


@pytest.fixture(scope="module")
def placed() -> dict[str, Placed]:
    return {name: SYSTEMS[name].place(SEED) for name in NAMES}


def failed(found: Placed) -> set[str]:
    return {check.name.partition(": ")[2] for check in found.checks if not check.passed}


def series(found: Placed, name: str) -> np.ndarray:
    return found.curve[found.curve["series"] == name]["y"].to_numpy()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["weight", "maps"])
def test_a_changed_edge_is_no_longer_the_system(placed: dict[str, Placed], name: str, part: str) -> None:
    found = placed[name]
    parts = {"weight": found.pair.weight.clone(), "maps": found.pair.maps.clone()}
    parts[part][1, 0] *= 1.1
    assert found.residual < 1e-12 < 1e-4 < Placed(Pair(**parts), found.field, found.output).residual


@pytest.mark.parametrize("name", NAMES)
def test_checks_bear_the_name_of_their_system(placed: dict[str, Placed], name: str) -> None:
    assert not failed(placed[name])
    assert len(placed[name].checks) >= 2
    assert all(check.name.startswith(f"{name}: ") for check in placed[name].checks)


attend, embed, solve = atlas_dynamics._attention, atlas_energies._attention, atlas_dynamics.solve_ivp
MISTAKES: dict[str, tuple[ModuleType, str, Callable, str, set[str]]] = {
    "lazy": (
        *(atlas_dynamics, "_attention", lambda x, form, mask=None: 0.9 * attend(x, form, mask) + 0.1 * np.eye(len(x))),
        "Masked attention",
        {
            "the causal mask collapses exponentially",
            "the local mask collapses exponentially",
            "a full layer cubes the distance",
        },
    ),
    "unmasked": (
        *(atlas_dynamics, "_attention", lambda x, form, mask=None: attend(x, form)),
        *("Attention with LayerNorm", {"growing V keeps full rank"}),
    ),
    "another end": (
        *(atlas_dynamics, "solve_ivp", lambda flow, span, *args, **given: solve(flow, (0, 0.95), *args, **given)),
        *("Neural ODE transformer", {"layers are explicit Euler"}),
    ),
    "rough flow": (
        *(atlas_dynamics, "solve_ivp", lambda *args, **given: solve(*args[:3], "RK23")),
        *("OT-Transformer", {"equal tokens turn in circles"}),
    ),
    "another temperature": (
        *(atlas_energies, "_attention", lambda query, memory, beta: embed(query, memory, 2 * beta)),
        "Hopfield attention",
        {"attention is the gradient step in the queries", "the gradient step in all tokens"},
    ),
    "half the pull": (
        *(atlas_energies, "_attention", lambda query, memory, beta: embed(query, memory, beta) / 2),
        *("Attention on the sphere", {"the energy grows with the speeds", "all tokens meet"}),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_system_is_found(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    module, function, wrong, name, expected = MISTAKES[mistake]
    monkeypatch.setattr(module, function, wrong)
    assert expected <= failed(SYSTEMS[name].place(SEED))


# --- masks and LayerNorm --------------------------------------------------------------------------------------------


def test_local_masks_collapse_slower_than_causal_ones_and_full_ones_fastest(placed: dict[str, Placed]) -> None:
    at = {mask: series(placed["Masked attention"], mask) for mask in ("full", "causal", "local")}
    assert len(at["full"]) < 6 < 30 < len(at["causal"]) < 60 < len(at["local"])  # layers until 1e-14
    assert at["local"][30] > 100 * at["causal"][30]


def test_without_queries_growing_values_have_a_closed_equilibrium() -> None:
    """Uniform causal attention: x_ik (l_i - l_k) = sum_{k<=j<i} l_k x_jk, and rows of length one."""
    tokens, growth = 5, 4.0 ** torch.arange(5, dtype=torch.float64)
    x = torch.zeros(tokens, tokens, dtype=torch.float64)
    for i in range(tokens):
        for k in range(i):
            x[i, k] = growth[k] / (growth[i] - growth[k]) * x[k:i, k].sum()
        x[i, i] = (1 - x[i].square().sum()).sqrt()
    uniform = torch.ones(tokens, tokens, dtype=torch.float64).tril()
    uniform /= uniform.sum(1, keepdim=True)
    here = torch.randn(tokens, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED)).tril()
    here *= here.diagonal().sign()[:, None]
    for _ in range(100):
        here = torch.nn.functional.normalize(uniform @ here * growth, dim=1)
    assert torch.allclose(here, x, atol=1e-12)
    assert torch.linalg.svdvals(x)[-1] > 0.3


def test_distance_from_consensus_stays_with_growing_values_alone(placed: dict[str, Placed]) -> None:
    found = placed["Attention with LayerNorm"]
    assert series(found, "V growing").min() > 1 and len(series(found, "V growing")) == 201
    assert series(found, "V orthogonal")[-1] < 1e-13 and len(series(found, "token 0 tilted")) < 100


# --- flows ----------------------------------------------------------------------------------------------------------


def test_shared_weights_do_not_come_closer_with_more_layers(placed: dict[str, Placed]) -> None:
    found = placed["Neural ODE transformer"]
    right, wrong = series(found, "weights follow depth"), series(found, "weights shared")
    assert right[-1] < right[0] / 12 and wrong[-1] > 0.5 * wrong[0] and wrong[-1] > 10 * right[-1]


def test_a_residual_layer_is_lazy(placed: dict[str, Placed]) -> None:
    pair, field = placed["Neural ODE transformer"].pair, placed["Neural ODE transformer"].field
    step = 1 / 8
    assert (pair.weight.diagonal() > 1 / (1 + step)).all()
    walk = (pair.weight * (1 + step) - torch.eye(len(field))) / step
    value = pair.maps[0, 1] / (1 + step)
    assert relative_residual(pair @ field, field + step * walk @ field @ value.T) < 1e-14


def test_a_turning_velocity_is_orthogonal_to_what_it_turns(placed: dict[str, Placed]) -> None:
    found = placed["OT-Transformer"]
    constant = torch.ones(len(found.field), 1, dtype=torch.float64) * found.field[0]
    assert abs((constant * (found.pair @ constant)).sum()) < 1e-12
    assert torch.linalg.norm(found.pair @ constant) == pytest.approx(2 * float(constant.norm()))


# --- energies, by automatic differentiation -------------------------------------------------------------------------


def hopfield_energy(queries: Tensor, memories: Tensor, beta: float = 0.7) -> Tensor:
    return queries.square().sum() / 2 - (beta * queries @ memories.T).logsumexp(1).sum() / beta


def test_blocks_are_the_jacobian_of_attention(placed: dict[str, Placed]) -> None:
    x = torch.from_numpy(np.random.default_rng(SEED).standard_normal((2, 5, 3))[0])
    jacobian = torch.autograd.functional.jacobian(lambda y: (0.7 * y @ y.T).softmax(-1) @ y, x)
    assert relative_residual(placed["Hopfield attention"].pair.blocks(), jacobian.permute(0, 2, 1, 3)) < 1e-14


def test_attention_steps_down_an_energy_of_queries_and_both_ways_one_of_all_tokens() -> None:
    x = torch.from_numpy(np.random.default_rng(SEED).standard_normal((2, 5, 3))[0])
    weight = (0.7 * x @ x.T).softmax(-1)
    in_queries = torch.func.grad(hopfield_energy)(x, x)
    in_all = torch.func.grad(lambda y: hopfield_energy(y, y))(x)
    assert relative_residual(x - in_queries, weight @ x) < 1e-14
    assert relative_residual(x - in_all, weight @ x + weight.T @ x) < 1e-14


def test_velocity_on_the_sphere_is_the_projected_gradient_over_the_denominators(placed: dict[str, Placed]) -> None:
    found = placed["Attention on the sphere"]
    x, tokens = found.field, len(found.field)
    gradient = torch.func.grad(lambda y: (y @ y.T).exp().sum() / (2 * tokens**2))(x)
    tangent = gradient - (gradient * x).sum(1, keepdim=True) * x
    assert relative_residual(found.output, tokens**2 * tangent / (x @ x.T).exp().sum(1, keepdim=True)) < 1e-14


def test_a_large_beta_holds_tokens_apart_for_longer(placed: dict[str, Placed]) -> None:
    found = placed["Attention on the sphere"]
    assert (series(found, r"$\beta$ = 4")[50:100] > 10 * series(found, r"$\beta$ = 1")[50:100]).all()
