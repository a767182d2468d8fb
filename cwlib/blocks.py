r"""What the Laplacian needs to know of the blocks :math:`K_{ij} = W_{ij}\Omega_{ij}` of a walk, one number per edge.

Everything is in the mean gauge (W as the heads' mean attention). `FactoredBlocks` reads it off the gates and the
small cores of the heads (T9); `cwlib.edges` has its counterpart for transports given edge by edge.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from cwlib._types import Attention, Field, Walk
from cwlib.cores import HeadTransports, quadratic_form, quartic_form

PerToken = Float[Tensor, " src"]


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
    """The blocks of an attention layer, from its gates and cores; see `Blocks`."""

    gates: Attention
    transports: HeadTransports

    @property
    def _mix(self) -> Attention:
        # Omega_ij = H sum_h gamma^h_ij T_h
        return self.gates * len(self.gates)

    @cached_property
    def squares(self) -> Walk:
        return quadratic_form(self._mix, self.transports.head_gram)

    @cached_property
    def quartics(self) -> Walk:
        return quartic_form(self._mix, self.transports.quartic)

    @cached_property
    def pairings(self) -> Walk:
        return torch.einsum("hij,hk,kji->ij", self._mix, self.transports.product_traces, self._mix)

    @cached_property
    def round_trips(self) -> Walk:
        # tr((T_h T_l)^T T_h' T_l') = R_hh'll', paired by the path (h, l) there and back
        form = self.transports.triangle_forms[1].permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        there, back = self._mix, self._mix.transpose(1, 2)
        joined = (there > 0).any(0) & (back > 0).any(0)
        parts = []
        for edges in joined.nonzero().split(8192):
            i, j = edges.T
            paths = torch.einsum("he,le->hle", there[:, i, j], back[:, i, j]).flatten(0, 1)
            parts.append((paths * (form @ paths)).sum(0))
        result = torch.zeros_like(self._mix[0])
        result[joined] = torch.cat(parts) if parts else result[joined]
        return result.clamp_min(0)

    @cached_property
    def ranks(self) -> Walk:
        # One query head of a group bounds the rank by d_head, and so do all of them: they share V.
        active = (self.gates > 0).unflatten(0, (-1, self.transports.groups)).any(1).sum(0)
        return (active * self.transports.d_head).clamp_max(self.transports.d_model).to(torch.float64)

    def _heads(self, flow: Walk) -> Float[Tensor, "src head head"]:
        # B_j = sum_hk M^j_hk T_h^T T_k with M^j_hk = H^2 sum_i f_ij gamma^h_ij gamma^k_ij
        return torch.einsum("ij,hij,kij->jhk", flow, self._mix, self._mix)

    def incoming(self, flow: Walk) -> tuple[PerToken, PerToken]:
        mixing = self._heads(flow).flatten(1)
        traces = mixing @ self.transports.head_gram.flatten()
        # tr((T_h^T T_k)^T T_l^T T_m) = Q_khlm
        quartic = self.transports.quartic.transpose(0, 1).flatten(2).flatten(0, 1)
        return traces, ((mixing @ quartic) * mixing).sum(1).clamp_min(0)

    def incoming_energy(self, flow: Walk, field: Field) -> PerToken:
        images = self.transports.apply(field)
        return torch.einsum("jhk,hjd,kjd->j", self._heads(flow), images, images)
