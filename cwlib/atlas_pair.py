r"""A pair (W, Omega) given outright, its properties as numbers, and what it means to place a system as a walk.

The atlas asks of a system from the literature: is one of its layers :math:`y_i = \sum_j W_{ij}\Omega_{ij}x_j`, and
which conditions do W and Omega meet? Everything here is dense and tiny: it is the naive form, kept for the eye. Any
block operator is a connection walk in the norm gauge (T2); what tells systems apart is whether *their own* W is
nonnegative and stochastic, and what their transports do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cwlib.checks import Check, relative_residual
from cwlib.measures import reversibility_defect
from cwlib.validation import require_finite
from cwlib.walk import ConnectionWalk

Maps = Float[Tensor, "dst src d_out d_in"]

#: the conditions that `defects` measures, each by a number that vanishes iff the condition holds
CONDITIONS = ("nonnegative", "stochastic", "reversible", "isometric", "inverse", "flat", "constant")
#: up to here a defect is rounding
ROUNDING = 1e-8
_INVERTIBLE = 1e8  # the largest condition number of a map that is inverted


@dataclass(frozen=True, eq=False)
class Pair:
    r"""Weights and transports of a layer, dense, float64: :math:`y_i = \sum_j W_{ij}\Omega_{ij}x_j`.

    Parameters
    ----------
    weight : Float[Tensor, "dst src"]
        W; signed entries are allowed, since some systems have them, and are then measured as a failure.
    maps : Float[Tensor, "dst src d_out d_in"]
        :math:`\Omega_{ij}`; where W vanishes they play no part.

    Raises
    ------
    ValueError
        If an entry is not finite, shapes do not fit, or no edge carries weight.
    """

    weight: Float[Tensor, "dst src"]
    maps: Maps

    def __post_init__(self) -> None:
        require_finite("weight", self.weight, 2, "dst, src")
        require_finite("maps", self.maps, 4, "dst, src, d_out, d_in")
        for name in ("weight", "maps"):  # a frozen dataclass: set past its guard, once
            object.__setattr__(self, name, getattr(self, name).detach().to(torch.float64, copy=True))
        if self.maps.shape[:2] != self.weight.shape:
            raise ValueError(
                f"maps: expected a map for each of {tuple(self.weight.shape)} (dst, src), got {tuple(self.maps.shape)}"
            )
        if not self.support.any():
            raise ValueError("weight: expected an edge that carries weight, got zeros alone")

    @classmethod
    def constant(cls, weight: Float[Tensor, "dst src"], transport: Float[Tensor, "d_out d_in"]) -> "Pair":
        """The pair with one transport on every edge (T1)."""
        return cls(weight, transport.expand(*weight.shape, *transport.shape))

    @classmethod
    def from_walk(cls, walk: ConnectionWalk) -> "Pair":
        """An attention layer in the mean gauge (T2), every transport formed."""
        maps = torch.zeros(walk.n_dst, walk.n_src, walk.d_model, walk.d_model, dtype=torch.float64)
        for dst, src in walk.support.nonzero().tolist():
            maps[dst, src] = walk.transport(dst, src)
        return cls(walk.effective_walk(), maps)

    @property
    def support(self) -> Bool[Tensor, "dst src"]:
        """Edges that carry weight."""
        return self.weight != 0

    def __matmul__(self, field: Float[Tensor, "src d_in"]) -> Float[Tensor, "dst d_out"]:
        """One step of the pair on a field; ValueError if the field does not fit."""
        require_finite("field", field, 2, "src, d_in")
        if field.shape != (self.maps.shape[1], self.maps.shape[3]):
            expected = f"({self.maps.shape[1]}, {self.maps.shape[3]})"
            raise ValueError(f"field: expected shape (src, d_in) = {expected}, got {tuple(field.shape)}")
        return torch.einsum("ij,ijab,jb->ia", self.weight, self.maps, field.to(torch.float64))

    def blocks(self) -> Maps:
        r"""The blocks :math:`K_{ij} = W_{ij}\Omega_{ij}` of the operator."""
        return self.weight[:, :, None, None] * self.maps


def best_measure(weight: Float[Tensor, "token other"]) -> Float[Tensor, " token"]:
    r"""The measure that comes closest to detailed balance :math:`\pi_iW_{ij} = \pi_jW_{ji}` in logarithms.

    Exact if W is reversible (Kolmogorov); determined by the edges that carry weight both ways.
    """
    dst, src = ((weight > 0) & (weight.T > 0)).triu(1).nonzero().T
    incidence = torch.zeros(len(dst), len(weight), dtype=torch.float64)
    incidence[range(len(dst)), dst], incidence[range(len(dst)), src] = 1.0, -1.0
    ratios = (weight[src, dst] / weight[dst, src]).log()
    measure = (torch.linalg.pinv(incidence) @ ratios).exp()
    return measure / measure.sum()


def _flatness(pair: Pair) -> float:
    """Largest 1 - cos between a transport and the one along a spanning tree; NaN unless all transports are invertible.

    It depends on the tree, but not on whether it vanishes. Targets and sources of one kind are the same tokens.
    """
    if pair.maps.shape[-1] != pair.maps.shape[-2]:
        return float("nan")
    targets, sources = pair.weight.shape
    apart = 0 if targets == sources else targets
    maps = {(i, apart + j): pair.maps[i, j] for i, j in pair.support.nonzero().tolist()}
    if max(float(torch.linalg.cond(each)) for each in maps.values()) > _INVERTIBLE:
        return float("nan")
    frames: dict[int, Tensor] = {}
    for root in range(apart + sources):
        if root not in frames:
            frames[root], queue = torch.eye(pair.maps.shape[-1], dtype=torch.float64), [root]
            while queue:
                here = queue.pop()
                for (i, j), each in maps.items():
                    if j == here and i not in frames:
                        frames[i] = each @ frames[here]
                        queue.append(i)
                    elif i == here and j not in frames:
                        frames[j] = torch.linalg.inv(each) @ frames[here]
                        queue.append(j)

    def angle(left: Tensor, right: Tensor) -> float:
        return 1 - float((left * right).sum() / (left.norm() * right.norm()))

    return max(0.0, *(angle(each, frames[i] @ torch.linalg.inv(frames[j])) for (i, j), each in maps.items()))


def _no_inverse(pair: Pair) -> float:
    """Largest |M - c I| / (|M| + |c I|) of the ways there and back M, 0 to 1; NaN if no edge has a way back."""
    there = pair.support & pair.support.T
    if not there.triu(1).any():  # loops alone lead nowhere
        return float("nan")
    products = (pair.maps @ pair.maps.transpose(0, 1))[there]
    width = products.shape[-1]
    scale = products.diagonal(dim1=-1, dim2=-2).mean().clamp_min(0)  # a way back that turns vectors around is none
    ideal = scale * torch.eye(width, dtype=torch.float64)
    sizes = torch.linalg.matrix_norm(products) + torch.linalg.matrix_norm(ideal)
    return float(torch.where(sizes > 0, torch.linalg.matrix_norm(products - ideal) / sizes, 1.0).max())


def scale(pair: Pair) -> float:
    r"""The c for which :math:`\Omega_{ij}^T\Omega_{ij} = cI` holds best, the mean over edges; 1 for isometries."""
    grams = (pair.maps.transpose(-1, -2) @ pair.maps)[pair.support]
    return float(grams.diagonal(dim1=-1, dim2=-2).mean())


def defects(pair: Pair) -> dict[str, float]:
    r"""How far a pair is from each condition; zero iff it holds, NaN where it makes no sense.

    Returns
    -------
    dict of str to float
        ``nonnegative``: share of negative weight, :math:`\sum W^-/\sum|W|`. ``stochastic``: largest
        :math:`|\sum_jW_{ij} - 1|`. ``reversible``: :math:`|\Pi W - W^T\Pi|/|\Pi W + W^T\Pi|` at `best_measure`; NaN
        between two kinds of token, or with signs. ``isometric``: largest
        :math:`|\Omega_{ij}^T\Omega_{ij}/c - I|_F/\sqrt d`, with one c for all edges (`scale`); at least
        :math:`\sqrt{d/r - 1}` for maps of rank r. ``inverse``: largest
        :math:`|M - cI|_F/(|M|_F + |cI|_F)` over :math:`M = \Omega_{ij}\Omega_{ji}`, with one :math:`c \ge 0`; NaN if no
        edge has a way back. ``flat``: largest 1 - cos between a transport and :math:`g_ig_j^{-1}`, frames g taken along
        a spanning tree (T8); NaN for singular maps. ``constant``: relative distance of the blocks
        :math:`W_{ij}\Omega_{ij}` from :math:`w_{ij}T` with one T (T3). All of transports that are zero: NaN.
    """
    weight, support = pair.weight, pair.support
    among = weight.shape[0] == weight.shape[1]
    square = pair.maps.shape[-1] == pair.maps.shape[-2]
    negative = float(weight.clamp_max(0).abs().sum() / weight.abs().sum())
    found = {
        "nonnegative": negative,
        "stochastic": float((weight.sum(1) - 1).abs().max()),
        "reversible": reversibility_defect(weight, best_measure(weight)) if among and not negative else float("nan"),
    }
    largest = pair.maps[support].abs().max()
    if largest == 0:
        return found | dict.fromkeys(CONDITIONS[3:], float("nan"))
    unit = Pair(weight, pair.maps / largest)  # no square leaves the range of floats
    width = unit.maps.shape[-1]
    grams = (unit.maps.transpose(-1, -2) @ unit.maps)[support]
    apart = torch.linalg.matrix_norm(grams / scale(unit) - torch.eye(width, dtype=torch.float64)) / width**0.5
    values = torch.linalg.svdvals((unit.blocks() / weight.abs().max()).flatten(2).flatten(0, 1)).square()
    return found | {
        "isometric": float(apart.max()),
        "inverse": _no_inverse(unit) if among and square else float("nan"),
        "flat": _flatness(unit),
        "constant": float((values[1:].sum() / values.sum()).sqrt()),
    }


def ranks(pair: Pair) -> dict[str, int]:
    """Rank of W, largest rank of a transport, and operator Schmidt rank of K (T3)."""
    return {
        "walk_rank": int(torch.linalg.matrix_rank(pair.weight)),
        "transport_rank": int(torch.linalg.matrix_rank(pair.maps[pair.support]).max()),
        "schmidt_rank": int(torch.linalg.matrix_rank(pair.blocks().flatten(2).flatten(0, 1))),
    }


@dataclass(frozen=True, eq=False)
class Placed:
    """A system placed as a walk: its own output beside that of the pair it induces.

    Attributes
    ----------
    pair : Pair
        The weights and transports read off the system.
    field : Float[Tensor, "src d_in"]
        What it was run on.
    output : Float[Tensor, "dst d_out"]
        What the system's defining equation gives, by code that knows nothing of the pair.
    constant : Float[Tensor, "dst d_out"] or None
        The section that biases add.
    checks : tuple of Check
        What else the system shows: identities, fitted rates, and failures with their number (``holds=False``).
    curve : pandas.DataFrame or None
        Columns ``x``, ``y``, ``series`` of a rate, for the figure.
    """

    pair: Pair
    field: Float[Tensor, "src d_in"]
    output: Float[Tensor, "dst d_out"]
    constant: Float[Tensor, "dst d_out"] | None = None
    checks: tuple[Check, ...] = ()
    curve: pd.DataFrame | None = None

    @property
    def residual(self) -> float:
        """Relative distance between the system's output and the pair's."""
        step = self.pair @ self.field
        return relative_residual(step if self.constant is None else step + self.constant, self.output)


@dataclass(frozen=True)
class System:
    """An entry of the atlas.

    Attributes
    ----------
    name : str
        As its authors call it.
    paper : str
        arXiv identifier.
    walk, transport : str
        What W and Omega are, in LaTeX.
    fails : tuple of str
        Conditions that a stochastic connection walk needs and this system lacks: ``nonnegative``, ``stochastic``.
    remark : str
        One sentence: what the placement shows, or what the nearest walk is.
    place : callable
        From a seed to the `Placed` system.
    """

    name: str
    paper: str
    walk: str
    transport: str
    fails: tuple[str, ...]
    remark: str
    place: Callable[[int], Placed]


SYSTEMS: dict[str, System] = {}


def system(
    name: str, paper: str, walk: str, transport: str, remark: str, fails: tuple[str, ...] = ()
) -> Callable[[Callable[[int], Placed]], Callable[[int], Placed]]:
    """Enter a function ``seed -> Placed`` into the atlas under a name; see `System`."""

    def enter(place: Callable[[int], Placed]) -> Callable[[int], Placed]:
        if name in SYSTEMS:
            raise ValueError(f"name: expected a new system, got {name!r} twice")
        SYSTEMS[name] = System(name, paper, walk, transport, fails, remark, place)
        return place

    return enter


def fitted_slope(x: list[float], y: list[float]) -> float:
    """Least-squares slope of log y over log x: the exponent of a power law."""
    horizontal, vertical = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    centred = horizontal - horizontal.mean()
    return float((centred * vertical).sum() / centred.square().sum())
