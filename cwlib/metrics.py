r"""The empirical quantities: pure functions of walks, and their registry.

Every metric is this artifact's reading of the paper's abstract; none is defined by the paper. Attention-graph metrics
look at the token walk W (mean gauge: what attends; norm gauge: what flows); transport metrics look at the maps T_h and
Omega_ij. ``T`` without an index is the layer's total transport :math:`\sum_h T_h`.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from cwlib._types import Field, Gauge
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
from cwlib.measures import stochastic_walk
from cwlib.metrics_graph import (
    TokenWalk,
    depth_step,
    entropy_rate,
    operator_cosine,
    reversibility_defect,
    schmidt_participation,
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
    angle_correlation,
    edge_isometry,
    head_isometry,
    holonomy_defect,
    identity_alignment,
    norm_cv,
    sum_isometry,
    symmetry,
)
from cwlib.metrics_transport import sample_triangles as sample_triangles
from cwlib.walk import ConnectionWalk


@runtime_checkable
class Layer(Protocol):
    """What `measure` needs of a captured layer; `cwlib.capture.LayerWalk` is one."""

    @property
    def walk(self) -> ConnectionWalk: ...
    @property
    def field(self) -> Tensor: ...
    @property
    def previous(self) -> "Layer | None": ...


@dataclass(frozen=True)
class Metric:
    """A named quantity of one layer.

    Attributes
    ----------
    name, description, range : str
        For the glossary; ``description`` gives the formula or the docstring's first line.
    version : int
        Raised whenever the definition changes, so that stored rows are recomputed.
    about : {"graph", "walk", "transport", "spectrum", "exactness"}
        Depends on W alone (and then on the gauge); on attention and transports (and perhaps the field); on transports
        (and perhaps the field); on the spectrum of the operator, which takes seconds; or compares the walk with
        the model.
    compute : callable
        ``(layer, gauge) -> float``, or an array over ``at``; NaN where the quantity is undefined for that layer.
    at : tuple of float
        Where a quantity that is a function is evaluated; empty for a number.
    weights_only : bool
        Whether the passage does not matter.
    """

    name: str
    about: Literal["graph", "walk", "transport", "spectrum", "exactness"]
    range: str
    compute: Callable[[Layer, Gauge], float | np.ndarray]
    description: str
    version: int = 1
    weights_only: bool = False
    at: tuple[float, ...] = ()


def _line(function: Callable) -> str:
    # the docstring's first paragraph, its mathematics marked as Markdown and notebooks have it
    first = " ".join((function.__doc__ or "").split("\n\n")[0].split())
    return re.sub(r":math:`([^`]*)`", r"$\1$", first).replace("``", "`")


_TOKEN_WALKS: "WeakKeyDictionary[ConnectionWalk, dict[Gauge, TokenWalk | None]]" = WeakKeyDictionary()


def _token_walk(walk: ConnectionWalk, gauge: Gauge) -> TokenWalk | None:
    """W with its measure and spectrum, kept while the layer lives; None if nothing flows into some token."""
    known = _TOKEN_WALKS.setdefault(walk, {})
    if gauge not in known:
        defined = bool((walk.effective_walk(gauge) > 0).any(1).all())
        known[gauge] = TokenWalk(stochastic_walk(walk, gauge)) if defined else None
    return known[gauge]


def _on_token_walks(function: Callable[..., float], gauge: Gauge, *walks: ConnectionWalk) -> float:
    found = [_token_walk(walk, gauge) for walk in walks]
    return np.nan if None in found else function(*found)


def _graph(function: Callable[[TokenWalk], float], bounds: str) -> Metric:
    def compute(layer: Layer, gauge: Gauge) -> float:
        return _on_token_walks(function, gauge, layer.walk)

    return Metric(function.__name__, "graph", bounds, compute, _line(function))


def _graph_step(function: Callable[[TokenWalk, TokenWalk], float], bounds: str) -> Metric:
    def compute(layer: Layer, gauge: Gauge) -> float:
        if layer.previous is None:
            return np.nan
        return _on_token_walks(function, gauge, layer.previous.walk, layer.walk)

    return Metric(function.__name__, "graph", bounds, compute, _line(function))


def _on_walk(function: Callable[[ConnectionWalk], float], bounds: str) -> Metric:
    return Metric(function.__name__, "walk", bounds, lambda x, _: function(x.walk), _line(function))


def _on_weights(function: Callable[[HeadTransports], float | Tensor], bounds: str) -> Metric:
    def compute(layer: Layer, _: Gauge) -> float:
        # a head without any transport has no isometry; the mean is over the others
        return float(torch.as_tensor(function(layer.walk.transports), dtype=torch.float64).nanmean())

    return Metric(function.__name__, "transport", bounds, compute, _line(function), weights_only=True)


def _on_walk_and_field(function: Callable[[ConnectionWalk, Field], float], bounds: str) -> Metric:
    return Metric(function.__name__, "walk", bounds, lambda x, _: function(x.walk, x.field), _line(function))


def _on_spectrum(
    function: Callable[[ConnectionWalk], float | np.ndarray], bounds: str, at: tuple[float, ...] = ()
) -> Metric:
    return Metric(function.__name__, "spectrum", bounds, lambda x, _: function(x.walk), _line(function), at=at)


def _on_field(function: Callable[[HeadTransports, Field], float], bounds: str) -> Metric:
    return Metric(
        function.__name__,
        "transport",
        bounds,
        lambda x, _: function(x.walk.transports, x.field),
        _line(function),
    )


def _operator_cosine(layer: Layer, _: Gauge) -> float:
    return np.nan if layer.previous is None else operator_cosine(layer.previous.walk, layer.walk)


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        _graph_step(depth_step, "[0, 1]"),
        Metric("operator_cosine", "walk", "[-1, 1]", _operator_cosine, _line(operator_cosine)),
        _graph_step(spectral_step, "[0, 2]"),
        _graph(reversibility_defect, "[0, 1]"),
        _graph(spectral_gap, "[0, 2]"),
        _graph(entropy_rate, "[0, log n] nats"),
        _graph(sink_mass, "[0, 1]"),
        _on_walk(schmidt_participation, "[1, H]"),
        _on_walk(single_walk_error, "[0, 1)"),
        _on_weights(head_isometry, "(0, 1]"),
        _on_weights(sum_isometry, "(0, 1]"),
        _on_walk(edge_isometry, "(0, 1]"),
        _on_weights(symmetry, "[0, 1]"),
        _on_weights(identity_alignment, "[-1, 1]"),
        _on_field(norm_cv, ">= 0"),
        _on_field(angle_correlation, "[-1, 1]"),
        _on_walk(holonomy_defect, "[0, 1]"),
        _on_walk(laplacian_defect, "[0, 1]"),
        _on_walk(metric_defect, "[0, 1]"),
        _on_walk(inverse_defect, "[0, 1]"),
        _on_walk(metric_balance_defect, "[0, 1]"),
        _on_walk(mass, "< 1"),
        _on_walk_and_field(dirichlet_energy, ">= 0"),
        _on_walk_and_field(parallel_defect, "[0, 1]"),
        _on_spectrum(spectral_density, ">= 0", tuple(GRID.tolist())),
        _on_spectrum(spectral_density_error, ">= 0", tuple(GRID.tolist())),
        _on_spectrum(spectrum_lowest, "real"),
        _on_spectrum(spectrum_highest, "real"),
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
    layer: Layer | ConnectionWalk, metrics: Iterable[str] | None = None, gauge: Gauge = "mean"
) -> dict[str, float | np.ndarray]:
    """Measure one layer.

    Parameters
    ----------
    layer : LayerWalk or ConnectionWalk
        A captured layer, or a walk of your own tensors (metrics that need the token field, the model's output or the
        previous layer are then left out by default, and refused by name; likewise, under cross-attention, those that
        need as many destinations as sources).
    metrics : iterable of str, optional
        Names out of ``cwlib.METRICS``; by default all that apply but those of the spectrum, which take seconds.
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
    bare = isinstance(layer, ConnectionWalk)
    if not bare and not isinstance(getattr(layer, "walk", None), ConnectionWalk):
        raise ValueError(
            f"layer: expected a layer from cwlib.layers or a ConnectionWalk, got {type(layer).__name__}; functions of "
            "cwlib.laplacian and cwlib.holonomy take an EdgeWalk too"
        )
    walk = layer if bare else layer.walk
    needs_model = {"depth_step", "spectral_step", "operator_cosine", "norm_cv", "angle_correlation", "t2_residual"}
    needs_model |= {"dirichlet_energy", "parallel_defect"}
    if isinstance(metrics, str):
        raise ValueError(f"metrics: expected a list of names, got the string {metrics!r}; write [{metrics!r}]")
    needs_square = {"spectral_step", "reversibility_defect", "spectral_gap", "holonomy_defect"}
    needs_square |= {"laplacian_defect", "metric_defect", "inverse_defect", "metric_balance_defect", "mass"}
    needs_square |= {"dirichlet_energy", "parallel_defect"}
    steps = {"depth_step", "spectral_step", "operator_cosine"}
    dropped = not bare and getattr(layer, "index", 0) > 0 and layer.previous is None
    left_out = (needs_model if bare else steps if dropped else set()) | (
        needs_square if walk.n_dst != walk.n_src else set()
    )
    by_default = [m.name for m in METRICS.values() if m.about != "spectrum" and m.name not in left_out]
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
