"""On a CUDA device: the identities hold there, and the numbers are those of the CPU."""

import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from models import HYBRIDS
from models import TEXT_FAMILIES as FAMILIES
from oracles import agree
from test_cores import DEGENERATE, THIN, WIDE, head_with, transports_with
from test_devices import ON_THE_CPU, SUBJECTS, assert_alike, call
from torch import Tensor

import cwlib
from cwlib import bench, cost, holonomy, kernels, nulls
from cwlib.capture import LayerWalk
from cwlib.checkpoints import Checkpoint, open_checkpoint, tiny_checkpoint
from cwlib.cores import HeadTransports
from cwlib.metrics import METRICS, measure
from cwlib.synthetic import random_walk
from cwlib.walk import ConnectionWalk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

DEVICE = "cuda"
IDS = [7, 40, 3, 99, 120, 40, 8, 250, 61, 17, 5, 201, 33]
GAUGES = ("mean", "norm")
UP_TO_A_BASIS = ("holonomy.parallel_fields", "blocks.attention_factor")  #: results that are not the only right ones


def close(actual: Tensor | float, expected: Tensor | float, rtol: float = 1e-8) -> None:
    """Assert equality to ``rtol`` of the largest entry."""
    actual, expected = (torch.as_tensor(x).detach().cpu().double() for x in (actual, expected))
    size = float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0
    agree(actual, expected, rtol=rtol, atol=rtol * size)


def maps_there(transports: HeadTransports) -> HeadTransports:
    return HeadTransports(transports.value.to(DEVICE), transports.output.to(DEVICE), transports.groups)


def there(walk: ConnectionWalk) -> ConnectionWalk:
    """The same walk on the device, without what was computed before."""
    constant, absorption = (None if x is None else x.to(DEVICE) for x in (walk.constant, walk.absorption))
    return ConnectionWalk.from_transports(walk.attention.to(DEVICE), maps_there(walk.transports), constant, absorption)


def layers_there(captured: list[LayerWalk]) -> list[LayerWalk]:
    """Captured layers with the same tensors on the device."""
    result: list[LayerWalk] = []
    for layer in captured:
        link = weakref.ref(result[-1]) if result else None
        field, output = layer.field.to(DEVICE), layer.output.to(DEVICE)
        result.append(LayerWalk(layer.index, there(layer.walk), field, output, layer.path, layer.kind, link))
    return result


def opened(family: str, folder: Path, dtype: str, device: str = DEVICE, offload: bool = False) -> Checkpoint:
    if not folder.exists():
        tiny_checkpoint(family, seed=2, dtype=dtype).model.save_pretrained(folder, max_shard_size="60KB")
    return open_checkpoint(folder, device=device, dtype=dtype, offload=offload)


WALKS: dict[str, Callable[[], ConnectionWalk]] = {
    "full": lambda: random_walk(1, heads=4, tokens=12, d_model=16, d_head=4),
    "causal": lambda: random_walk(2, heads=4, tokens=12, d_model=16, d_head=4, causal=True),
    "grouped": lambda: random_walk(3, heads=6, tokens=11, d_model=16, d_head=4, groups=3, causal=True),
    "single precision": lambda: random_walk(4, heads=4, tokens=12, d_model=16, d_head=4, dtype=torch.float32),
    "more sources": lambda: random_walk(5, heads=3, tokens=5, d_model=16, d_head=4, sources=9),
    "d_head above d_model": lambda: random_walk(6, heads=3, tokens=6, d_model=3, d_head=5),
}
walks = pytest.mark.parametrize("kind", WALKS)
square = pytest.mark.parametrize("kind", [kind for kind in WALKS if kind != "more sources"])


# --- models -------------------------------------------------------------------------------------------------------


@pytest.mark.claim("T2")
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-5), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_reproduces_the_module(family: str, dtype: str, bound: float, tmp_path: Path) -> None:
    checkpoint = opened(family, tmp_path / "model", dtype)
    assert torch.device(checkpoint.device).type == DEVICE
    captured = list(cwlib.layers(checkpoint, IDS))
    assert len(captured) == (1 if family in HYBRIDS else checkpoint.model.config.num_hidden_layers)
    for layer in captured:
        tensors = (layer.walk.attention, layer.walk.value, layer.walk.output, layer.field, layer.output)
        assert {tensor.device.type for tensor in tensors} == {DEVICE}
        assert layer.residual() <= bound


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_cpu(family: str, tmp_path: Path) -> None:
    here = list(cwlib.layers(opened(family, tmp_path / "model", "float64", "cpu"), IDS))
    away = list(cwlib.layers(opened(family, tmp_path / "model", "float64"), IDS))
    for mine, theirs in zip(away, here, strict=True):
        assert torch.equal(mine.walk.value.cpu(), theirs.walk.value)
        assert torch.equal(mine.walk.output.cpu(), theirs.walk.output)
        # several models round the softmax to float32 even when they run in float64
        close(mine.walk.attention, theirs.walk.attention, rtol=1e-5)
        close(mine.field, theirs.field, rtol=1e-5)
        close(mine.output, theirs.output, rtol=1e-5)


@pytest.mark.claim("T2")
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_an_offloaded_model(family: str, tmp_path: Path) -> None:
    here = list(cwlib.layers(opened(family, tmp_path / "model", "float32"), IDS))
    checkpoint = opened(family, tmp_path / "model", "float32", offload=True)
    for mine, theirs in zip(cwlib.layers(checkpoint, IDS), here, strict=True):
        assert mine.residual() <= 1e-5
        close(mine.walk.attention, theirs.walk.attention, rtol=1e-5)
        close(mine.walk.apply(mine.field), theirs.walk.apply(theirs.field), rtol=1e-5)


# --- metrics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_metric_is_that_of_the_cpu(family: str) -> None:
    here = list(cwlib.layers(tiny_checkpoint(family, seed=2, dtype="float64"), IDS))
    for mine, theirs in zip(layers_there(here), here, strict=True):
        for gauge in GAUGES:
            for name in METRICS:
                found, expected = (measure(layer, [name], gauge)[name] for layer in (mine, theirs))
                if name == "t2_residual":  # itself a rounding error
                    assert found <= 1e-6 and expected <= 1e-6
                else:
                    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10, err_msg=f"{name}, {gauge}")


def test_metrics_of_weights_alone() -> None:
    transports = random_walk(3, heads=6, d_model=16, d_head=4, groups=3).transports
    found, expected = measure(maps_there(transports)), measure(transports)
    assert found == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("source", ["gaussian", "shuffled", "sinkless"])
def test_null_models_draw_the_same_numbers(source: str) -> None:
    here = list(cwlib.layers(tiny_checkpoint("llama", dtype="float64"), IDS))
    names = ["sum_isometry", "edge_isometry", "holonomy_defect", "single_walk_error"]
    away = nulls.null_layers(source, 5, layers_there(here), {})
    for (_, mine), (_, theirs) in zip(away, nulls.null_layers(source, 5, here, {}), strict=True):
        assert mine.walk.attention.device.type == mine.walk.value.device.type == DEVICE
        assert measure(mine, names) == pytest.approx(measure(theirs, names), rel=1e-8)


# --- walks --------------------------------------------------------------------------------------------------------


@walks
def test_cores(kind: str) -> None:
    walk = WALKS[kind]()
    mine, theirs = maps_there(walk.transports), walk.transports
    for name in ("head_gram", "quartic", "product_traces"):
        close(getattr(mine, name), getattr(theirs, name), rtol=1e-11)
    for found, expected in zip(mine.triangle_forms, theirs.triangle_forms, strict=True):
        close(found, expected, rtol=1e-11)
    other = random_walk(9, heads=2, d_model=walk.d_model, d_head=3).transports
    close(mine.gram(maps_there(other)), theirs.gram(other), rtol=1e-11)
    close(mine.traces(), theirs.traces(), rtol=1e-11)
    close(mine.total().head_gram, theirs.total().head_gram, rtol=1e-11)
    assert mine.quartic.device.type == DEVICE


@walks
def test_numbers_of_edges_and_tokens(kind: str) -> None:
    theirs = WALKS[kind]()
    mine = there(theirs)
    field = torch.randn(theirs.n_src, theirs.d_model, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    names = ["squares", "quartics", "ranks", "totals"]
    if theirs.n_dst == theirs.n_src:
        names += ["pairings", "round_trips"]
    for name in names:
        close(getattr(mine.blocks, name), getattr(theirs.blocks, name), rtol=1e-11)
    flow = theirs.effective_walk()
    for found, expected in zip(mine.blocks.incoming(flow.to(DEVICE)), theirs.blocks.incoming(flow), strict=True):
        close(found, expected, rtol=1e-11)
    away = field.to(DEVICE)
    close(mine.blocks.incoming_energy(flow.to(DEVICE), away), theirs.blocks.incoming_energy(flow, field), rtol=1e-11)
    close(mine @ away, theirs @ field, rtol=1e-11)
    close(mine.edge_isometry(), theirs.edge_isometry(), rtol=1e-9)
    close(mine.schmidt_values(), theirs.schmidt_values())
    close(mine.norm(), theirs.norm(), rtol=1e-11)
    close(mine.to_dense(), theirs.to_dense(), rtol=1e-11)


@walks
@pytest.mark.parametrize("room", [1, 60])
def test_many_pieces_give_what_one_piece_gives(kind: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = WALKS[kind]()
    monkeypatch.setattr(kernels, "WORKSPACE", room)
    mine = there(walk)
    assert len(list(kernels.pieces(mine.attention))) > 1
    close(mine.edge_isometry(), walk.edge_isometry(), rtol=1e-9)
    close(mine.schmidt_values(), walk.schmidt_values())
    close(maps_there(walk.transports).singular_values(), walk.transports.singular_values())


@square
def test_holonomy(kind: str) -> None:
    theirs = WALKS[kind]()
    mine = there(theirs)
    close(holonomy.holonomy(mine, [4, 2, 1]), holonomy.holonomy(theirs, [4, 2, 1]), rtol=1e-10)
    for function in (holonomy.cycle_defect, lambda walk, cycle: holonomy.triangle_defect(walk, *cycle)):
        close(function(mine, [4, 2, 1]), function(theirs, [4, 2, 1]))


def on_device(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


@pytest.mark.parametrize(
    ("kind", "label"), [(kind, label) for kind in SUBJECTS for label in SUBJECTS[kind] if label not in UP_TO_A_BASIS]
)
def test_every_public_function(kind: str, label: str) -> None:
    assert_alike(call(kind, label, on_device), call(kind, label, torch.clone), "cpu" if label in ON_THE_CPU else DEVICE)


# --- singular values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0], ids=["in O", "in both", "in V"])
def test_singular_values_that_fall_over_many_digits(share: float) -> None:
    heads = [head_with(np.logspace(0, -digits, THIN), share, digits) for digits in (0, 1, 2, 3, 6, 9, 12)]
    found = maps_there(transports_with(*heads)).singular_values().cpu().numpy()
    for digits, values in zip((0, 1, 2, 3, 6, 9, 12), found, strict=True):
        expected = np.logspace(0, -digits, THIN)
        np.testing.assert_allclose(values, expected, rtol=1e-9 if digits <= 3 else 0, atol=1e-12)


@pytest.mark.parametrize("name", DEGENERATE)
def test_singular_values_of_heads_without_full_rank(name: str) -> None:
    """What a failed Cholesky factorisation leaves behind must not spoil the other heads."""
    rng = np.random.default_rng(19)
    heads = [(rng.normal(size=(WIDE, THIN)), rng.normal(size=(THIN, WIDE))) for _ in range(3)]
    DEGENERATE[name](*heads[1])
    found = maps_there(transports_with(*heads)).singular_values().cpu().numpy()
    for values, (output, value) in zip(found, heads, strict=True):
        expected = np.linalg.svd(output @ value, compute_uv=False)[:THIN]
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12 * expected[0])


# --- the benchmark ------------------------------------------------------------------------------------------------


def test_the_benchmark_runs() -> None:
    table = bench.run("smoke", DEVICE, report=lambda _: None)
    assert list(table.columns) == cost.COLUMNS
    assert (table.loc[table["unit"] == "s", "value"] > 0).all()
    assert (table["error"].dropna() <= 5e-6).all()
    assert np.isfinite(cost.exponents(table)["exponent"]).all()
