r"""What the Laplacian needs to know of the blocks :math:`K_{ij} = W_{ij}\Omega_{ij}` of a walk, one number per edge.

Everything is in the mean gauge (W as the heads' mean attention). `FactoredBlocks` reads it off the gates and the
small cores of the heads (T9); `cwlib.edges` has its counterpart for transports given edge by edge.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from cwlib._types import Attention, Field, HeadGram, Walk
from cwlib.cores import HeadTransports
from cwlib.kernels import pieces, quartic_form, upcast, workspace

PerToken = Float[Tensor, " src"]


def gates(attention: Attention) -> Attention:
    r"""Gates :math:`\gamma^h_{ij} = A^h_{ij} / \sum_k A^k_{ij}`, float64, zero where no head attends (T2)."""
    attention = attention.detach().to(torch.float64)
    total = attention.sum(0)
    return attention / torch.where(total > 0, total, 1.0)


def attention_gram(left: Attention, right: Float[Tensor, "other dst src"]) -> Float[Tensor, "head other"]:
    r""":math:`\langle A^h, A'^k\rangle_F`, float64 (T3); on the device of the first."""
    result = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for rows in pieces(left):
        some, others = (a[:, rows].detach().to(left.device, torch.float64).flatten(1) for a in (left, right))
        result += some @ others.T
    return result


def attention_factor(attention: Attention) -> Float[Tensor, "rank head"]:
    """R of the QR factors of the matrix whose columns are the heads' attention, float64 (T3)."""
    factor = torch.empty(0, len(attention), dtype=torch.float64, device=attention.device)
    for some in upcast(attention):
        factor = torch.linalg.qr(torch.cat([factor, some.flatten(1).T]), mode="r").R
    return factor


def near_one(transports: HeadTransports) -> tuple[HeadTransports, float]:
    """The same transports over a power of two, no largest entry of V and O far from one, and that power.

    Forms of degree four in T overflow from about 1e77 on, and lose digits below 1e-77. Maps whose largest entries lie
    between 2^-30 and 2^30 are left as they are, with the power one.
    """
    largest = (
        float(torch.stack(torch.aminmax(maps.detach())).abs().max()) for maps in (transports.value, transports.output)
    )
    value, output = (2.0 ** (math.frexp(size)[1] - 1) for size in largest)
    if min(value, output) >= 2**-30 and max(value, output) <= 2**30:
        return transports, 1.0
    return HeadTransports(transports._v / value, transports._o / output, transports.groups), value * output


class Blocks(Protocol):
    r"""Numbers per edge, zero where W_ij = 0, and per source token.

    Attributes
    ----------
    squares : Float[Tensor, "dst src"]
        :math:`|\Omega_{ij}|_F^2`.
    quartics : Float[Tensor, "dst src"]
        :math:`|\Omega_{ij}^T\Omega_{ij}|_F^2`.
    pairings : Float[Tensor, "dst src"]
        :math:`tr(\Omega_{ij}\Omega_{ji})`; zero unless both directions carry weight. Square walks only.
    round_trips : Float[Tensor, "dst src"]
        :math:`|\Omega_{ij}\Omega_{ji}|_F^2`; likewise.
    ranks : Float[Tensor, "dst src"]
        Bound on the rank of :math:`\Omega_{ij}` (T7).
    """

    @property
    def squares(self) -> Walk: ...
    @property
    def quartics(self) -> Walk: ...
    @property
    def pairings(self) -> Walk: ...
    @property
    def round_trips(self) -> Walk: ...
    @property
    def ranks(self) -> Walk: ...

    def incoming(self, flow: Walk) -> tuple[PerToken, PerToken]:
        r""":math:`tr B_j` and :math:`|B_j|_F^2` of :math:`B_j = \sum_i f_{ij}\Omega_{ij}^T\Omega_{ij}`, flow f."""
        ...

    def incoming_energy(self, flow: Walk, field: Field) -> PerToken:
        r""":math:`x_j^T B_j x_j = \sum_i f_{ij}|\Omega_{ij}x_j|^2`."""
        ...


@dataclass(frozen=True, eq=False)
class FactoredBlocks:
    """The blocks of an attention layer, from its attention and cores, in pieces of destinations; see `Blocks`."""

    attention: Attention
    transports: HeadTransports

    def _mix(self, attention: Attention) -> Attention:
        # Omega_ij = H sum_h gamma^h_ij T_h
        return gates(attention) * len(attention)

    def _per_edge(self, function: Callable[[Float[Tensor, "head edge"]], Float[Tensor, " edge"]]) -> Walk:
        """A function of the mixtures of all edges, evaluated on those that carry weight."""
        result = torch.zeros(self.attention.shape[1:], dtype=torch.float64, device=self.attention.device)
        for rows in pieces(self.attention):
            mix = self._mix(self.attention[:, rows])
            if mix.device.type == "cpu":
                carried = (mix != 0).any(0)  # under causal attention only half of the edges
                result[rows][carried] = function(mix[:, carried])
            else:  # a GPU would have to wait until the host knows how many edges these are; elsewhere they give zero
                result[rows] = function(mix.flatten(1)).unflatten(0, mix.shape[1:])
        return result

    def combine(self, form: HeadGram) -> Walk:
        r""":math:`\sum_{hk} m_h m_k F_{hk}` per edge, where :math:`\Omega_{ij} = \sum_h m_h T_h`; clamped at zero."""
        return self._per_edge(lambda mix: ((form @ mix) * mix).sum(0).clamp_min(0))

    @cached_property
    def totals(self) -> Walk:
        r""":math:`\sum_h A^h_{ij}`, float64."""
        return torch.cat([some.sum(0) for some in upcast(self.attention)])

    @cached_property
    def squares(self) -> Walk:
        return self.combine(self.transports.head_gram)

    @cached_property
    def quartics(self) -> Walk:
        return self._per_edge(lambda mix: quartic_form(mix, self.transports.quartic))

    def _there_and_back(self) -> Iterator[tuple[slice, Attention, Attention]]:
        """Mixtures of some rows, and of the edges back."""
        for rows in pieces(self.attention):
            yield rows, self._mix(self.attention[:, rows]), self._mix(self.attention[:, :, rows]).transpose(1, 2)

    @cached_property
    def pairings(self) -> Walk:
        form, result = self.transports.product_traces, torch.empty_like(self.attention[0], dtype=torch.float64)
        for rows, there, back in self._there_and_back():
            result[rows] = torch.einsum("hij,hk,kij->ij", there, form, back)
        return result

    @cached_property
    def round_trips(self) -> Walk:
        # tr((T_h T_l)^T T_h' T_l') = R_hh'll', paired by the path (h, l) there and back
        form = self.transports.triangle_forms[1].permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        result = torch.zeros_like(self.attention[0], dtype=torch.float64)
        for rows, there, back in self._there_and_back():
            joined = (there > 0).any(0) & (back > 0).any(0)
            there, back = there[:, joined], back[:, joined]
            parts = []
            for edges in torch.arange(there.shape[1]).split(max(1, workspace(form.device) // (16 * len(form)))):
                paths = torch.einsum("he,le->hle", there[:, edges], back[:, edges]).flatten(0, 1)
                parts.append((paths * (form @ paths)).sum(0))
            result[rows][joined] = torch.cat(parts) if parts else result.new_empty(0)
        return result.clamp_min(0)

    @cached_property
    def ranks(self) -> Walk:
        # One query head of a group bounds the rank by d_head, and so do all of them: they share V.
        active = (self.attention > 0).unflatten(0, (-1, self.transports.groups)).any(1).sum(0)
        return (active * self.transports.d_head).clamp_max(self.transports.d_model).to(torch.float64)

    def _heads(self, flow: Walk) -> Float[Tensor, "src head head"]:
        # B_j = sum_hk M^j_hk T_h^T T_k with M^j_hk = sum_i f_ij m^h_ij m^k_ij
        heads, _, n_src = self.attention.shape
        result = torch.zeros(n_src, heads, heads, dtype=torch.float64, device=self.attention.device)
        for rows in pieces(self.attention):
            mix = self._mix(self.attention[:, rows]).permute(2, 0, 1)
            result.baddbmm_(mix * flow[rows].T[:, None], mix.mT)
        return result

    def incoming(self, flow: Walk) -> tuple[PerToken, PerToken]:
        mixing = self._heads(flow).flatten(1)
        traces = mixing @ self.transports.head_gram.flatten()
        # tr((T_h^T T_k)^T T_l^T T_m) = Q_khlm
        quartic = self.transports.quartic.transpose(0, 1).flatten(2).flatten(0, 1)
        return traces, ((mixing @ quartic) * mixing).sum(1).clamp_min(0)

    def incoming_energy(self, flow: Walk, field: Field) -> PerToken:
        images = self.transports.apply(field)
        return torch.einsum("jhk,hjd,kjd->j", self._heads(flow), images, images)
