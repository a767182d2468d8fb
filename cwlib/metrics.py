r"""The empirical quantities: pure functions of walks, and their registry.

Every metric is this artifact's reading of the paper's abstract; none is defined by the paper. Attention-graph metrics
look at the token walk W (mean gauge: what attends; norm gauge: what flows); transport metrics look at the maps T_h and
Omega_ij. ``T`` without an index is the layer's total transport :math:`\sum_h T_h`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.stats import wasserstein_distance
from torch import Tensor

from cwlib._types import Field, Gauge, Walk
from cwlib.cores import HeadTransports
from cwlib.laplacian import Measure, choose_measure, reversibilised_spectrum, stochastic_walk
from cwlib.laplacian import reversibility_defect as _reversibility_defect
from cwlib.synthetic import generator
from cwlib.walk import ConnectionWalk

TRIANGLES = 256  #: triangles sampled per layer for the holonomy defect
SINK_FROM = 8  #: sink_mass averages over tokens from this index on: earlier ones have little else to attend to


class Layer(Protocol):
    """What `measure` needs of a captured layer; `cwlib.capture.LayerWalk` is one."""

    @property
    def walk(self) -> ConnectionWalk: ...
    @property
    def field(self) -> Tensor: ...
    @property
    def previous(self) -> "Layer | None": ...
    def residual(self) -> float: ...


# --- attention graph -------------------------------------------------------------------------------------------------


def depth_step(before: Walk, after: Walk) -> float:
    r"""Total variation between layers, :math:`\frac1n\sum_i \frac12\sum_j |W'_{ij} - W_{ij}|` in [0, 1]."""
    return float((after - before).abs().sum(1).mean() / 2)


def operator_cosine(before: ConnectionWalk, after: ConnectionWalk) -> float:
    r"""Cosine between neighbouring operators, :math:`\langle K, K'\rangle / (|K|\,|K'|)` in [-1, 1] (T9)."""
    return before.inner(after) / (before.norm() * after.norm())


def spectral_step(before: Walk, after: Walk) -> float:
    """Wasserstein-1 distance between the spectra of the reversibilised walks of neighbouring layers, in [0, 2]."""
    spectra = [reversibilised_spectrum(w, choose_measure(w)[1]).numpy() for w in (before, after)]
    return float(wasserstein_distance(*spectra))


def reversibility_defect(matrix: Walk) -> float:
    r""":math:`|\Pi W - W^T\Pi| / |\Pi W + W^T\Pi|` in [0, 1]; pi stationary if irreducible, else uniform (T4 R)."""
    return _reversibility_defect(matrix, choose_measure(matrix)[1])


def spectral_gap(matrix: Walk) -> float:
    r""":math:`1 - \lambda_2` of the reversibilised walk, in [0, 2]; pi as in `reversibility_defect`."""
    return float(1 - reversibilised_spectrum(matrix, choose_measure(matrix)[1])[-2]) if len(matrix) > 1 else np.nan


def entropy_rate(matrix: Walk, measure: Measure | None = None) -> float:
    r""":math:`-\sum_i \pi_i \sum_j W_{ij}\log W_{ij}` in nats, in [0, log n]; pi as in `reversibility_defect`."""
    measure = choose_measure(matrix)[1] if measure is None else measure
    return float(-(measure[:, None] * torch.xlogy(matrix, matrix)).sum())


def sink_mass(matrix: Walk) -> float:
    """Mean weight on token 0 received by tokens >= 8, in [0, 1]; NaN when there is no such token."""
    rows = matrix[SINK_FROM:, 0]
    return float(rows.mean()) if len(rows) else np.nan


def schmidt_participation(walk: ConnectionWalk) -> float:
    r"""Effective number of heads, :math:`(\sum s^2)^2 / \sum s^4` of the Schmidt values, in [1, H] (T3)."""
    squares = walk.schmidt_values() ** 2
    return float(squares.sum() ** 2 / (squares**2).sum())


def single_walk_error(walk: ConnectionWalk) -> float:
    r"""Relative error of the best constant-transport walk, :math:`\sqrt{1 - s_1^2/\sum s^2}` in [0, 1) (T3)."""
    squares = walk.schmidt_values() ** 2
    return float((1 - squares[0] / squares.sum()).clamp_min(0).sqrt())


# --- transport -------------------------------------------------------------------------------------------------------


def head_isometry(transports: HeadTransports) -> Float[Tensor, " head"]:
    r"""Isometry of each head on its d_head-dimensional support, :math:`(\sum s^2)^2/(r\sum s^4)` in (0, 1] (T7)."""
    squares = transports.singular_values() ** 2
    return squares.sum(1) ** 2 / (squares.shape[1] * (squares**2).sum(1))


def sum_isometry(transports: HeadTransports) -> float:
    r"""Isometry of :math:`T = \sum_h T_h` on its rank bound min(d_model, n_kv d_head), in (0, 1] (T7)."""
    rank = min(transports.d_model, transports.kv_heads * transports.d_head)
    return float(transports.head_gram.sum() ** 2 / (rank * transports.quartic.sum()))


def edge_isometry(walk: ConnectionWalk) -> float:
    r"""Isometry of the transports :math:`\Omega_{ij}` of all edges, averaged with weights W_ij, in (0, 1] (T7, T9)."""
    isometry, weight = walk.edge_isometry(), walk.effective_walk("mean")
    defined = ~isometry.isnan()
    return float((isometry * weight)[defined].sum() / weight[defined].sum())


def symmetry(transports: HeadTransports) -> float:
    r""":math:`|sym\,T|_F^2/|T|_F^2 = \frac12 + tr(T^2)/(2|T|_F^2)` in [0, 1]; near 1/2 for a random matrix."""
    return float((1 + transports.product_traces.sum() / transports.head_gram.sum()) / 2)


def identity_alignment(transports: HeadTransports) -> float:
    r""":math:`tr\,T / (\sqrt d\,|T|_F)` in [-1, 1]: the cosine between T and the identity."""
    return float(transports.traces().sum() / (transports.d_model * transports.head_gram.sum()).sqrt())


def norm_cv(transports: HeadTransports, field: Field) -> float:
    r"""Coefficient of variation (std/mean) over tokens of :math:`|T x_i|/|x_i|`, >= 0; zero for a scaled isometry."""
    ratio = transports.total().apply(field)[0].norm(dim=1) / field.to(torch.float64).norm(dim=1)
    return float(ratio.std(correction=0) / ratio.mean())


def angle_correlation(transports: HeadTransports, field: Field) -> float:
    r"""Pearson correlation of the cosines of token pairs before and after T, in [-1, 1]; NaN below 3 tokens."""
    cosines = []
    for vectors in (field.to(torch.float64), transports.total().apply(field)[0]):
        unit = torch.nn.functional.normalize(vectors, dim=1)
        cosines.append((unit @ unit.T)[tuple(torch.triu_indices(len(unit), len(unit), 1))].numpy())
    return float(np.corrcoef(*cosines)[0, 1]) if len(cosines[0]) > 2 else np.nan


def sample_triangles(walk: ConnectionWalk, seed: int = 0, count: int = TRIANGLES) -> Int[Tensor, "triangle 3"]:
    """Seeded transitive triangles (i, j, k) whose edges j -> i, k -> j and k -> i all carry weight.

    Under causal attention i > j > k. At most ``count`` rows; fewer, or none, on a short or sparse support.
    """
    if walk.n_dst != walk.n_src:
        raise ValueError(f"walk: expected as many destinations as sources, got {walk.n_dst} and {walk.n_src}")
    triples = torch.randint(walk.n_dst, (64 * count, 3), generator=generator(seed))
    if walk.is_causal:
        triples = triples.sort(1, descending=True).values
    i, j, k = triples.T
    support = walk.support.cpu()
    valid = (i != j) & (j != k) & (i != k) & support[i, j] & support[j, k] & support[i, k]
    return triples[valid][:count]


def holonomy_defect(walk: ConnectionWalk, triangles: Int[Tensor, "triangle 3"] | None = None) -> float:
    r"""Mean defect of transitive triangles, in [0, 1] (T8).

    Per triangle (i, j, k): :math:`1 - |\langle\Omega_{ij}\Omega_{jk}, \Omega_{ik}\rangle| /
    (|\Omega_{ij}\Omega_{jk}|\,|\Omega_{ik}|)`, zero if transport along the two edges agrees with the direct one up to
    scale, as for a flat connection. NaN if there is no triangle.
    """
    triangles = sample_triangles(walk) if triangles is None else triangles
    if len(triangles) == 0:
        return np.nan
    i, j, k = triangles.T
    gates = walk.gates()
    first, second, direct = gates[:, i, j], gates[:, j, k], gates[:, i, k]
    cubic, quartic = walk.transports.triangle_forms
    path = torch.einsum("ht,lt->hlt", first, second).flatten(0, 1)
    inner = ((cubic.flatten(0, 1).T @ path) * direct).sum(0)
    # quartic is indexed [h, h', l, l']; the pairing of path (h, l) with path (h', l') needs [h, l, h', l'].
    pairing = quartic.permute(0, 2, 1, 3).flatten(2, 3).flatten(0, 1)
    composed = (path * (pairing @ path)).sum(0)
    straight = (direct * (walk.transports.head_gram @ direct)).sum(0)
    return float(1 - (inner.abs() / (composed * straight).sqrt()).mean())


# --- registry --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metric:
    """A named quantity of one layer.

    Attributes
    ----------
    name, description, range : str
        For the glossary; ``description`` gives the formula or the docstring's first line.
    version : int
        Raised whenever the definition changes, so that stored rows are recomputed.
    about : {"graph", "walk", "transport", "exactness"}
        Depends on W alone (and then on the gauge); on attention and transports; on transports (and perhaps the field);
        or compares the walk with the model.
    compute : callable
        ``(layer, gauge) -> float``; NaN where the quantity is undefined for that layer.
    weights_only : bool
        Whether the passage does not matter.
    """

    name: str
    about: Literal["graph", "walk", "transport", "exactness"]
    range: str
    compute: Callable[[Layer, Gauge], float]
    description: str
    version: int = 1
    weights_only: bool = False


def _line(function: Callable) -> str:
    return (function.__doc__ or "").split("\n\n")[0].strip()


def _graph(function: Callable[[Walk], float], bounds: str) -> Metric:
    return Metric(
        function.__name__, "graph", bounds, lambda x, g: function(stochastic_walk(x.walk, g)), _line(function)
    )


def _graph_step(function: Callable[[Walk, Walk], float], bounds: str) -> Metric:
    def compute(layer: Layer, gauge: Gauge) -> float:
        if layer.previous is None:
            return np.nan
        return function(stochastic_walk(layer.previous.walk, gauge), stochastic_walk(layer.walk, gauge))

    return Metric(function.__name__, "graph", bounds, compute, _line(function))


def _on_walk(function: Callable[[ConnectionWalk], float], bounds: str) -> Metric:
    return Metric(function.__name__, "walk", bounds, lambda x, _: function(x.walk), _line(function))


def _on_weights(function: Callable[[HeadTransports], float | Tensor], bounds: str) -> Metric:
    def compute(layer: Layer, _: Gauge) -> float:
        return float(torch.as_tensor(function(layer.walk.transports), dtype=torch.float64).mean())

    return Metric(function.__name__, "transport", bounds, compute, _line(function), weights_only=True)


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
) -> dict[str, float]:
    """Measure one layer.

    Parameters
    ----------
    layer : LayerWalk or ConnectionWalk
        A captured layer, or a walk of your own tensors (metrics that need the token field or the previous layer are
        then left out by default, and refused by name).
    metrics : iterable of str, optional
        Names out of ``cwlib.METRICS``; all that apply by default.
    gauge : {"mean", "norm"}
        Which token walk W the attention-graph metrics look at; other metrics do not depend on it.

    Returns
    -------
    dict of str to float
        Per-head quantities are averaged over heads. NaN where a quantity is undefined, such as a step from the
        previous layer at the first layer.

    Raises
    ------
    ValueError
        If a name or the gauge is unknown, or a bare walk lacks what a requested metric needs.
    """
    if gauge not in ("mean", "norm"):
        raise ValueError(f"gauge: expected 'mean' or 'norm', got {gauge!r} (sum is H times mean)")
    bare = isinstance(layer, ConnectionWalk)
    needs_model = {"depth_step", "spectral_step", "operator_cosine", "norm_cv", "angle_correlation", "t2_residual"}
    if isinstance(metrics, str):
        raise ValueError(f"metrics: expected a list of names, got the string {metrics!r}; write [{metrics!r}]")
    names = [n for n in METRICS if not (bare and n in needs_model)] if metrics is None else list(metrics)
    for name in names:
        if name not in METRICS:
            raise ValueError(f"metrics: unknown metric {name!r}; expected names out of {', '.join(METRICS)}")
        if bare and name in needs_model:
            raise ValueError(
                f"layer: {name} needs a model's field, output or previous layer, got a bare ConnectionWalk; pass a "
                "layer from cwlib.layers, or call cwlib.metrics functions with both arguments"
            )
    target = _Bare(layer) if bare else layer
    return {name: METRICS[name].compute(target, gauge) for name in names}
