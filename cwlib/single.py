"""One checkpoint on one text, every layer beside its Gaussian twin: what ``python -m cwlib measure`` computes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from torch import Tensor
from tqdm import tqdm

from cwlib import plots, style
from cwlib.architectures import attention_layers
from cwlib.capture import LayerWalk, layers
from cwlib.checkpoints import Checkpoint
from cwlib.cores import HeadTransports
from cwlib.files import write_atomically
from cwlib.metric import Layer
from cwlib.metrics import METRICS, RARELY
from cwlib.metrics_graph import SINK_FROM
from cwlib.nulls import null_layers

COLUMNS = ["checkpoint", "kind", "source", "layer", "depth", "metric", "gauge", "value", "note"]
#: what the figure shows, if it was measured and is defined
SHOWN = ("depth_step", "schmidt_participation", "head_isometry", "edge_isometry", "laplacian_defect", "sink_mass")

_STEPS = ("depth_step", "operator_cosine", "spectral_step")
_LEAST_TOKENS = {"sink_mass": SINK_FROM + 1, "angle_correlation": 3, "holonomy_defect": 3, "spectral_gap": 2}


def measured_layers(
    checkpoint: Checkpoint, text: str | Sequence[int] | Tensor, metrics: Sequence[str] | None = None
) -> Iterator[pd.DataFrame]:
    """Measure a checkpoint on one text, a layer at a time.

    Parameters
    ----------
    checkpoint : Checkpoint
        From `cwlib.open_checkpoint`.
    text : str, sequence of int, or integer Tensor
        As for `cwlib.layers`.
    metrics : sequence of str, optional
        Names out of ``cwlib.METRICS`` that are numbers; by default all but those that take seconds.

    Yields
    ------
    pd.DataFrame
        The rows of one layer: ``source`` is "trained", or "gaussian" for the same attention with Gaussian O_h, V_h;
        ``gauge`` is "mean" or "norm" where the token walk matters; ``depth`` is 0 at the first layer and 1 at the last.
        Where a value is undefined it is NaN, and ``note`` says why.

    Raises
    ------
    ValueError
        As `cwlib.layers`; if a name is unknown, or its values are a function.
    """
    names = [m.name for m in METRICS.values() if not (m.at or m.about in RARELY)] if metrics is None else list(metrics)
    for name in names:
        if name not in METRICS or METRICS[name].at or METRICS[name].about == "pairs":
            known = [m.name for m in METRICS.values() if not m.at]
            raise ValueError(f"metrics: expected names out of {', '.join(known)}, got {name!r}")
    last = max(len(attention_layers(checkpoint.model)) - 1, 1)
    return _rows(checkpoint, layers(checkpoint, text), names, last)


def _rows(
    checkpoint: Checkpoint, captured: Iterator[LayerWalk], names: Sequence[str], last: int
) -> Iterator[pd.DataFrame]:
    current: list[LayerWalk] = []

    def remembered() -> Iterator[LayerWalk]:
        for layer in captured:
            current[:] = [layer]
            yield layer

    known: dict[int, HeadTransports] = {}
    for index, twin in null_layers("gaussian", 0, remembered(), known):
        known.clear()
        rows = []
        for source, layer in (("trained", current[0]), ("gaussian", twin)):
            for name in names:
                if source == "gaussian" and METRICS[name].about in ("exactness", "graph"):
                    # it has no output of its own, and the same W as the trained layer unless transports weigh edges
                    gauges = ["norm"] if METRICS[name].about == "graph" else []
                else:
                    gauges = ["mean", "norm"] if METRICS[name].about == "graph" else [""]
                for gauge in gauges:
                    value = float(METRICS[name].compute(layer, gauge or "mean"))
                    note = "" if np.isfinite(value) else _why(name, layer, gauge)
                    rows.append((source, index, index / last, name, gauge, value, note))
        table = pd.DataFrame(rows, columns=COLUMNS[2:]).assign(checkpoint=checkpoint.name, kind=checkpoint.kind)
        yield table[COLUMNS]


def _why(name: str, layer: Layer, gauge: str) -> str:
    """Why a metric is undefined on a layer."""
    if name in _STEPS and layer.previous is None:
        return "there is no layer before"
    if layer.walk.n_src < _LEAST_TOKENS.get(name, 0):
        return f"it takes {_LEAST_TOKENS[name]} tokens or more"
    if gauge == "mean" and layer.walk.absorption is not None:
        return "learned sinks take a part of the attention, so that the rows of W do not sum to one"
    if name == "inverse_defect" and layer.walk.is_causal:
        return "under causal attention nothing flows back"
    return "what it is divided by vanishes"


def report(table: pd.DataFrame) -> str:
    """The trained values in the mean gauge as text: a line per metric with its range, and why some are undefined."""
    trained = table[(table["source"] == "trained") & (table["gauge"] != "norm")]
    wide = trained.pivot(index="layer", columns="metric", values="value").T
    wide.insert(0, "range", [METRICS[name].range for name in wide.index])
    lines = [wide.to_string(float_format="{:.4g}".format)]
    for (name, note), rows in trained[trained["note"] != ""].groupby(["metric", "note"], sort=False):
        numbers = [str(layer) for layer in rows["layer"]]
        where = f"layer {', '.join(numbers)}" if len(numbers) < trained["layer"].nunique() else "any layer"
        lines.append(f"{name} is not defined at {where}: {note}")
    return "\n".join(lines)


def collect(tables: Iterator[pd.DataFrame], out: Path) -> pd.DataFrame:
    """Write all layers' rows to a CSV file; if the run is interrupted or fails, those of the finished layers."""
    finished: list[pd.DataFrame] = []
    try:
        for table in tqdm(tables, desc="layers", unit="layer"):
            finished.append(table)
    finally:
        if finished:
            table = pd.concat(finished, ignore_index=True)
            write_atomically(out, table.to_csv(index=False).encode())
    if not finished:
        raise ValueError("checkpoint: expected a model with attention layers, got none")
    return table


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draw the metrics of `SHOWN` over depth, or else all that the table has, trained beside Gaussian."""
    table = table[np.isfinite(table["value"])]
    there = [name for name in table["metric"].unique() if (table["metric"] == name).any()]
    names = [name for name in SHOWN if name in there] or there
    with plt.rc_context(style.rc("text")):
        figure = plots.depth_grid(table, names)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=path.suffix.removeprefix("."), dpi=200)
        plt.close(figure)
    write_atomically(path, buffer.getvalue())
