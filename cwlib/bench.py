"""What the closed forms of T9 save, as ratios measured in one run on one machine.

Every way to a number is timed in turns with the others, and compared with what cwlib computes. What would take hours is
timed on a sample, multiplied, and said to be.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from cwlib import rivals
from cwlib.big import configuration, write_random_checkpoint
from cwlib.checkpoints import open_checkpoint
from cwlib.cost import COLUMNS, THEORY
from cwlib.footprint import WAYS, capture_way, gpt2, run_through, token_ids
from cwlib.laplacian import laplacian_defect
from cwlib.measures import uniform_measure
from cwlib.sizes import PROFILES, Profile, Shape, causal_attention, fresh, transports_of
from cwlib.synthetic import generator
from cwlib.timing import Timing, gemm_rate, interleaved
from cwlib.walk import ConnectionWalk


class Bench:
    """The rows of one run."""

    def __init__(self, profile: Profile, device: str, report: Callable[[str], None]) -> None:
        self.profile, self.device, self.report = profile, device, report
        self.rows: list[dict[str, object]] = []
        self.lens = rivals.lens_installed()

    def add(
        self,
        group: str,
        case: str,
        timings: Mapping[str, Timing],
        errors: Mapping[str, float],
        sampled: Mapping[str, float],
        tokens: int | None = None,
    ) -> None:
        """Rows of one comparison; ratios are to cwlib's time."""
        for way, timing in timings.items():
            row = {"group": group, "case": case, "way": way, "tokens": tokens, "unit": "s"}
            row |= {"value": timing.seconds, "low": timing.low, "high": timing.high, "repeats": timing.repeats}
            row |= {"sampled": sampled.get(way, 1.0), "error": errors.get(way, np.nan)}
            self.rows.append(row | {"ratio": timing.seconds / timings["cwlib"].seconds})
        self.report(f"{group}, {case}" + (f", {tokens} tokens" if tokens else ""))

    def number(self, group: str, case: str, way: str, value: float | int, unit: str, **more: float | int) -> None:
        """A row that is not a time."""
        self.rows.append({"group": group, "case": case, "way": way, "value": value, "unit": unit} | more)

    def singular_values(self) -> None:
        """All heads of a model: cwlib, TransformerLens, and dense transports of a sample of heads."""
        for shape in self.profile.shapes:
            layers = transports_of(shape, self.device)
            heads = range(self.profile.sample[0] if shape.d_model < 4096 else 1)
            whole, part = shape.layers / shape.timed, shape.layers * shape.heads / len(heads)
            ways: dict[str, Callable[[], object]] = {
                "cwlib": lambda layers=layers: [layer.singular_values() for layer in layers],
                "dense": lambda layers=layers, heads=heads: rivals.dense_singular_values(layers[0], heads),
                "dense, float32": lambda layers=layers, heads=heads: rivals.dense_singular_values(
                    layers[0], heads, torch.float32
                ),
            }
            if self.lens:
                # the factors in its layout, as a loaded model has them: of all layers in one, as its users ask for
                # them, and layer by layer
                singles = [rivals.lens_factors(layer) for layer in layers]
                whole32, whole64 = (rivals.lens_stacked(layers, dtype) for dtype in (torch.float32, torch.float64))
                ways |= {
                    "TransformerLens": lambda f=whole32: type(f)(f.A, f.B).S,
                    "TransformerLens, float64": lambda f=whole64: type(f)(f.A, f.B).S,
                    "TransformerLens, by layer": lambda fs=singles: torch.stack([type(f)(f.A, f.B).S for f in fs]),
                }
            slow = 1 if shape.d_model >= 4096 else 3
            repeats = {way: self.profile.repeats if way == "cwlib" else slow for way in ways}
            timings = interleaved(ways, repeats, self.device)
            mine = torch.stack([layer.singular_values() for layer in layers])
            errors = {way: _error(ways[way](), mine) for way in ways if way != "cwlib"}
            scale = {way: part if way.startswith("dense") else whole for way in ways}
            timings = {way: timing.times(scale[way]) for way, timing in timings.items()}
            self.add("singular values", shape.name, timings, errors, {way: 1 / scale[way] for way in ways})

    def edge_isometry(self) -> None:
        """All edges of one layer: cwlib, batched matrix products, and one decomposition an edge."""
        for shape in self.profile.edges_of:
            transports = transports_of(Shape(**asdict(shape) | {"timed": 1}), self.device)[0]
            attention = causal_attention(shape.heads, self.profile.tokens, self.device)
            walk = ConnectionWalk.from_transports(attention, transports)
            edges = walk.support.nonzero()
            few = edges[torch.randperm(len(edges), generator=generator(0))[: self.profile.sample[1]].to(self.device)]
            more = edges[torch.randperm(len(edges), generator=generator(1))[: 8 * len(few)].to(self.device)]
            ways = {
                "cwlib": lambda a=attention, t=transports: ConnectionWalk.from_transports(a, fresh(t)).edge_isometry(),
                "dense": lambda w=walk, e=few: rivals.edge_isometry_by_svd(w, e),
                "batched einsum": lambda w=walk, e=more: rivals.edge_isometry_by_einsum(w, e, 8),
                "batched einsum, float32": lambda w=walk, e=more: rivals.edge_isometry_by_einsum(
                    w, e, 8, torch.float32
                ),
            }
            timings = interleaved(ways, self.profile.repeats, self.device)
            mine = walk.edge_isometry()
            chosen = {way: few if way == "dense" else more for way in ways if way != "cwlib"}
            errors = {
                way: float(((ways[way]() - mine[tuple(e.T)]) / mine[tuple(e.T)]).abs().max())
                for way, e in chosen.items()
            }
            sampled = {way: len(e) / len(edges) for way, e in chosen.items()}
            timings = {way: timing.times(1 / sampled.get(way, 1.0)) for way, timing in timings.items()}
            self.add("edge isometry", shape.name, timings, errors, sampled, self.profile.tokens)

    def operators(self) -> None:
        """Laplacian defect and Schmidt values of a small layer, whose dense operator fits into memory."""
        tokens, heads, d_head = self.profile.operator
        shape = Shape("", heads * d_head, heads, heads, d_head, 1, 1)
        [transports], attention = transports_of(shape, self.device), causal_attention(heads, tokens, self.device)
        measure = uniform_measure(tokens).to(self.device)
        case = f"{heads} heads of {d_head}"

        def walk() -> ConnectionWalk:
            return ConnectionWalk.from_transports(attention, fresh(transports))

        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "Laplacian defect": (
                lambda: laplacian_defect(walk(), measure),
                lambda: rivals.dense_laplacian_defect(walk(), measure),
            ),
            "Schmidt values": (lambda: walk().schmidt_values(), lambda: rivals.dense_schmidt_values(walk())),
        }
        for group, (mine, dense) in pairs.items():
            timings = interleaved({"cwlib": mine, "dense": dense}, {"cwlib": self.profile.repeats, "dense": 2})
            ours, theirs = (torch.as_tensor(way()) for way in (mine, dense))
            self.add(group, case, timings, {"dense": float(((ours - theirs) / theirs).abs().max())}, {}, tokens)

    def capture(self) -> None:
        """A whole model: time in turns here, memory in processes of their own."""
        for case, shape in self.profile.models.items():
            model = gpt2(*shape, self.device)
            for tokens in self.profile.lengths:
                names = [way for way in WAYS if self.lens or way != "TransformerLens"]
                ways = {way: capture_way(way, model, token_ids(tokens, self.device)) for way in names}
                timings = interleaved(ways, max(2, self.profile.repeats // 2), self.device)
                self.add("capture", case, timings, {}, {}, tokens)
                footprints = {way: self.footprint(way=way, shape=shape, tokens=tokens)["bytes"] for way in ways}
                for way, size in footprints.items():
                    ratio = size / footprints["cwlib"]
                    self.number("capture memory", case, way, size, "B", tokens=tokens, ratio=ratio)
                self.report(f"capture memory, {case}, {tokens} tokens")

    def footprint(self, **request: object) -> dict[str, float | int]:
        """Peak memory, in bytes over the model's, and seconds of a request to `cwlib.footprint`."""
        command = [sys.executable, "-m", "cwlib.footprint", json.dumps(request | {"device": self.device})]
        # Every tensor goes back to the system when it is freed: what the C library would keep in reserve is of no way.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        return json.loads(done.stdout.splitlines()[-1])

    def big(self) -> None:
        """Metrics of the weights of a folder with 8 billion parameters, in memory and time."""
        with tempfile.TemporaryDirectory(prefix="cwlib-bench-") as folder:
            parameters = write_random_checkpoint(configuration("llama", **self.profile.big), Path(folder) / "model")
            found = self.footprint(folder=str(Path(folder) / "model"))
        case = f"{parameters / 1e9:.1f}B parameters"
        self.number("metrics of weights", case, "cwlib", found["seconds"], "s")
        self.number("metrics of weights memory", case, "cwlib", found["bytes"], "B")
        self.report("metrics of weights")

    def growth(self) -> None:
        """Time over one variable at a time; `exponents` fits powers."""
        values, base = self.profile.growth, Shape("", 1024, 8, 8, 32, 1, 1)
        for work, variable in THEORY:
            if work == "capture memory":
                self._memory_over_layers(values["layers"])
                continue
            ways = {}
            for size in values[variable]:
                ways[str(size)] = self._work(work, base, variable, size)
            for size, timing in interleaved(ways, self.profile.repeats, self.device).items():
                spread = {"low": timing.low, "high": timing.high, "repeats": timing.repeats}
                self.number("growth", f"{work} over {variable}", size, timing.seconds, "s", **spread)
            self.report(f"growth, {work} over {variable}")

    def _work(self, work: str, base: Shape, variable: str, size: int) -> Callable[[], object]:
        if work == "capture":
            _, d_model, heads = next(iter(self.profile.models.values()))
            checkpoint = open_checkpoint(gpt2(size, d_model, heads, self.device), device=self.device)
            ids = token_ids(self.profile.lengths[0], self.device)
            return lambda: run_through(checkpoint, ids)
        sizes = {"d_model": size} if variable == "d_model" else {}
        if variable == "heads":
            sizes = {"heads": size, "kv_heads": size}
        shape = Shape(**asdict(base) | sizes)
        [transports] = transports_of(shape, self.device)
        if work == "singular_values":
            return lambda: fresh(transports).singular_values()
        attention = causal_attention(shape.heads, size if variable == "tokens" else self.profile.tokens, self.device)
        return lambda: ConnectionWalk.from_transports(attention, fresh(transports)).edge_isometry()

    def _memory_over_layers(self, layers: Sequence[int]) -> None:
        _, d_model, heads = next(iter(self.profile.models.values()))
        tokens = self.profile.lengths[-1]
        for count in layers:
            found = self.footprint(way="cwlib", shape=(count, d_model, heads), tokens=tokens)
            self.number("growth", "capture memory over layers", str(count), found["bytes"], "B", tokens=tokens)
        self.report("growth, capture memory over layers")

    def gemm(self) -> None:
        """The share of a large matrix product's rate that the two dominant computations reach."""
        rate = gemm_rate(self.device)
        self.number("matrix products", "2048 x 2048", "float64", rate, "1/s", ratio=1.0)
        shape = self.profile.shapes[0]
        [transports] = transports_of(Shape(**asdict(shape) | {"timed": 1}), self.device)
        heads, kv, d, d_model = shape.heads, shape.kv_heads, shape.d_head, shape.d_model
        work = {
            # two Gram matrices a head, which are symmetric
            "singular values": (lambda: fresh(transports).singular_values(), (heads + kv) * d_model * d**2),
            # cores of outputs and values, their products for pairs of groups there and back, and the traces of these
            "quartic form": (
                lambda: fresh(transports).quartic,
                d_model * d**2 * (heads**2 + kv**2) + 2 * (kv + 1) * heads**2 * d**3 + (kv + 1) / kv * heads**4 * d**2,
            ),
        }
        for name, timing in interleaved(
            {name: run for name, (run, _) in work.items()}, self.profile.repeats, self.device
        ).items():
            reached = work[name][1] / timing.seconds
            self.number("matrix products", name, "float64", reached, "1/s", ratio=reached / rate)
        self.report("matrix products")


def run(
    profile: str = "full",
    device: str = "cpu",
    report: Callable[[str], None] = print,
    keep: Callable[[pd.DataFrame], None] = lambda _: None,
) -> pd.DataFrame:
    """Measure everything, in one process and on one machine.

    Parameters
    ----------
    profile : {"full", "smoke"}
        Sizes.
    device : str
        "cpu", or a CUDA device of torch.
    report : callable
        Is told of every finished part.
    keep : callable
        Is given the rows so far after each group of parts.

    Returns
    -------
    pd.DataFrame
        A row per way: ``value`` in ``unit`` (seconds, bytes or operations per second) with quartiles, ``ratio`` to
        cwlib's value, the ``sampled`` part of the work that was timed (the value is for all of it), and the largest
        relative ``error`` between the way and cwlib.

    Raises
    ------
    ValueError
        If the profile is unknown.
    """
    if profile not in PROFILES:
        raise ValueError(f"profile: expected one of {', '.join(PROFILES)}, got {profile!r}")
    bench = Bench(PROFILES[profile], device, report)
    for part in (
        bench.gemm,
        bench.singular_values,
        bench.edge_isometry,
        bench.operators,
        bench.growth,
        bench.capture,
        bench.big,
    ):
        part()
        keep(pd.DataFrame(bench.rows).reindex(columns=COLUMNS))
    if not bench.lens:
        report("TransformerLens is not installed and was not measured: pip install 'cwlib[bench]'")
    return pd.DataFrame(bench.rows).reindex(columns=COLUMNS)


def _error(theirs: Tensor, mine: Tensor) -> float:
    """The largest relative difference, of all layers or of the first heads of the first."""
    if theirs.ndim == 2:
        mine = mine[0, : len(theirs)]
    return float(((theirs.to(torch.float64) - mine) / mine).abs().max())
