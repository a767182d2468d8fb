r"""Null models: what a layer would measure if one thing about it were left to chance, or taken away.

``gaussian``   value and output maps drawn at random, attention kept (`cwlib.synthetic.gaussian_transports`)
``init``       the whole architecture at random initialisation (`cwlib.checkpoints.initialise`)
``shuffled``   for every destination token, the heads' attention rows dealt out to the heads anew: W stays, and with it
               all that attends, but no longer does a head's attention go with its own transport
``sinkless``   decoders: token 0 removed and rows renormalised, since much of what looks like structure may be the sink
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from cwlib._types import Attention, Field
from cwlib.cores import HeadTransports
from cwlib.synthetic import gaussian_transports, generator
from cwlib.walk import ConnectionWalk

KEEP_W = ("gaussian", "shuffled")  #: nulls that keep the token walk in the mean gauge


@runtime_checkable
class Captured(Protocol):
    """What is changed; `cwlib.capture.LayerWalk` is one."""

    @property
    def index(self) -> int: ...
    @property
    def walk(self) -> ConnectionWalk: ...
    @property
    def field(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class NullLayer:
    """A captured layer after a change; what `cwlib.metrics.Layer` asks for."""

    walk: ConnectionWalk
    field: Field
    previous: "NullLayer | None"
    index: int


def shuffled_heads(attention: Attention, seed: int) -> Attention:
    r"""Attention rows permuted across heads, :math:`A'^h_{ij} = A^{\sigma_i(h)}_{ij}`, in an order per token i.

    Rows still sum to one, and :math:`W = \frac1H\sum_h A^h` does not change.
    """
    heads, n_dst, _ = attention.shape
    order = torch.rand(heads, n_dst, generator=generator(seed)).argsort(0).to(attention.device)
    return attention.gather(0, order[:, :, None].expand_as(attention))


def without_first_token(attention: Attention) -> Float[Tensor, "head rest_dst rest_src"]:
    r"""Attention among tokens 1, 2, ..., rows renormalised: :math:`A^h_{ij}/(1 - A^h_{i0})`.

    A row that gave all its weight to token 0, to the last bit, is left with its own token.

    Raises
    ------
    ValueError
        If there are fewer than three tokens, or destinations and sources differ in number.
    """
    _, n_dst, n_src = attention.shape
    if n_dst != n_src or n_src < 3:
        raise ValueError(f"attention: expected at least three tokens that attend to each other, got {n_dst} x {n_src}")
    rest = attention[:, 1:, 1:].to(torch.float64)
    total = rest.sum(-1, keepdim=True)
    alone = torch.eye(n_dst - 1, dtype=torch.float64, device=attention.device).expand_as(rest)
    return torch.where(total > 0, rest / torch.where(total > 0, total, 1.0), alone)


def null_layers(
    source: str, seed: int, layers: Iterable[Captured], known: dict[int, HeadTransports]
) -> Iterator[tuple[int, "Captured | NullLayer"]]:
    """The layers of a model after the change that ``source`` names, with their index.

    Parameters
    ----------
    source : str
        ``gaussian``, ``shuffled`` or ``sinkless``; anything else (``trained``; ``init`` is a model of its own) changes
        nothing.
    seed : int
        Of the draw; each layer has one of its own.
    layers : iterable of cwlib.capture.LayerWalk
        Captured layers.
    known : dict
        Gaussian transports by layer, kept from text to text so that their cores are computed once.
    """
    change = {"gaussian": _gaussian, "shuffled": _shuffled, "sinkless": _sinkless}.get(source)
    current = None
    for layer in layers:
        if change is None:
            yield layer.index, layer
            continue
        walk, field = change(layer, 1000 * seed + layer.index, known)
        # The step from the last layer needs that layer, but not the one before it.
        before = current and NullLayer(current.walk, current.field, None, current.index)
        current = NullLayer(walk, field, before, layer.index)
        yield layer.index, current


def _gaussian(layer: Captured, seed: int, known: dict[int, HeadTransports]) -> tuple[ConnectionWalk, Tensor]:
    if layer.index not in known:
        known[layer.index] = gaussian_transports(layer.walk.transports, seed)
    walk = layer.walk
    return ConnectionWalk.from_transports(walk.attention, known[layer.index], None, walk.absorption), layer.field


def _shuffled(layer: Captured, seed: int, _: dict) -> tuple[ConnectionWalk, Tensor]:
    attention, absorbed = shuffled_heads(layer.walk.attention, seed), layer.walk.absorption
    if absorbed is not None:  # goes with its row
        absorbed = shuffled_heads(absorbed[:, :, None], seed)[:, :, 0]
    return ConnectionWalk.from_transports(attention, layer.walk.transports, None, absorbed), layer.field


def _sinkless(layer: Captured, _seed: int, _: dict) -> tuple[ConnectionWalk, Tensor]:
    attention = without_first_token(layer.walk.attention)
    return ConnectionWalk.from_transports(attention, layer.walk.transports), layer.field[1:]
