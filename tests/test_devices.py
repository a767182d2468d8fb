"""Every public function does on another device what it does on the CPU, and leaves its tensors there."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from elsewhere import DEVICE, elsewhere, moved
from models import IDS, OLDER
from oracles import agree
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import LinearOperator
from torch import Tensor
from transformers import PreTrainedModel

import cwlib
from cwlib import (
    blocks,
    capture,
    holonomy,
    laplacian,
    measures,
    metrics_graph,
    metrics_spectrum,
    metrics_transport,
    nulls,
    spectra,
)
from cwlib.blocks import FactoredBlocks
from cwlib.checkpoints import tiny_checkpoint
from cwlib.cores import HeadTransports
from cwlib.edges import EdgeWalk, ExplicitBlocks
from cwlib.metrics import METRICS
from cwlib.nulls import NullLayer
from cwlib.synthetic import generator, random_metrics, random_walk
from cwlib.walk import ConnectionWalk

N, D = 9, 6
Place = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def second_device() -> Iterator[None]:
    with elsewhere():
        yield


def test_the_device_is_strict() -> None:
    here = torch.ones(3)
    away = moved(here)
    refused: list[Callable[[], object]] = [
        *(lambda: away + here, lambda: here[moved(torch.arange(2))], lambda: torch.stack([away, here])),
        *(
            lambda: here.index_add(0, torch.arange(3), away),
            lambda: here.sum() * away + here,
            lambda: here * away.sum(),
        ),
    ]
    for attempt in refused:
        with pytest.raises(RuntimeError, match=r"expected all tensors on one device"):
            attempt()
    with pytest.raises(RuntimeError, match="numpy"):
        away.numpy()
    for found in (away * 2, here.sum() * away, away[torch.arange(2)], away.new_zeros(2), away.masked_fill(away > 0, 2)):
        assert found.device.type == DEVICE and found.cpu().device.type == "cpu"
    away[:2] = 5
    assert float(away.sum()) == 11 and float(here.sum()) == 3


# --- what is called, and with what ---------------------------------------------------------------------------------


def attention_walk(place: Place, seed: int, causal: bool = False) -> ConnectionWalk:
    walk = random_walk(seed, heads=4, tokens=N, d_model=D, d_head=3, groups=2, causal=causal)
    return ConnectionWalk(*map(place, (walk.attention, walk.value, walk.output)), groups=2)


def edge_walk(place: Place, seed: int) -> EdgeWalk:
    """About half of all edges, and a loop at every token."""
    draw = generator(seed)
    support = (torch.rand(N, N, generator=draw) < 0.5) | torch.eye(N).bool()
    support[7, 4] = True
    dst, src = support.nonzero().T
    weight = torch.rand(len(dst), generator=draw, dtype=torch.float64) + 0.1
    maps = torch.randn(len(dst), D, D, generator=draw, dtype=torch.float64)
    return EdgeWalk(N, *map(place, (dst, src, weight, maps)))


WALKS = {"full": attention_walk, "causal": partial(attention_walk, causal=True), "edges": edge_walk}


@cache
def arguments(kind: str, place: Place) -> dict[str, Any]:
    """Arguments by the names of parameters. All tensors are placed, but those that index others."""
    walk, other = (WALKS[kind](place, seed) for seed in (1, 2))
    draw = generator(3)
    tensors = {
        "field": torch.randn(N, D, generator=draw, dtype=torch.float64),
        "measure": torch.rand(N, generator=draw, dtype=torch.float64) + 0.5,
        "metric": random_metrics(1, 1, D)[0],
        "frames": random_metrics(2, N, D),
        "maps": torch.randn(N, N, D, D, generator=draw, dtype=torch.float64),
        "matrix": torch.rand(N, N, generator=draw, dtype=torch.float64).softmax(1),
        "after": torch.rand(N, N, generator=draw, dtype=torch.float64).softmax(1),
    }
    known = {name: place(tensor) for name, tensor in tensors.items()} | {"walk": walk, "other": other}
    known |= {"law": known["measure"], "before": known["matrix"], "flow": known["matrix"]}
    known |= {"tokens": N, "cycle": [7, 7, 4], "dst": 7, "via": 7, "src": 4, "layer": attention_walk(place, 4)}
    known |= {"operator": spectra.additive(spectra.walk_operator(walk)), "name": "stay", "value": 0.5, "seed": 3}
    if isinstance(walk, ConnectionWalk):
        known |= {"attention": walk.attention, "left": walk.attention, "right": other.attention, "earlier": [other]}
        known |= {"transports": walk.transports, "form": walk.transports.head_gram, "value_indexed": walk.value}
        known |= {"others": other.transports, "triangles": torch.tensor([[7, 4, 1], [8, 5, 0]])}
    return known


# parameters that are called like something else above
CALLED = {
    "metrics_graph.operator_cosine": {"before": "walk", "after": "other"},
    "EdgeWalk.from_dense": {"walk": "matrix"},
    "EdgeWalk.from_walk": {"walk": "layer"},
    "HeadTransports.apply": {"vectors": "field"},
    "HeadTransports.gram": {"other": "others"},
    "HeadTransports.output_cores": {"other": "others"},
    "HeadTransports.value_cores": {"other": "others"},
}
# they index tensors elsewhere, or are asked for by number alone
ON_THE_CPU = {"metrics_transport.sample_triangles", "measures.uniform_measure"}
OF_ANY_WALK = (laplacian, holonomy, spectra)
OF_ATTENTION = (measures, metrics_graph, metrics_transport, metrics_spectrum, blocks)
OWNERS = {
    "attention": {"walk": ConnectionWalk, "walk.blocks": FactoredBlocks, "walk.transports": HeadTransports},
    "edges": {"walk": EdgeWalk, "walk.blocks": ExplicitBlocks},
}
Getter = Callable[[SimpleNamespace], Any]


def functions(modules: Iterable[ModuleType]) -> Iterator[tuple[str, Getter]]:
    """The public functions of modules."""
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_"):
                yield f"{module.__name__.removeprefix('cwlib.')}.{name}", lambda _, function=function: function


def attributes(owners: dict[str, type]) -> Iterator[tuple[str, Getter]]:
    """The public attributes of classes, of the instances that lie at the given paths."""
    for path, owner in owners.items():
        for name in dir(owner):
            if not name.startswith("_") or name == "__matmul__":
                yield f"{owner.__name__}.{name}", attrgetter(f"{path}.{name}")


SUBJECTS: dict[str, dict[str, Getter]] = {
    "full": dict([*functions(OF_ANY_WALK + OF_ATTENTION), *attributes(OWNERS["attention"])]),
    "causal": dict([*functions(OF_ANY_WALK + OF_ATTENTION), *attributes(OWNERS["attention"])]),
    "edges": dict([*functions(OF_ANY_WALK), *attributes(OWNERS["edges"])]),
}


def call(kind: str, label: str, place: Place) -> Iterator[object]:
    """What it gives with the arguments that it must have, and with those that it may have."""
    known = arguments(kind, place)
    subject = SUBJECTS[kind][label](SimpleNamespace(**known))
    if not callable(subject):
        yield subject
        return
    names = CALLED.get(label, {})
    parameters = [p for p in inspect.signature(subject).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    required = {p.name: known[names.get(p.name, p.name)] for p in parameters if p.default is p.empty}
    yield subject(**required)
    optional = [p.name for p in parameters if names.get(p.name, p.name) in known and p.name not in required]
    yield subject(**required | {name: known[names.get(name, name)] for name in optional})


def numbers(found: object, device: str) -> Iterator[object]:
    """Everything in a result that can be compared; its tensors must lie on the device."""
    if isinstance(found, Tensor):
        assert found.device.type == device
        yield found.cpu()
    elif isinstance(found, csr_matrix):
        yield found.toarray()
    elif isinstance(found, LinearOperator):
        yield found @ np.eye(found.shape[0])
    elif isinstance(found, ConnectionWalk | EdgeWalk):
        yield from numbers(found.to_dense(), device)
    elif isinstance(found, FactoredBlocks | ExplicitBlocks):
        yield from numbers(found.squares, device)
    elif isinstance(found, HeadTransports):
        yield from numbers(found.head_gram, device)
    elif dataclasses.is_dataclass(found):
        yield from vars(found).values()
    elif isinstance(found, dict):
        yield from chain.from_iterable(numbers(value, device) for value in found.values())
    elif isinstance(found, tuple | list | Iterator):
        yield from chain.from_iterable(numbers(value, device) for value in found)
    else:
        yield found


def assert_alike(away: object, here: object, on: str = DEVICE) -> None:
    for mine, theirs in zip(numbers(away, on), numbers(here, "cpu"), strict=True):
        if isinstance(theirs, str | None):
            assert mine == theirs
        else:
            agree(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("kind", "label"), [(kind, label) for kind in SUBJECTS for label in SUBJECTS[kind]])
def test_results_are_those_of_the_cpu_and_stay_on_the_device(kind: str, label: str) -> None:
    assert_alike(call(kind, label, moved), call(kind, label, torch.clone), "cpu" if label in ON_THE_CPU else DEVICE)


@pytest.mark.parametrize("kind", WALKS)
def test_measures_and_edges_given_on_the_cpu_go_where_the_maps_are(kind: str) -> None:
    known = arguments(kind, moved)
    uniform = measures.uniform_measure(N)
    assert_alike(laplacian.conditions(known["walk"], uniform), laplacian.conditions(known["walk"], moved(uniform)))
    edges = arguments("edges", torch.clone)["walk"]
    mixed = EdgeWalk(N, edges.dst, edges.src, edges.weight, moved(edges.maps))
    assert_alike(mixed, edges)


# --- layers --------------------------------------------------------------------------------------------------------


def two_layers(place: Place) -> list[NullLayer]:
    found: list[NullLayer] = []
    for index in range(2):
        field = torch.randn(N, D, generator=generator(index), dtype=torch.float64)
        before = found[-1] if found else None
        found.append(NullLayer(attention_walk(place, index, causal=True), place(field), before, index))
    return found


@pytest.mark.parametrize("gauge", ["mean", "norm"])
@pytest.mark.parametrize("name", [name for name in METRICS if name != "t2_residual"])
def test_metrics(name: str, gauge: str) -> None:
    for away, here in zip(two_layers(moved), two_layers(torch.clone), strict=True):
        assert_alike(cwlib.measure(away, [name], gauge), cwlib.measure(here, [name], gauge))
    away, here = (arguments("full", place)["walk"].transports for place in (moved, torch.clone))
    assert_alike(cwlib.measure(away), cwlib.measure(here))


@pytest.mark.parametrize("source", ["gaussian", "shuffled", "sinkless"])
def test_null_layers(source: str) -> None:
    away, here = (nulls.null_layers(source, 1, two_layers(place), {}) for place in (moved, torch.clone))
    for (_, mine), (_, theirs) in zip(away, here, strict=True):
        assert_alike((mine.walk, mine.field), (theirs.walk, theirs.field))


@pytest.mark.skipif(OLDER, reason="there transformers itself makes masks on the default device")
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "gemma3"])
def test_capture(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = capture._Capture.run

    def run(self: capture._Capture, model: PreTrainedModel) -> None:
        with elsewhere():  # on the thread of the model
            forward(self, model)

    monkeypatch.setattr(capture._Capture, "run", run)
    here, away = (tiny_checkpoint(family, dtype="float64") for _ in range(2))
    away = dataclasses.replace(away, model=moved(away.model), device=DEVICE)
    pairs = list(zip(cwlib.layers(away, IDS), cwlib.layers(here, IDS), strict=True))
    assert len(pairs) > 1
    for mine, theirs in pairs:
        assert_alike((mine.walk, mine.field, mine.output), (theirs.walk, theirs.field, theirs.output))
        assert mine.residual() < 1e-12
