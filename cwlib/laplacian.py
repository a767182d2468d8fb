r"""How far a walk is from a random-walk connection Laplacian: the conditions of T4 as numbers, and energy.

With a measure :math:`\pi` on tokens and inner products :math:`G_i` on fibres, :math:`M = blockdiag(\pi_i G_i)`, the
generator :math:`L = I - P` is a random-walk connection Laplacian if (S) :math:`W1 = 1`, (R) :math:`\pi_i W_{ij} = \pi_j
W_{ji}` and (M) every :math:`\Omega_{ij}` is an isometry with :math:`\Omega_{ji} = \Omega_{ij}^{-1}`. Functions take
walks whose fibres carry the identity metric; `in_metric` changes frames so that any other becomes it.

Two numbers per edge decide everything that is quadratic in K: :math:`|K_{ij}|_F^2` and :math:`tr(K_{ij}K_{ji})`. No
function here forms K. Defects are in [0, 1], do not change when all transports are scaled together (`mass` keeps the
scale), and vanish exactly when their condition holds up to that scale; near zero they are accurate to about 1e-8.
"""

from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from cwlib._types import Field
from cwlib.checks import relative_residual, tolerance
from cwlib.edges import EdgeWalk
from cwlib.measures import (
    Measure,
    choose_measure,
    require_measure,
    reversibility_defect,
    stochasticity_defect,
    token_flow,
    uniform_measure,
)
from cwlib.measures import whitening_metric as whitening_metric
from cwlib.validation import require_finite
from cwlib.walk import ConnectionWalk

AnyWalk = ConnectionWalk | EdgeWalk
Map = Float[Tensor, "d_model d_model"]


def in_metric(walk: AnyWalk, metric: Float[Tensor, "*token d_model d_model"]) -> AnyWalk:
    r"""The walk in orthonormal frames of a fibre metric: :math:`\Omega_{ij} \to G_i^{1/2}\Omega_{ij}G_j^{-1/2}` (T4).

    Parameters
    ----------
    walk : ConnectionWalk or EdgeWalk
        The walk; its fields change with it, :math:`x_i \to G_i^{1/2}x_i`.
    metric : Float[Tensor, "d_model d_model"] or Float[Tensor, "token d_model d_model"]
        Symmetric positive definite: one for all fibres, or (for an `EdgeWalk`) one per token.

    Raises
    ------
    ValueError
        If the metric is not symmetric positive definite or does not fit; or if metrics differ from token to token
        on an attention layer, whose transports would no longer be mixtures of H maps (`EdgeWalk.from_walk`
        takes a small one).
    """
    require_finite("metric", metric, 3 if getattr(metric, "ndim", 2) == 3 else 2, "[token,] d_model, d_model")
    if metric.shape[-2:] != (walk.d_model, walk.d_model) or (metric.ndim == 3 and len(metric) != walk.n_src):
        raise ValueError(
            f"metric: expected shape ([{walk.n_src},] {walk.d_model}, {walk.d_model}), got {tuple(metric.shape)}"
        )
    # inverses are symmetric up to the rounding of their dtype
    asymmetry, room = relative_residual(metric, metric.transpose(-1, -2)), tolerance(metric.dtype) ** 0.75
    metric = metric.detach().to(torch.float64)
    values, vectors = torch.linalg.eigh((metric + metric.transpose(-1, -2)) / 2)
    if asymmetry > room or (values <= 0).any():
        raise ValueError(
            "metric: expected symmetric positive definite matrices, got smallest eigenvalue "
            f"{float(values.min()):.3g} and relative asymmetry {asymmetry:.3g}"
        )
    root = (vectors * values.sqrt()[..., None, :]) @ vectors.transpose(-1, -2)
    if isinstance(walk, EdgeWalk):
        return walk.change_frames(root if metric.ndim == 3 else root.expand(walk.tokens, -1, -1))
    if metric.ndim == 3:
        raise ValueError("metric: expected one matrix for all tokens of an attention layer, got one per token")
    transports = walk.transports
    value = transports._v @ torch.linalg.inv(root)
    constant = None if walk.constant is None else walk.constant.to(torch.float64) @ root
    return ConnectionWalk(walk.attention, value, root @ transports._o, constant, walk.groups, walk.absorption)


_CHOSEN: "WeakKeyDictionary[AnyWalk, Measure]" = WeakKeyDictionary()  # walks do not change


def _choose(walk: AnyWalk) -> tuple[str, Measure]:
    # a walk that absorbs has no stationary law
    if getattr(walk, "absorption", None) is not None:
        return "uniform", uniform_measure(walk.n_dst, walk.attention.device)
    return choose_measure(walk.effective_walk("mean"))


def measure_and_flow(walk: AnyWalk, measure: Measure | None) -> tuple[Measure, Float[Tensor, "dst src"]]:
    """The measure (chosen if not given) and the token flow pi_i W_ij in the mean gauge."""
    if not isinstance(walk, AnyWalk):
        hint = "pass its .walk" if hasattr(walk, "walk") else "build one from your tensors"
        raise ValueError(f"walk: expected a ConnectionWalk or an EdgeWalk, got {type(walk).__name__}; {hint}")
    matrix = walk.effective_walk("mean")
    if measure is not None:
        measure = require_measure(measure, walk.n_dst).to(matrix.device)
    elif walk in _CHOSEN:
        measure = _CHOSEN[walk]
    else:
        measure = _CHOSEN[walk] = _choose(walk)[1]
    return measure, token_flow(matrix, measure)


def laplacian_defect(walk: AnyWalk, measure: Measure | None = None) -> float:
    r"""Distance to the nearest self-adjoint operator, :math:`\frac12|K - K^*|_M/|K|_M` in [0, 1] (T5).

    The nearest one is :math:`\frac12(K + K^*)`. With :math:`|K|_M^2 = \sum_{ij}\frac{\pi_i}{\pi_j}|K_{ij}|_F^2` and
    :math:`\langle K, K^*\rangle_M = tr(K^2) = \sum_{ij}tr(K_{ij}K_{ji})`, which depends on neither measure nor metric,
    its square is :math:`\frac12(1 - tr(K^2)/|K|_M^2)`. Zero iff the generator is self-adjoint; 1/:math:`\sqrt2`
    if nothing flows back, as in a random operator; one iff K is skew; NaN if K vanishes.

    Parameters
    ----------
    walk : ConnectionWalk or EdgeWalk
        The walk; fibres carry the identity metric (see `in_metric`).
    measure : Float[Tensor, "token"], optional
        Positive weights of tokens; by default the one that `choose_measure` names.

    Raises
    ------
    ValueError
        If there are not as many destinations as sources, or the measure is not positive.
    """
    measure, flow = measure_and_flow(walk, measure)
    matrix = flow / measure[:, None]
    norm = (flow * matrix * walk.blocks.squares / measure[None, :]).sum()
    square = (matrix * matrix.T * walk.blocks.pairings).sum()
    return float(((1 - square / norm).clamp_min(0) / 2).sqrt())


def detailed_balance_defect(walk: AnyWalk, measure: Measure | None = None) -> float:
    r""":math:`\frac12|MK - K^TM|_F/|MK|_F` in [0, 1], the connection form of detailed balance (T4 a).

    Zero iff :math:`\pi_i K_{ij} = \pi_j K_{ji}^T` on every edge, that is, iff L is self-adjoint. Like
    `laplacian_defect`, but edges count by what flows along them, :math:`\pi_i K_{ij}`. Parameters and errors as there.
    """
    _, flow = measure_and_flow(walk, measure)
    norm = (flow**2 * walk.blocks.squares).sum()
    cross = (flow * flow.T * walk.blocks.pairings).sum()
    return float(((1 - cross / norm).clamp_min(0) / 2).sqrt())


def metric_defect(walk: AnyWalk, measure: Measure | None = None) -> float:
    r"""Distance of :math:`\Omega_{ij}^T\Omega_{ij}` from one multiple of a projection on all edges, in [0, 1] (T4 M).

    With the flow :math:`f_{ij} = \pi_i W_{ij}` and :math:`\Pi_{ij}` a projection of the rank that the active heads
    allow,

    .. math::
        \min_c \sqrt{\textstyle\sum f_{ij}|\Omega_{ij}^T\Omega_{ij} - c\,\Pi_{ij}|_F^2 \;/\;
        \sum f_{ij}|\Omega_{ij}^T\Omega_{ij}|_F^2}.

    Unlike edge isometry it also counts how the scale varies between edges. Parameters and errors as in
    `laplacian_defect`.
    """
    _, flow = measure_and_flow(walk, measure)
    blocks = walk.blocks
    match = (flow * blocks.squares).sum() ** 2
    return float((1 - match / ((flow * blocks.ranks).sum() * (flow * blocks.quartics).sum())).clamp_min(0).sqrt())


def scale(walk: AnyWalk, measure: Measure | None = None) -> float:
    r"""The scale s of the transports, :math:`s^2 = \sum f_{ij}|\Omega_{ij}|_F^2/\sum f_{ij}r_{ij}` (T4 f), >= 0.

    That of the isometry which `metric_defect` compares with. In the mean gauge :math:`\Omega` is H times a mixture, so
    H is in it. Parameters and errors as in `laplacian_defect`.
    """
    _, flow = measure_and_flow(walk, measure)
    return float(((flow * walk.blocks.squares).sum() / (flow * walk.blocks.ranks).sum()).sqrt())


def mass(walk: AnyWalk, measure: Measure | None = None) -> float:
    r""":math:`1 - s` for the scale :math:`s^2 = \sum f_{ij}|\Omega_{ij}|_F^2/\sum f_{ij}r_{ij}` (T4 f), at most 1.

    If :math:`\Omega = sO` with isometries O, then :math:`L = (1-s)I + s(I - P_O)`, a connection Laplacian with a mass.
    Negative where transports stretch. Parameters and errors as in `laplacian_defect`.
    """
    return 1 - scale(walk, measure)


def metric_balance_defect(walk: AnyWalk, measure: Measure | None = None) -> float:
    r"""Defect of metric balance, :math:`\sum_i f_{ij}\Omega_{ij}^T\Omega_{ij} = c\,\pi_j I`, in [0, 1] (T4 b).

    With :math:`B_j` the left-hand side, :math:`\min_c\sqrt{\sum_j|B_j - c\,\pi_j I|_F^2/\sum_j|B_j|_F^2}`. It asks the
    metric to be kept on average over the edges out of a token only; it has a floor where all heads together have a
    rank below d_model. Parameters and errors as in `laplacian_defect`.
    """
    measure, flow = measure_and_flow(walk, measure)
    traces, squares = walk.blocks.incoming(flow)
    match = (measure * traces).sum() ** 2 / (walk.d_model * (measure**2).sum() * squares.sum())
    return float((1 - match).clamp_min(0).sqrt())


def inverse_defect(walk: AnyWalk, measure: Measure | None = None) -> float:
    r"""Distance of :math:`\Omega_{ij}\Omega_{ji}` from a multiple of the identity on its rank, in [0, 1] (T4 M).

    The mean of :math:`\min_{c\ge0}|c\,\Omega_{ij}\Omega_{ji} - \Pi_{ij}|_F/|\Pi_{ij}|_F` over edges with both
    directions, weighted by :math:`f_{ij} + f_{ji}`, with :math:`\Pi_{ij}` of the rank that the active heads allow: the
    holonomy defect of going there and back, one where the two annihilate each other. Loops count, as edges that are
    their own way back. NaN on a walk of more than one token where nothing else has one, as a causal one. Parameters
    and errors as in `laplacian_defect`.
    """
    _, flow = measure_and_flow(walk, measure)
    both = (flow > 0) & (flow.T > 0)
    if walk.n_dst > 1 and not torch.triu(both, 1).any():
        return float("nan")
    blocks = walk.blocks
    # transports that vanish have no inverse to be far from
    both &= (blocks.squares > 0) & (blocks.squares.T > 0)
    ranks, around = torch.minimum(blocks.ranks, blocks.ranks.T)[both], blocks.round_trips[both]
    cosine = blocks.pairings[both] / (ranks * around).sqrt()
    cosine = torch.where(around > 1e-24 * (blocks.squares * blocks.squares.T)[both], cosine, 0.0).clamp(0, 1)
    weight = (flow + flow.T)[both]
    return float((weight * (1 - cosine**2).sqrt()).sum() / weight.sum()) if len(weight) else float("nan")


_Energies = tuple[float, float, float, float]
_ENERGIES: "WeakKeyDictionary[AnyWalk, tuple[Field, _Energies]]" = WeakKeyDictionary()  # of the last field


def _energies(walk: AnyWalk, field: Field, measure: Measure | None) -> _Energies:
    r""":math:`\sum\pi_i|x_i|^2`, and sums of f times :math:`|x_i|^2`, :math:`|\Omega x_j|^2` and their product."""
    if measure is None and walk in _ENERGIES and _ENERGIES[walk][0] is field:
        return _ENERGIES[walk][1]
    chosen, given = measure is None, field
    measure, flow = measure_and_flow(walk, measure)
    step = walk @ field
    field = field.detach().to(torch.float64)
    squares = (field**2).sum(1)
    if not squares.any():
        raise ValueError("field: expected a field that does not vanish, got zeros")
    kept, moved = (flow.sum(1) * squares).sum(), walk.blocks.incoming_energy(flow, field).sum()
    crossed = (measure * (field * step).sum(1)).sum()
    found = float((measure * squares).sum()), float(kept), float(moved), float(crossed)
    if chosen:
        _ENERGIES[walk] = given, found
    return found


def dirichlet_energy(walk: AnyWalk, field: Field, measure: Measure | None = None) -> float:
    r"""Energy over size, :math:`\frac12\sum f_{ij}|x_i - \Omega_{ij}x_j|^2 / \sum_i\pi_i|x_i|^2`, >= 0 (T4 b).

    Zero iff the field is parallel, :math:`x_i = \Omega_{ij}x_j` on every edge. Under metric balance it is the Rayleigh
    quotient of the generator. Computed from the energies after transport, without a loop over edges.

    Raises
    ------
    ValueError
        As in `laplacian_defect`, or if the field's shape does not fit or it vanishes.
    """
    size, kept, moved, crossed = _energies(walk, field, measure)
    return max((kept + moved) / 2 - crossed, 0.0) / size


def parallel_defect(walk: AnyWalk, field: Field, measure: Measure | None = None) -> float:
    r"""Sine of the angle between :math:`x_i` and :math:`\Omega_{ij}x_j`, as fields on edges with weights f, in [0, 1].

    :math:`\min_{c\ge0}\sqrt{\sum f_{ij}|x_i - c\,\Omega_{ij}x_j|^2/\sum f_{ij}|x_i|^2}`: the Dirichlet energy at the
    best scale of the transports. Zero iff the field is parallel up to that scale; one if what arrives is orthogonal to
    what is there, or nothing arrives. Parameters and errors as in `dirichlet_energy`.
    """
    _, kept, moved, crossed = _energies(walk, field, measure)
    return max(1 - max(crossed, 0.0) ** 2 / (kept * moved), 0.0) ** 0.5 if kept * moved > 0 else 1.0


def conditions(walk: AnyWalk, measure: Measure | None = None) -> dict[str, str | float]:
    """All conditions of T4 for one walk: the measure's name, and the defect of each.

    Returns
    -------
    dict
        ``measure`` (``stationary`` or ``uniform`` if chosen here, else ``given``), ``stochasticity_defect`` (S),
        ``reversibility_defect`` (R), ``metric_defect`` and ``inverse_defect`` (M), ``mass``,
        ``detailed_balance_defect`` and ``laplacian_defect`` (a), ``metric_balance_defect`` (b). All but ``mass`` vanish
        for a connection Laplacian up to scale; ``mass`` then gives the scale.
    """
    given = measure is not None
    measure, _ = measure_and_flow(walk, measure)
    matrix = walk.effective_walk("mean")
    name = "given" if given else _choose(walk)[0]
    operator = metric_defect, inverse_defect, mass, detailed_balance_defect, laplacian_defect, metric_balance_defect
    return {
        "measure": name,
        "stochasticity_defect": stochasticity_defect(matrix),
        "reversibility_defect": reversibility_defect(matrix, measure),
    } | {function.__name__: function(walk, measure) for function in operator}
