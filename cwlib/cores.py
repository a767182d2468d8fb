r"""Small cores of factored transports (T9).

A head's transport :math:`T_h = O_h V_h` is a d_model x d_model matrix of rank at most d_head. Every norm,
inner product and trace of products of transports reduces to d_head x d_head *cores*

.. math::
    P_{kh} = O_k^T O_h, \qquad B_{hl} = V_h V_l^T, \qquad C_{hl} = V_h O_l,

by cyclicity of the trace, so nothing here forms a d_model x d_model matrix. Cores are accumulated in float64
whatever the dtype of the weights. Under grouped-query attention ``groups``
consecutive query heads share one value head, and what depends on value heads is computed once for the group.
"""

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from cwlib._types import HeadGram, Output, Value
from cwlib.kernels import composition_forms, gram, grams, workspace
from cwlib.validation import as_integer, require_finite, require_kind

HeadCores = Float[Tensor, "head other d_head d_other"]

# Spread of |O|^2 |V|^2 over the least squared singular value up to which Gram matrices give it to about eight digits.
_WELL_CONDITIONED = 1e8
_SMALLEST = 1e-280  # products of squares below it, or above its inverse, may have left the range of floats


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
        groups = as_integer(self.groups)
        if groups is None or groups < 1 or heads % groups:
            raise ValueError(
                f"groups: expected a positive integer that divides output's {heads} heads, got {self.groups!r}; "
                "pass query heads per value head, 1 unless the layer uses grouped-query attention"
            )
        object.__setattr__(self, "groups", groups)  # a frozen dataclass: set past its guard, once
        if self.value.shape[0] * groups != heads:
            raise ValueError(
                f"value: expected {heads} heads / groups={groups} to match output's {heads} heads, got "
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
        return (
            gram(self._v.flatten(0, 1))
            .unflatten(1, (self.kv_heads, -1))
            .unflatten(0, (self.kv_heads, -1))
            .transpose(1, 2)
        )

    @property
    def _flat_output_cores(self) -> Float[Tensor, "head_width head_width"]:
        # all P_kh as the blocks of one symmetric matrix
        return gram(self.output.detach().transpose(0, 1).flatten(1).to(torch.float64).T)

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
        if other is None or other is self:
            return self.head_gram
        right = other
        require_kind("other", other, HeadTransports, "pass HeadTransports(value, output)")
        if right.d_model != self.d_model:
            raise ValueError(f"other: expected d_model {self.d_model}, got {right.d_model}")
        if right not in self._grams:
            # <O_h V_h, O'_k V'_k> = <O_h V_h V'_k^T, O'_k>, and heads of a group share V: a product of d_model x d_head
            # with d_head x d_head for every query head and every value head of the other layer.
            theirs = right._o.to(self.output.device).unflatten(0, (right.kv_heads, -1)).flatten(2)
            mine, value, other_value = self._o, self._v, right._v.to(self.output.device)
            columns = []
            per_value_head = 16 * self.heads * self.d_model * right.d_head
            for some in torch.arange(right.kv_heads).split(max(1, workspace(mine.device) // per_value_head)):
                carried = mine @ self.per_head(value @ other_value[some].flatten(0, 1).T)
                carried = carried.unflatten(2, (len(some), -1)).permute(2, 0, 1, 3).flatten(2)
                columns.append(carried @ theirs[some].mT)
            self._grams[right] = torch.cat(columns).transpose(0, 1).flatten(1)
        return self._grams[right]

    @cached_property
    def _grams(self) -> "WeakKeyDictionary[HeadTransports, HeadGram]":
        # with other layers; depends on weights only, and is asked for on every text
        return WeakKeyDictionary()

    @cached_property
    def head_gram(self) -> HeadGram:
        r""":math:`(G_T)_{hk} = \langle T_h, T_k\rangle_F`, cached: it depends on weights only."""
        return self._gram_of(self._flat_output_cores, self._shared_value_cores)

    def _gram_of(self, flat_output_cores: Tensor, shared_value_cores: Tensor) -> HeadGram:
        # the sum over entries of P_hk times B_hk, whose transposes are P_kh and B_kh
        kv, groups, d = self.kv_heads, self.groups, self.d_head
        p = flat_output_cores.view(kv, groups, d, kv, groups, d)
        return torch.einsum("xgaykb,xyab->xgyk", p, shared_value_cores).reshape(2 * (self.heads,))

    @cached_property
    def quartic(self) -> Float[Tensor, "head head head head"]:
        r"""Quartic form :math:`Q_{khlm} = tr(T_k^T T_h T_l^T T_m) = tr(P_{kh} B_{hl} P_{lm} B_{mk})` (T9).

        For a mixture :math:`\Omega = \sum_h g_h T_h`,
        :math:`|\Omega^T \Omega|_F^2 = \sum_{khlm} g_k g_h g_l g_m Q_{khlm}`.
        Costs O(H^2 kv d_head^3 + H^4 d_head^2) for kv value heads.
        """
        kv, groups, heads, d = self.kv_heads, self.groups, self.heads, self.d_head
        flat, shared = self._flat_output_cores, self._shared_value_cores
        # the cores are large, and not kept; whoever wants this form wants that one too
        self.__dict__.setdefault("head_gram", self._gram_of(flat, shared))
        p = flat.view(kv, groups * d, heads, d).transpose(1, 2).contiguous()  # [x, h]: P_kh, k in x, stacked
        b = self.per_head(shared).transpose(0, 1).contiguous()  # [y, h]: B_hy
        form = torch.empty(kv, kv, groups * heads, groups * heads, dtype=p.dtype, device=p.device)
        # Q_khlm = tr(P_kh B_hl P_lm B_mk) = <P_kh B_hy, B_xm P_ml> with k in group x and l in group y. Exchanging
        # (k, h) and (l, m) leaves it as it is, so that unordered pairs of groups will do.
        first, second = torch.triu_indices(kv, kv, device=p.device)
        per_pair = 64 * groups * heads * d * d  # eight copies, which are fast as long as they stay in the cache
        for some in torch.arange(len(first), device=p.device).split(max(1, workspace(p.device) // per_pair)):
            x, y = first[some], second[some]
            there = (p[x] @ b[y]).unflatten(2, (groups, d)).transpose(1, 2).flatten(1, 2)
            back = (b[x].mT @ p[y].mT).unflatten(3, (groups, d)).permute(0, 3, 1, 2, 4).flatten(1, 2)
            form[x, y] = there.flatten(2) @ back.flatten(2).mT
            form[y, x] = form[x, y].mT
        # now [x, y, (k, h), (l, m)]
        form = form.view(kv, kv, groups, heads, groups, heads).permute(0, 2, 3, 1, 4, 5)
        return form.reshape(4 * (heads,))

    @cached_property
    def triangle_forms(self) -> tuple[Float[Tensor, "head head head"], Float[Tensor, "head head head head"]]:
        r"""Forms of the composition of two transports (T8, T9).

        The cubic form :math:`S_{hlm} = tr((T_h T_l)^T T_m) = tr(C_{hl}^T P_{hm} B_{ml})` and the quartic form
        :math:`R_{hh'll'} = tr((T_h T_l)^T T_{h'} T_{l'}) = tr(C_{hl}^T P_{hh'} C_{h'l'} B_{l'l})`, which give the inner
        product and the norms in the holonomy defect of a triangle.
        """
        c = torch.einsum("xad,ldb->xlab", self._v, self._o)
        return composition_forms(self.output.detach(), self.per_head(self._shared_value_cores, 1), c)

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

        With a Cholesky factor :math:`O_h^TO_h = LL^T` they are the roots of the eigenvalues of
        :math:`L^TV_hV_h^TL` (T9). Rounding moves these by about 1e-16 of :math:`|O_h|^2|V_h|^2`; the roots are used if
        the least eigenvalue is above 1e-8 of that, and so right to eight digits. Other heads take QR factors
        :math:`O_h = Q R_O`, :math:`V_h^T = Q' R_V` and the singular values of the small :math:`R_O R_V^T`, where errors
        are rounding of :math:`|O_h||V_h|`.

        Returns
        -------
        Float[Tensor, "head rank"]
            ``rank = min(d_head, d_model)`` values per head; the remaining ones are zero.
        """
        if self.d_head > self.d_model:
            return self._accurate_singular_values(torch.arange(self.heads))
        p, b = grams(self.output.mT), self.per_head(grams(self.value))
        # Gram matrices are rounded, and so squares are off by about 1e-16 of this
        size = torch.linalg.matrix_norm(p) * torch.linalg.matrix_norm(b)
        # with O^T O = L L^T, those of T are the roots of the eigenvalues of L^T (V V^T) L
        lower, failed = torch.linalg.cholesky_ex(p)
        sound = (failed == 0) & (size > _SMALLEST) & (size < 1 / _SMALLEST)
        squares = torch.linalg.eigvalsh(torch.where(sound[:, None, None], lower.mT @ b @ lower, 0.0)).flip(1)
        doubtful = (~sound | ~(squares[:, -1] > size / _WELL_CONDITIONED)).nonzero().squeeze(1)
        values = squares.clamp_min(0).sqrt()
        if len(doubtful):
            values[doubtful] = self._accurate_singular_values(doubtful)
        return values

    def _accurate_singular_values(self, heads: Tensor) -> Float[Tensor, "head rank"]:
        # QR does not square condition numbers, but LAPACK takes ten times as long for it as BLAS for Gram matrices.
        r_output = torch.linalg.qr(self.output.detach()[heads].to(torch.float64), mode="r").R
        r_value = torch.linalg.qr(self.value.detach()[heads // self.groups].mT.to(torch.float64), mode="r").R
        return torch.linalg.svdvals(r_output @ r_value.mT)

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
