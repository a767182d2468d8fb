r"""Small cores of factored transports (T9).

A head's transport :math:`T_h = O_h V_h` is a d_model x d_model matrix of rank at most d_head. Every norm,
inner product and trace of products of transports reduces to d_head x d_head *cores*

.. math::
    P_{kh} = O_k^T O_h, \qquad B_{hl} = V_h V_l^T, \qquad C_{hl} = V_h O_l,

by cyclicity of the trace, so nothing here forms a d_model x d_model matrix. Cores are accumulated in float64
whatever the dtype of the weights. Under grouped-query attention ``groups`` consecutive query heads share one value
head, and what depends on value heads is computed once for the group.
"""

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from cwlib._types import HeadGram, Output, Value
from cwlib.validation import require_finite

HeadCores = Float[Tensor, "head other d_head d_other"]


@dataclass(frozen=True, eq=False, repr=False)
class HeadTransports:
    r"""The transports :math:`T_h = O_h V_h` of one layer, factored (the field's "OV circuits").

    Parameters
    ----------
    value : Float[Tensor, "kv_head d_head d_model"]
        Value maps :math:`V_h = W_V^h`, one per value head.
    output : Float[Tensor, "head d_model d_head"]
        Output maps :math:`O_h = W_O^h`, one per query head.
    groups : int
        Query heads per value head; 1 unless the layer uses grouped-query attention. Head h uses value head
        ``h // groups``.

    Raises
    ------
    ValueError
        If shapes, head counts or values do not fit.
    """

    value: Value
    output: Output
    groups: int = 1

    def __post_init__(self) -> None:
        require_finite("value", self.value, 3, "kv_head, d_head, d_model")
        require_finite("output", self.output, 3, "head, d_model, d_head")
        heads, d_model, d_head = self.output.shape
        if not isinstance(self.groups, int) or self.groups < 1 or self.value.shape[0] * self.groups != heads:
            raise ValueError(
                f"value: expected {heads} heads / groups={self.groups!r} to match output's {heads} heads, got "
                f"{self.value.shape[0]}; for grouped-query attention pass groups = query heads per value head"
            )
        if tuple(self.value.shape[1:]) != (d_head, d_model):
            raise ValueError(
                f"value: expected shape (kv_head, d_head, d_model) = ({self.value.shape[0]}, {d_head}, {d_model}) to "
                f"match output's (head, d_model, d_head) = {tuple(self.output.shape)}, got {tuple(self.value.shape)}; "
                "a weight stored as (d_model, d_head) needs .transpose(-1, -2)"
            )

    def __repr__(self) -> str:
        return f"HeadTransports(heads={self.heads}, d_model={self.d_model}, d_head={self.d_head}, groups={self.groups})"

    @property
    def heads(self) -> int:
        """Number H of query heads."""
        return self.output.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of value heads."""
        return self.value.shape[0]

    @property
    def d_head(self) -> int:
        """Dimension of a head."""
        return self.output.shape[2]

    @property
    def d_model(self) -> int:
        """Dimension of a fibre."""
        return self.output.shape[1]

    def per_head(self, value_indexed: Tensor, *dims: int) -> Tensor:
        """Repeat value-head axes ``dims`` (default: the first) for the query heads that share them."""
        for dim in dims or (0,):
            value_indexed = value_indexed.repeat_interleave(self.groups, dim) if self.groups > 1 else value_indexed
        return value_indexed

    @property
    def _v(self) -> Tensor:
        # Upcast at each use: keeping float64 copies would triple the memory of every layer held.
        return self.value.detach().to(torch.float64)

    @property
    def _o(self) -> Tensor:
        return self.output.detach().to(torch.float64)

    def output_cores(self, other: "HeadTransports | None" = None) -> HeadCores:
        r"""Cores :math:`P_{kh} = O_k^T O'_h`, float64; ``other`` holds O' (default: the same layer)."""
        right = self if other is None else other
        return torch.einsum("kda,hdb->khab", self._o, right._o)

    def value_cores(self, other: "HeadTransports | None" = None) -> HeadCores:
        r"""Cores :math:`B_{hl} = V_h V_l'^T`, float64, expanded to query heads."""
        right = self if other is None else other
        cores = torch.einsum("had,lbd->hlab", self._v, right._v)
        return right.per_head(self.per_head(cores, 0), 1)

    @property
    def _shared_value_cores(self) -> Float[Tensor, "kv_head kv_head d_head d_head"]:
        # heads of a group share V: what is computed from these is computed once for the group
        return torch.einsum("xad,ybd->xyab", self._v, self._v)

    def mixed_cores(self) -> HeadCores:
        r"""Cores :math:`C_{hl} = V_h O_l`, float64."""
        return self.per_head(torch.einsum("had,ldb->hlab", self._v, self._o))

    def gram(self, other: "HeadTransports | None" = None) -> HeadGram:
        r"""Frobenius inner products :math:`\langle T_h, T'_k\rangle_F = tr(P_{hk} B_{kh})` (T9).

        Parameters
        ----------
        other : HeadTransports, optional
            Transports T' of another layer with the same d_model; by default the same layer.

        Returns
        -------
        Float[Tensor, "head head"]
            Row h, column k; symmetric positive semidefinite when ``other`` is None.

        Raises
        ------
        ValueError
            If the two layers' d_model differ.
        """
        right = self if other is None else other
        if right.d_model != self.d_model:
            raise ValueError(f"other: expected d_model {self.d_model}, got {right.d_model}")
        if right not in self._grams:
            # <O_h V_h, O'_k V'_k> = <O_h V_h V'_k^T, O'_k>, and heads of a group share V: a product of d_model x d_head
            # with d_head x d_head for every query head and every value head of the other layer.
            theirs = right._o.unflatten(0, (right.kv_heads, -1)).flatten(2)
            mine, value = self._o, self._v
            columns = []
            for head, outputs in zip(right._v, theirs, strict=True):
                carried = mine @ self.per_head(value @ head.T)
                columns.append(carried.flatten(1) @ outputs.T)
            self._grams[right] = torch.cat(columns, 1)
        return self._grams[right]

    @cached_property
    def _grams(self) -> "WeakKeyDictionary[HeadTransports, HeadGram]":
        # with other layers; depends on weights only, and is asked for on every text
        return WeakKeyDictionary()

    @cached_property
    def head_gram(self) -> HeadGram:
        r""":math:`(G_T)_{hk} = \langle T_h, T_k\rangle_F`, cached: it depends on weights only."""
        return self.gram()

    @cached_property
    def quartic(self) -> Float[Tensor, "head head head head"]:
        r"""Quartic form :math:`Q_{khlm} = tr(T_k^T T_h T_l^T T_m) = tr(P_{kh} B_{hl} P_{lm} B_{mk})` (T9).

        For a mixture :math:`\Omega = \sum_h g_h T_h`,
        :math:`|\Omega^T \Omega|_F^2 = \sum_{khlm} g_k g_h g_l g_m Q_{khlm}`.
        Costs O(H^2 kv d_head^3 + H^4 d_head^2) for kv value heads.
        """
        grouped = self.kv_heads, self.groups
        p, b = self.output_cores().unflatten(1, grouped), self._shared_value_cores
        # left[k, h, y] = P_kh B_hl for any l in group y; the form is tr(left[k, h, l's] left[l, m, k's]).
        left = torch.einsum("kxnab,xybc->kxnyac", p, b).flatten(1, 2).unflatten(0, grouped)
        form = torch.einsum("xkhyac,ylmxca->xkhylm", left, left)
        return form.reshape(4 * (self.heads,))

    @cached_property
    def triangle_forms(self) -> tuple[Float[Tensor, "head head head"], Float[Tensor, "head head head head"]]:
        r"""Forms of the composition of two transports (T8, T9).

        The cubic form :math:`S_{hlm} = tr((T_h T_l)^T T_m) = tr(C_{hl}^T P_{hm} B_{ml})` and the quartic form
        :math:`R_{hh'll'} = tr((T_h T_l)^T T_{h'} T_{l'}) = tr(C_{hl}^T P_{hh'} C_{h'l'} B_{l'l})`, which give the inner
        product and the norms in the holonomy defect of a triangle.
        """
        grouped = self.kv_heads, self.groups
        p, b = self.output_cores(), self._shared_value_cores
        c = torch.einsum("xad,ldb->xlab", self._v, self._o)
        outer = torch.einsum("hxnab,xmbc->hxnmac", p.unflatten(1, grouped), c)  # P_hk C_km
        outer = outer.flatten(1, 2).unflatten(2, grouped).unflatten(0, grouped)
        inner = torch.einsum("ylab,xlcb->xlyac", self.per_head(b, 1), c)  # B_ml C_hl^T
        p = p.unflatten(1, grouped).unflatten(0, grouped)
        cubic = torch.einsum("xhymac,xlyca->xhlym", p, inner)
        form = torch.einsum("xhkymac,xlyca->xhklym", outer, inner)
        return cubic.reshape(3 * (self.heads,)), form.reshape(4 * (self.heads,))

    @cached_property
    def product_traces(self) -> HeadGram:
        r""":math:`tr(T_h T_k) = tr(C_{hk} C_{kh})`, the pairing behind symmetry and adjoint defects (T9)."""
        c = self.mixed_cores()
        return torch.einsum("hkab,khba->hk", c, c)

    def traces(self) -> Float[Tensor, " head"]:
        r""":math:`tr(T_h) = tr(V_h O_h)`."""
        return torch.einsum("had,hda->h", self.per_head(self._v), self._o)

    def singular_values(self) -> Float[Tensor, "head rank"]:
        r"""Singular values of every head's transport, descending.

        With QR factors :math:`O_h = Q R_O` and :math:`V_h^T = Q' R_V`, those of :math:`T_h` are those of
        the small matrix :math:`R_O R_V^T` (T9), at full float64 accuracy.

        Returns
        -------
        Float[Tensor, "head rank"]
            ``rank = min(d_head, d_model)`` values per head; the remaining ones are zero.
        """
        r_output = torch.linalg.qr(self._o, mode="r").R
        r_value = self.per_head(torch.linalg.qr(self._v.transpose(1, 2), mode="r").R)
        return torch.linalg.svdvals(r_output @ r_value.transpose(1, 2))

    def total(self) -> "HeadTransports":
        r"""The sum :math:`\sum_h T_h` as one head of width kv_heads * d_head.

        Query heads of a group share V, so their output maps add up; the result has the rank bound of T7.
        """
        output = self._o.reshape(self.kv_heads, self.groups, self.d_model, self.d_head).sum(1)
        return HeadTransports(
            self._v.reshape(1, -1, self.d_model), output.permute(1, 0, 2).reshape(1, self.d_model, -1)
        )

    def apply(self, vectors: Float[Tensor, "token d_model"]) -> Float[Tensor, "head token d_model"]:
        r""":math:`T_h x` for every head h and each row x of ``vectors``, in float64."""
        heads = torch.einsum("had,nd->hna", self._v, vectors.detach().to(torch.float64))
        return torch.einsum("hna,hda->hnd", self.per_head(heads), self._o)


def quadratic_form(weights: Tensor, form: Tensor) -> Tensor:
    """sum_hk w_h w_k form_hk for every edge, clamped at zero against rounding."""
    return torch.einsum("hij,hk,kij->ij", weights, form, weights).clamp_min(0)


def quartic_form(weights: Tensor, form: Tensor, chunk: int = 8192) -> Tensor:
    """sum_khlm w_k w_h w_l w_m form_khlm for every edge, over unordered pairs of heads, in chunks of edges."""
    heads, n_dst, n_src = weights.shape
    first, second = torch.triu_indices(heads, heads, device=weights.device)
    pairs = _fold(form, first, second)
    flat = weights.flatten(1)
    carried = (flat != 0).any(0).nonzero().squeeze(1)  # under causal attention only half of the edges
    result = flat.new_zeros(n_dst * n_src)
    for edges in carried.split(chunk):
        block = flat[:, edges]
        products = block[first] * block[second]
        result[edges] = (products * (pairs @ products)).sum(0)
    return result.reshape(n_dst, n_src).clamp_min(0)


def _fold(form: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Add up a quartic form over both orders of each pair, so that unordered pairs index it."""
    both = form + form.transpose(0, 1)
    both = both + both.transpose(2, 3)
    multiplicity = torch.where(first == second, 0.5, 1.0).to(form)
    return both[first, second][:, first, second] * multiplicity[:, None] * multiplicity[None, :]
