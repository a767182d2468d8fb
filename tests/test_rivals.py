"""The ways without cores give the numbers of the cores, so that a comparison of their times means something."""

import socket
import sys
from collections.abc import Callable

import numpy as np
import oracles
import pytest
import torch
from oracles import Layer, agree
from torch import nn
from transformers import GPT2LMHeadModel

import cwlib
from cwlib import laplacian, rivals
from cwlib.checkpoints import Checkpoint, tiny_checkpoint
from cwlib.cores import HeadTransports
from cwlib.synthetic import random_measure, random_walk
from cwlib.walk import ConnectionWalk

kinds = pytest.mark.parametrize("kind", oracles.KINDS)
precisions = pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 1e-3)])
SEEDS = range(2)
IDS = torch.tensor([[7, 40, 3, 99, 120, 40, 8, 250, 61, 17, 5, 201, 33]])


def pairs(kind: str) -> list[tuple[Layer, ConnectionWalk]]:
    """Seeded layers of one kind, for the oracles and as walks."""
    layers = [oracles.instance(kind, seed) for seed in SEEDS]
    return [(x, ConnectionWalk(*map(torch.from_numpy, x.parts), groups=x.groups)) for x in layers]


def every_edge(walk: ConnectionWalk) -> torch.Tensor:
    """All pairs (dst, src), last first, so that an order that is lost shows."""
    return torch.cartesian_prod(torch.arange(walk.n_dst), torch.arange(walk.n_src)).flip(0)


# --- singular values of heads ----------------------------------------------------------------------------------------


@kinds
def test_dense_singular_values_are_those_of_the_cores(kind: str) -> None:
    for layer, walk in pairs(kind):
        heads = list(range(walk.heads))[::-1]
        values = rivals.dense_singular_values(walk.transports, heads)
        agree(values, oracles.singular_values(layer)[heads])
        agree(values, walk.transports.singular_values()[heads], rtol=1e-7)


@kinds
@precisions
def test_factored_matrices_of_transformerlens_have_the_singular_values_of_the_cores(
    kind: str, dtype: torch.dtype, rtol: float
) -> None:
    pytest.importorskip("transformer_lens")
    for layer, walk in pairs(kind):
        values = rivals.lens_factors(walk.transports, dtype).S
        assert values.dtype == dtype
        agree(values, oracles.singular_values(layer), rtol, atol=rtol)
        agree(values, walk.transports.singular_values(), max(rtol, 1e-7), atol=rtol)


def test_factored_matrices_are_laid_out_as_in_transformerlens() -> None:
    pytest.importorskip("transformer_lens")
    assert rivals.lens_installed()
    for layer, walk in pairs("grouped") + pairs("full"):
        factors = rivals.lens_factors(walk.transports, torch.float64)
        agree(factors.AB, np.transpose(oracles.transports(layer), (0, 2, 1)))
        assert factors.A.is_contiguous() and factors.B.is_contiguous(), "a stride would be timed with it"


def test_single_precision_is_asked_for() -> None:
    walk = random_walk(0, heads=4, d_model=64, d_head=16, groups=2)
    values = rivals.dense_singular_values(walk.transports, [3, 0], torch.float32)
    assert values.dtype == torch.float32 and values.shape == (2, 16)
    agree(values, walk.transports.singular_values()[[3, 0]], rtol=1e-4)


# --- isometry of edges -----------------------------------------------------------------------------------------------


@kinds
def test_isometry_of_edges_is_that_of_the_cores(kind: str) -> None:
    for layer, walk in pairs(kind):
        edges = every_edge(walk)
        expected = oracles.edge_isometries(layer)[*edges.T.numpy()]
        for found in (
            rivals.edge_isometry_by_svd(walk, edges),
            rivals.edge_isometry_by_einsum(walk, edges, chunk=len(edges)),
            rivals.edge_isometry_by_einsum(walk, edges, chunk=4),  # the last chunk is smaller
        ):
            assert found.dtype == torch.float64
            agree(found, expected)
            agree(found, walk.edge_isometry()[*edges.T], rtol=1e-8)


def test_isometry_of_edges_in_single_precision() -> None:
    walk = random_walk(1, heads=4, tokens=5, d_model=64, d_head=8, groups=2, causal=True)
    found = rivals.edge_isometry_by_einsum(walk, every_edge(walk), 7, torch.float32)
    assert found.dtype == torch.float32
    agree(found, walk.edge_isometry().flatten().flip(0), rtol=1e-4)


def test_edges_may_be_few_or_repeated_or_of_short_integers() -> None:
    walk = random_walk(2, causal=True)
    edges = torch.tensor([[4, 1], [2, 2], [4, 1]], dtype=torch.int32)
    expected = walk.edge_isometry()[[4, 2, 4], [1, 2, 1]]
    agree(rivals.edge_isometry_by_svd(walk, edges), expected, rtol=1e-8)
    agree(rivals.edge_isometry_by_einsum(walk, edges, 2), expected, rtol=1e-8)


# --- the dense operator ----------------------------------------------------------------------------------------------


def distance_from_self_adjoint(layer: Layer, pi: np.ndarray) -> float:
    """|K - 1/2 (K + K*)|_M / |K|_M with every matrix written out, |X|_M^2 = tr(X* X)."""
    m, k = np.kron(np.diag(pi), np.eye(layer.shape[3])), oracles.operator(layer)

    def adjoint(x: np.ndarray) -> np.ndarray:
        return np.linalg.inv(m) @ x.T @ m

    def norm(x: np.ndarray) -> float:
        return float(np.sqrt(np.trace(adjoint(x) @ x)))

    return norm(k - (k + adjoint(k)) / 2) / norm(k)


@pytest.mark.parametrize("kind", ["full", "causal", "zeros", "grouped", "grouped causal", "one token", "thin heads"])
def test_laplacian_defect_is_that_of_the_cores(kind: str) -> None:
    for (layer, walk), seed in zip(pairs(kind), SEEDS, strict=True):
        measure = random_measure(seed, walk.n_dst)
        found = rivals.dense_laplacian_defect(walk, measure)
        agree(found, distance_from_self_adjoint(layer, measure.numpy()))
        agree(found, laplacian.laplacian_defect(walk, measure), rtol=1e-8)


@kinds
def test_schmidt_values_are_those_of_the_cores(kind: str) -> None:
    for layer, walk in pairs(kind):
        found = rivals.dense_schmidt_values(walk)
        agree(found, oracles.schmidt(layer))
        agree(found, walk.schmidt_values(), atol=1e-7)


# --- forward passes --------------------------------------------------------------------------------------------------


def gpt2(implementation: str = "eager") -> tuple[Checkpoint, GPT2LMHeadModel]:
    """Two layers, 32 wide: a checkpoint, and the same model with a head."""
    checkpoint = tiny_checkpoint("gpt2", seed=1, num_hidden_layers=2, hidden_size=32)
    checkpoint.model.set_attn_implementation(implementation)
    headed = GPT2LMHeadModel(checkpoint.model.config).eval()
    headed.transformer.load_state_dict(checkpoint.model.state_dict())
    return checkpoint, headed


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    agree(actual.double(), expected.double(), rtol=1e-4, atol=3e-6)


def test_attentions_of_transformers_are_those_of_the_walks() -> None:
    checkpoint, headed = gpt2()
    result = rivals.forward_with_attentions(headed, IDS)
    captured = [layer.walk.attention for layer in cwlib.layers(checkpoint, IDS)]
    assert len(captured) == len(result.attentions) == 2 and len(result.hidden_states) == 3
    for attention, expected in zip(result.attentions, captured, strict=True):
        near(attention[0], expected)
    assert not result.attentions[0].requires_grad and result.past_key_values is None


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_plain_pass_ends_where_the_pass_with_attentions_does(implementation: str) -> None:
    checkpoint, headed = gpt2(implementation)
    last, logits = rivals.plain_forward(checkpoint.model, IDS), rivals.plain_forward(headed, IDS)
    assert checkpoint.model.config._attn_implementation == implementation, "timed as it is set"
    checkpoint.model.set_attn_implementation("eager")
    near(last, rivals.forward_with_attentions(checkpoint.model, IDS).hidden_states[-1])
    near(logits, last @ headed.lm_head.weight.detach().T)
    assert not last.requires_grad


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_transformerlens_caches_what_the_walks_hold(
    head: bool, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformer_lens")

    def refuse(*_: object) -> None:
        raise AssertionError("a local model needs no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    checkpoint, headed = gpt2(implementation)
    model = headed if head else checkpoint.model
    before = rivals.plain_forward(model, IDS)
    lens = rivals.lens_model(model)
    cache = rivals.lens_run_with_cache(lens, IDS)
    assert len(cache) == 2 * 3, "attention, field and output of two layers"
    for layer in cwlib.layers(checkpoint, IDS):
        near(cache["pattern", layer.index][0], layer.walk.attention)
        near(cache[f"blocks.{layer.index}.attn.hook_in"][0], layer.field)
        near(cache["attn_out", layer.index][0], layer.output)
        factors = rivals.lens_factors(layer.walk.transports)
        assert torch.equal(lens.W_V[layer.index], factors.A), "raw weights, in the layout of the factored matrices"
        assert torch.equal(lens.W_O[layer.index], factors.B)
    assert torch.equal(rivals.plain_forward(model, IDS), before), "the model is left as it was"
    assert model.config._attn_implementation == implementation


# --- wrong inputs ----------------------------------------------------------------------------------------------------

WALK = random_walk(0, heads=3, tokens=4)
UNEVEN = random_walk(0, tokens=3, sources=5)
LARGE = ConnectionWalk(torch.full((1, 128, 128), 1 / 128), torch.ones(1, 1, 128), torch.ones(1, 128, 1))
EDGES = torch.tensor([[0, 1], [3, 2]])


def training() -> nn.Module:
    return gpt2()[0].model.train()


# what is attempted, and words its error must hold: the argument, what was expected, what came
WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "no heads": (lambda: rivals.dense_singular_values(WALK.transports, []), ("heads", "at least one", "0..2", "[]")),
    "head too large": (lambda: rivals.dense_singular_values(WALK.transports, [0, 3]), ("heads", "0..2", "[0, 3]")),
    "head negative": (lambda: rivals.dense_singular_values(WALK.transports, [-1]), ("heads", "0..2", "[-1]")),
    "half precision": (
        lambda: rivals.dense_singular_values(WALK.transports, [0], torch.float16),
        ("dtype", "torch.float32", "got torch.float16"),
    ),
    "edges in half precision": (
        lambda: rivals.edge_isometry_by_einsum(WALK, EDGES, 1, torch.bfloat16),
        ("dtype", "torch.float64", "got torch.bfloat16"),
    ),
    "edge too far": (lambda: rivals.edge_isometry_by_svd(WALK, EDGES + 1), ("edges", "(4, 4)", "to [4, 3]")),
    "source too far": (
        lambda: rivals.edge_isometry_by_svd(UNEVEN, torch.tensor([[2, 4], [0, 5]])),
        ("edges", "(3, 5)", "to [2, 5]"),
    ),
    "edge negative": (
        lambda: rivals.edge_isometry_by_einsum(WALK, EDGES - 1, 1),
        ("edges", "(4, 4)", "from [-1, 0]"),
    ),
    "edges transposed": (
        lambda: rivals.edge_isometry_by_svd(WALK, torch.zeros(2, 3, dtype=torch.long)),
        ("edges", "(edge, 2)", "(2, 3)"),
    ),
    "edges as a mask": (
        lambda: rivals.edge_isometry_by_einsum(WALK, torch.ones(4, 2, dtype=torch.bool), 1),
        ("edges", "integers", "torch.bool"),
    ),
    "no edges": (lambda: rivals.edge_isometry_by_svd(WALK, EDGES[:0]), ("edges", "got", "(0, 2)")),
    "chunk of none": (lambda: rivals.edge_isometry_by_einsum(WALK, EDGES, 0), ("chunk", "at least one", "got 0")),
    "walk between token sets": (
        lambda: rivals.dense_laplacian_defect(UNEVEN, random_measure(0, 3)),
        ("walk", "as many destinations as sources", "3 and 5"),
    ),
    "measure of other tokens": (
        lambda: rivals.dense_laplacian_defect(WALK, torch.ones(3)),
        ("measure", "4 positive weights", "[1.0, 1.0, 1.0]"),
    ),
    "measure of zero": (
        lambda: rivals.dense_laplacian_defect(WALK, torch.tensor([1.0, 0, 1, 1])),
        ("measure", "4 positive weights", "0.0"),
    ),
    "measure infinite": (
        lambda: rivals.dense_laplacian_defect(WALK, torch.tensor([1.0, torch.inf, 1, 1])),
        ("measure", "4 positive weights", "inf"),
    ),
    "measure not a number": (
        lambda: rivals.dense_laplacian_defect(WALK, torch.tensor([1.0, torch.nan, 1, 1])),
        ("measure", "4 positive weights", "nan"),
    ),
    "operator too large": (lambda: rivals.dense_schmidt_values(LARGE), ("to_dense", "1 GiB")),
    "plain pass in training": (lambda: rivals.plain_forward(training(), IDS), ("model", "evaluation", "model.eval()")),
    "pass in training": (lambda: rivals.forward_with_attentions(training(), IDS), ("model", "evaluation")),
    "attention not eager": (
        lambda: rivals.forward_with_attentions(gpt2("sdpa")[0].model, IDS),
        ("model", "eager", "'sdpa'", "set_attn_implementation"),
    ),
    "two texts": (lambda: rivals.plain_forward(gpt2()[0].model, IDS.repeat(2, 1)), ("ids", "(1, token)", "(2, 13)")),
    "ids without a batch": (lambda: rivals.plain_forward(gpt2()[0].model, IDS[0]), ("ids", "(1, token)", "(13,)")),
    "no ids": (lambda: rivals.forward_with_attentions(gpt2()[0].model, IDS[:, :0]), ("ids", "(1, 0)")),
    "vectors for ids": (lambda: rivals.plain_forward(gpt2()[0].model, IDS.float()), ("ids", "integers", "float32")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs_are_refused(name: str, unchecked: None) -> None:
    attempt, words = WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


LENS_WRONG: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "half precision": (
        lambda: rivals.lens_stacked([WALK.transports], torch.float16),
        ("dtype", "torch.float32", "got torch.float16"),
    ),
    "in training": (lambda: rivals.lens_model(training()), ("model", "evaluation", "model.eval()")),
    "another family": (lambda: rivals.lens_model(tiny_checkpoint("llama").model), ("model", "GPT2Model", "got llama")),
    "no model of transformers": (lambda: rivals.lens_model(nn.Linear(2, 2)), ("model", "GPT2Model", "got Linear")),
    "pass in training": (
        lambda: rivals.lens_run_with_cache(rivals.lens_model(gpt2()[0].model).train(), IDS),
        ("model", "evaluation"),
    ),
    "two texts": (
        lambda: rivals.lens_run_with_cache(rivals.lens_model(gpt2()[0].model), IDS.repeat(2, 1)),
        ("ids", "(1, token)", "(2, 13)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LENS_WRONG)
def test_wrong_inputs_are_refused_before_transformerlens_sees_them(name: str, unchecked: None) -> None:
    pytest.importorskip("transformer_lens")
    attempt, words = LENS_WRONG[name]
    with pytest.raises(ValueError, match="expected") as caught:
        attempt()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: rivals.lens_factors(WALK.transports),
        lambda: rivals.lens_stacked([WALK.transports]),
        lambda: rivals.lens_model(gpt2()[0].model),
    ],
)
def test_without_transformerlens_the_error_says_how_to_get_it(
    attempt: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("transformer_lens", "transformer_lens.model_bridge.sources"):
        monkeypatch.setitem(sys.modules, module, None)
    assert not rivals.lens_installed()
    with pytest.raises(ImportError, match=r"pip install 'cwlib\[bench\]'"):
        attempt()


def test_parameters_that_require_gradients_are_read_as_numbers() -> None:
    trained = HeadTransports(nn.Parameter(WALK.value), nn.Parameter(WALK.output))
    walk = ConnectionWalk.from_transports(WALK.attention, trained)
    assert not rivals.dense_singular_values(trained, [0]).requires_grad
    assert not rivals.edge_isometry_by_einsum(walk, EDGES, 1).requires_grad
    assert not rivals.edge_isometry_by_svd(walk, EDGES).requires_grad
