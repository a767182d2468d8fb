"""What a metric is, and how functions of walks become one."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from cwlib._types import Field, Gauge
from cwlib.cores import HeadTransports
from cwlib.measures import stochastic_walk
from cwlib.metrics_graph import TokenWalk
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
    about : {"graph", "walk", "transport", "spectrum", "pairs", "exactness"}
        Depends on W alone (and then on the gauge); on attention and transports (and perhaps the field); on transports
        (and perhaps the field); on the spectrum of the operator, which takes seconds; on all earlier layers, which
        takes as long; or compares the walk with the model.
    compute : callable
        ``(layer, gauge) -> float``, or an array over ``at``; NaN where the quantity is undefined for that layer.
    at : tuple of float
        Where a quantity that is a function is evaluated; empty for a number.
    weights_only : bool
        Whether the passage does not matter.
    """

    name: str
    about: Literal["graph", "walk", "transport", "spectrum", "pairs", "exactness"]
    range: str
    compute: Callable[[Layer, Gauge], float | np.ndarray]
    description: str
    version: int = 1
    weights_only: bool = False
    at: tuple[float, ...] = ()


def line(function: Callable) -> str:
    # the docstring's first paragraph, its mathematics marked as Markdown and notebooks have it
    first = " ".join((function.__doc__ or "").split("\n\n")[0].split())
    return re.sub(r":math:`([^`]*)`", r"$\1$", first).replace("``", "`")


_TOKEN_WALKS: "WeakKeyDictionary[ConnectionWalk, dict[Gauge, TokenWalk | None]]" = WeakKeyDictionary()


def _token_walk(walk: ConnectionWalk, gauge: Gauge) -> TokenWalk | None:
    """W with its measure and spectrum, kept while the layer lives; None if it is not stochastic.

    That is, if nothing flows into some token, or in the mean gauge if the walk absorbs.
    """
    known = _TOKEN_WALKS.setdefault(walk, {})
    if gauge not in known:
        absorbs = gauge == "mean" and walk.absorption is not None
        defined = not absorbs and bool((walk.effective_walk(gauge) > 0).any(1).all())
        known[gauge] = TokenWalk(stochastic_walk(walk, gauge)) if defined else None
    return known[gauge]


def _on_token_walks(function: Callable[..., float], gauge: Gauge, *walks: ConnectionWalk) -> float:
    found = [_token_walk(walk, gauge) for walk in walks]
    return np.nan if None in found else function(*found)


def graph(function: Callable[[TokenWalk], float], bounds: str) -> Metric:
    def compute(layer: Layer, gauge: Gauge) -> float:
        return _on_token_walks(function, gauge, layer.walk)

    return Metric(function.__name__, "graph", bounds, compute, line(function))


def graph_step(function: Callable[[TokenWalk, TokenWalk], float], bounds: str) -> Metric:
    def compute(layer: Layer, gauge: Gauge) -> float:
        if layer.previous is None:
            return np.nan
        return _on_token_walks(function, gauge, layer.previous.walk, layer.walk)

    return Metric(function.__name__, "graph", bounds, compute, line(function))


def on_walk(
    function: Callable[[ConnectionWalk], float | np.ndarray], bounds: str, at: tuple[float, ...] = ()
) -> Metric:
    return Metric(function.__name__, "walk", bounds, lambda x, _: function(x.walk), line(function), at=at)


def on_weights(function: Callable[[HeadTransports], float | Tensor], bounds: str) -> Metric:
    def compute(layer: Layer, _: Gauge) -> float:
        # a head without any transport has no isometry; the mean is over the others
        return float(torch.as_tensor(function(layer.walk.transports), dtype=torch.float64).nanmean())

    return Metric(function.__name__, "transport", bounds, compute, line(function), weights_only=True)


def spectrum_on_weights(function: Callable[[HeadTransports], np.ndarray], bounds: str, at: tuple[float, ...]) -> Metric:
    def compute(layer: Layer, _: Gauge) -> np.ndarray:
        return function(layer.walk.transports)

    return Metric(function.__name__, "transport", bounds, compute, line(function), weights_only=True, at=at)


def on_walk_and_field(function: Callable[[ConnectionWalk, Field], float], bounds: str) -> Metric:
    return Metric(function.__name__, "walk", bounds, lambda x, _: function(x.walk, x.field), line(function))


def on_spectrum(
    function: Callable[[ConnectionWalk], float | np.ndarray], bounds: str, at: tuple[float, ...] = ()
) -> Metric:
    return Metric(function.__name__, "spectrum", bounds, lambda x, _: function(x.walk), line(function), at=at)


def on_field(function: Callable[[HeadTransports, Field], float], bounds: str) -> Metric:
    return Metric(
        function.__name__,
        "transport",
        bounds,
        lambda x, _: function(x.walk.transports, x.field),
        line(function),
    )
