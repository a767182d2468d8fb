r"""The empirical quantities: pure functions of walks, and their registry.

Every metric is this artifact's reading of the paper's abstract; none is defined by the paper. Attention-graph metrics
look at the token walk W (mean gauge: what attends; norm gauge: what flows); transport metrics look at the maps T_h and
Omega_ij. ``T`` without an index is the layer's total transport :math:`\sum_h T_h`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cwlib._types import Gauge
from cwlib.cores import HeadTransports
from cwlib.laplacian import (
    dirichlet_energy,
    inverse_defect,
    laplacian_defect,
    mass,
    metric_balance_defect,
    metric_defect,
    parallel_defect,
)
from cwlib.metric import (
    Layer,
    Metric,
    graph,
    graph_step,
    line,
    on_field,
    on_spectrum,
    on_walk,
    on_walk_and_field,
    on_weights,
    spectrum_on_weights,
)
from cwlib.metrics_graph import (
    MOST,
    depth_step,
    entropy_rate,
    layer_cosines,
    operator_cosine,
    reversibility_defect,
    schmidt_participation,
    schmidt_spectrum,
    single_walk_error,
    sink_mass,
    spectral_gap,
    spectral_step,
)
from cwlib.metrics_spectrum import (
    GRID,
    spectral_density,
    spectral_density_error,
    spectrum_highest,
    spectrum_lowest,
)
from cwlib.metrics_transport import (
    RELATIVE_RANKS,
    angle_correlation,
    edge_isometry,
    head_isometry,
    holonomy_defect,
    identity_alignment,
    norm_cv,
    singular_spectrum,
    sum_isometry,
    symmetry,
)
from cwlib.metrics_transport import sample_triangles as sample_triangles
from cwlib.walk import ConnectionWalk

RARELY = ("spectrum", "pairs")  #: what takes seconds a layer


def _operator_cosine(layer: Layer, _: Gauge) -> float:
    return np.nan if layer.previous is None else operator_cosine(layer.previous.walk, layer.walk)


def _layer_cosines(layer: Layer, _: Gauge) -> np.ndarray:
    earlier, before = [], layer.previous
    while before is not None:
        earlier.append(before.walk)
        before = before.previous
    index = getattr(layer, "index", len(earlier))
    if len(earlier) != index:
        raise ValueError(
            f"layer: layer_cosines needs the {index} layers before, of which {len(earlier)} are left; keep "
            "list(cwlib.layers(...))"
        )
    return layer_cosines(layer.walk, earlier[::-1])


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        graph_step(depth_step, "[0, 1]"),
        Metric("operator_cosine", "walk", "[-1, 1]", _operator_cosine, line(operator_cosine)),
        graph_step(spectral_step, "[0, 2]"),
        graph(reversibility_defect, "[0, 1]"),
        graph(spectral_gap, "[0, 2]"),
        graph(entropy_rate, "[0, log n] nats"),
        graph(sink_mass, "[0, 1]"),
        on_walk(schmidt_participation, "[1, H]"),
        on_walk(single_walk_error, "[0, 1)"),
        on_walk(schmidt_spectrum, "[0, 1]", tuple(np.arange(1.0, MOST + 1).tolist())),
        on_weights(head_isometry, "(0, 1]"),
        spectrum_on_weights(singular_spectrum, ">= 0", tuple(RELATIVE_RANKS.tolist())),
        on_weights(sum_isometry, "(0, 1]"),
        on_walk(edge_isometry, "(0, 1]"),
        on_weights(symmetry, "[0, 1]"),
        on_weights(identity_alignment, "[-1, 1]"),
        on_field(norm_cv, ">= 0"),
        on_field(angle_correlation, "[-1, 1]"),
        on_walk(holonomy_defect, "[0, 1]"),
        on_walk(laplacian_defect, "[0, 1]"),
        on_walk(metric_defect, "[0, 1]"),
        on_walk(inverse_defect, "[0, 1]"),
        on_walk(metric_balance_defect, "[0, 1]"),
        on_walk(mass, "< 1"),
        on_walk_and_field(dirichlet_energy, ">= 0"),
        on_walk_and_field(parallel_defect, "[0, 1]"),
        on_spectrum(spectral_density, ">= 0", tuple(GRID.tolist())),
        on_spectrum(spectral_density_error, ">= 0", tuple(GRID.tolist())),
        on_spectrum(spectrum_lowest, "real"),
        on_spectrum(spectrum_highest, "real"),
        Metric(
            "layer_cosines",
            "pairs",
            "[-1, 1]",
            _layer_cosines,
            line(layer_cosines),
            at=tuple(np.arange(float(MOST)).tolist()),
        ),
        Metric(
            "t2_residual",
            "exactness",
            "[0, 2]",
            lambda layer, _: layer.residual(),
            "Relative distance between P X plus the constant section and the module's own output (T2).",
        ),
    )
}


@dataclass(frozen=True)
class _Bare:
    """A walk without a model around it."""

    walk: ConnectionWalk
    field: Tensor | None = None
    previous: None = None


def measure(
    layer: Layer | ConnectionWalk | HeadTransports, metrics: Iterable[str] | None = None, gauge: Gauge = "mean"
) -> dict[str, float | np.ndarray]:
    """Measure one layer.

    Parameters
    ----------
    layer : LayerWalk, ConnectionWalk or HeadTransports
        A captured layer, or a walk of your own tensors (metrics that need the token field, the model's output or the
        previous layer are then left out by default, and refused by name; likewise, under cross-attention, those that
        need as many destinations as sources); or transports alone, for the metrics of weights.
    metrics : iterable of str, optional
        Names out of ``cwlib.METRICS``; by default all that apply, are numbers, and do not take seconds as those
        of the spectrum do.
    gauge : {"mean", "norm"}
        Which token walk W the attention-graph metrics look at; other metrics do not depend on it.

    Returns
    -------
    dict of str to float
        An array for a quantity that is a function (``cwlib.METRICS[name].at`` says where). Per-head quantities are
        averaged over heads. NaN where a quantity is undefined, such as a step from the previous layer at the first
        layer.

    Raises
    ------
    ValueError
        If a name or the gauge is unknown, or a bare walk lacks what a requested metric needs.
    """
    if gauge not in ("mean", "norm"):
        raise ValueError(f"gauge: expected 'mean' or 'norm', got {gauge!r} (sum is H times mean)")
    if isinstance(metrics, str):
        raise ValueError(f"metrics: expected a list of names, got the string {metrics!r}; write [{metrics!r}]")
    if isinstance(layer, HeadTransports):
        return _measure_weights(layer, metrics)
    bare = isinstance(layer, ConnectionWalk)
    if not bare and not isinstance(getattr(layer, "walk", None), ConnectionWalk):
        raise ValueError(
            f"layer: expected a layer from cwlib.layers, a ConnectionWalk or HeadTransports, got "
            f"{type(layer).__name__}; functions of cwlib.laplacian and cwlib.holonomy take an EdgeWalk too"
        )
    walk = layer if bare else layer.walk
    needs_model = {"depth_step", "spectral_step", "operator_cosine", "norm_cv", "angle_correlation", "t2_residual"}
    needs_model |= {"dirichlet_energy", "parallel_defect", "layer_cosines"}
    needs_square = {"spectral_step", "reversibility_defect", "spectral_gap", "holonomy_defect"}
    needs_square |= {"laplacian_defect", "metric_defect", "inverse_defect", "metric_balance_defect", "mass"}
    needs_square |= {"dirichlet_energy", "parallel_defect"}
    steps = {"depth_step", "spectral_step", "operator_cosine"}
    dropped = not bare and getattr(layer, "index", 0) > 0 and layer.previous is None
    left_out = (needs_model if bare else steps if dropped else set()) | (
        needs_square if walk.n_dst != walk.n_src else set()
    )
    by_default = [m.name for m in METRICS.values() if not (m.about in RARELY or m.at or m.name in left_out)]
    names = by_default if metrics is None else list(metrics)
    for name in names:
        if name not in METRICS:
            raise ValueError(f"metrics: unknown metric {name!r}; expected names out of {', '.join(METRICS)}")
        if dropped and name in steps:
            raise ValueError(
                f"layer: {name} needs the layer before, which is gone; measure while iterating over cwlib.layers, or "
                "keep list(cwlib.layers(...))"
            )
        if bare and name in needs_model:
            raise ValueError(
                f"layer: {name} needs a model's field, output or previous layer, got a bare ConnectionWalk; pass a "
                "layer from cwlib.layers, or call cwlib.metrics functions with both arguments"
            )
    target = _Bare(layer) if bare else layer
    return {name: METRICS[name].compute(target, gauge) for name in names}


def _measure_weights(transports: HeadTransports, metrics: Iterable[str] | None) -> dict[str, float | np.ndarray]:
    known = [metric.name for metric in METRICS.values() if metric.weights_only]
    names = [name for name in known if not METRICS[name].at] if metrics is None else list(metrics)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"metrics: expected those of weights, {', '.join(known)}, got {unknown[0]!r}; pass a walk")
    alone = torch.ones(transports.heads, 1, 1, dtype=torch.float64, device=transports.value.device)
    target = _Bare(ConnectionWalk.from_transports(alone, transports))  # any attention will do
    return {name: METRICS[name].compute(target, "mean") for name in names}
