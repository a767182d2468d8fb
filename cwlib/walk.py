r"""The connection walk: attention as a nonnegative walk matrix with a linear transport along each edge."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cwlib._types import Attention, Field, Gauge, HeadGram, Output, Section, Value, Walk
from cwlib.blocks import FactoredBlocks, attention_factor, attention_gram, gates, near_one
from cwlib.cores import HeadTransports
from cwlib.kernels import upcast
from cwlib.validation import require_finite, require_gauge, require_kind, require_token, validate_attention


@dataclass(frozen=True, eq=False, repr=False)
class ConnectionWalk:
    r"""One attention layer as the operator :math:`K = \sum_h A^h \otimes T_h`, never formed (T1, T2).

    With gates :math:`\gamma^h_{ij} = A^h_{ij} / \sum_k A^k_{ij}` the layer is a single connection walk

    .. math::
        (P X)_i = \sum_j W_{ij} \Omega_{ij} x_j, \qquad \Omega_{ij} = H \sum_h \gamma^h_{ij} T_h,
        \qquad W = \tfrac1H \sum_h A^h,

    in the "mean" gauge; see `effective_walk` for the others. One head is the case of a constant transport.

    Parameters
    ----------
    attention : Float[Tensor, "head dst src"]
        Row-stochastic attention :math:`A^h`. ``dst != src`` (cross-attention) is a bipartite walk.
    value : Float[Tensor, "kv_head d_head d_model"]
        Value maps :math:`V_h`.
    output : Float[Tensor, "head d_model d_head"]
        Output maps :math:`O_h`.
    constant : Float[Tensor, "d_model"] or Float[Tensor, "dst d_model"], optional
        The section that biases add, :math:`\sum_h O_h b_V^h + b_O`; none by default.
    groups : int
        Query heads per value head (grouped-query attention); 1 by default.
    absorption : Float[Tensor, "head dst"], optional
        Mass that a row gives to no token, as to a learned sink: rows sum to one minus it (a substochastic walk). Then
        no law is stationary, and metrics of a stochastic W are NaN; edges, transports and T2 are as ever.

    Raises
    ------
    ValueError
        If rows do not sum to one (with their absorption), entries are negative or not finite, or shapes do not fit.

    Notes
    -----
    Tensors are kept as given and must not change afterwards (cores are computed once). Every computation is in float64.
    The walk is affine with a ``constant``: `apply` includes it, ``walk @ field`` and `to_dense` are the linear part.
    """

    attention: Attention
    value: Value
    output: Output
    constant: Float[Tensor, " d_model"] | Section | None = None
    groups: int = 1
    absorption: Float[Tensor, "head dst"] | None = None

    def __post_init__(self) -> None:
        validate_attention(self.attention, self.absorption)
        transports = self.transports
        object.__setattr__(self, "groups", transports.groups)  # an int, whatever integer came
        if transports.heads != self.heads:
            raise ValueError(
                f"attention: expected {transports.heads} heads to match output, got {self.heads} "
                f"(attention {tuple(self.attention.shape)}, output {tuple(self.output.shape)})"
            )
        if self.constant is not None:
            require_finite("constant", self.constant, min(getattr(self.constant, "ndim", 1), 2), "d_model")
            if tuple(self.constant.shape) not in {(self.d_model,), (self.n_dst, self.d_model)}:
                raise ValueError(
                    f"constant: expected shape ({self.d_model},) or ({self.n_dst}, {self.d_model}), "
                    f"got {tuple(self.constant.shape)}"
                )

    def __repr__(self) -> str:
        shape = f"heads={self.heads}, n_dst={self.n_dst}, n_src={self.n_src}, d_model={self.d_model}"
        return f"ConnectionWalk({shape}, d_head={self.transports.d_head}, groups={self.groups})"

    @classmethod
    def from_transports(
        cls,
        attention: Attention,
        transports: HeadTransports,
        constant: Tensor | None = None,
        absorption: Tensor | None = None,
    ) -> "ConnectionWalk":
        """Build a walk that shares ``transports``, and with them the cores they have already computed."""
        require_kind("transports", transports, HeadTransports, "pass HeadTransports(value, output)")
        walk = cls.__new__(cls)
        walk.__dict__["transports"] = transports  # fills the cached property below before it is asked for
        walk.__init__(attention, transports.value, transports.output, constant, transports.groups, absorption)
        return walk

    @cached_property
    def transports(self) -> HeadTransports:
        """The factored headwise transports T_h and their cores."""
        return HeadTransports(self.value, self.output, self.groups)

    @cached_property
    def blocks(self) -> FactoredBlocks:
        """Norms, traces and ranks of the transports Omega_ij, edge by edge, without forming one (T9)."""
        return FactoredBlocks(self.attention, self.transports)

    @property
    def heads(self) -> int:
        """Number H of heads."""
        return self.attention.shape[0]

    @property
    def n_dst(self) -> int:
        """Number of destination tokens."""
        return self.attention.shape[1]

    @property
    def n_src(self) -> int:
        """Number of source tokens."""
        return self.attention.shape[2]

    @property
    def d_model(self) -> int:
        """Dimension of a fibre."""
        return self.output.shape[1]

    @property
    def support(self) -> Bool[Tensor, "dst src"]:
        """Edges that carry weight: W_ij > 0. Elsewhere Omega_ij is undefined and plays no part."""
        return self.blocks.totals > 0

    @property
    def is_causal(self) -> bool:
        """Whether no token receives from a later one (W lower-triangular)."""
        return self.n_dst == self.n_src and not torch.triu(self.support, 1).any()

    def __matmul__(self, field: Field) -> Section:
        r"""The linear part :math:`P X = \sum_h A^h X V_h^T O_h^T`, in float64."""
        require_finite("field", field, 2, f"{self.n_src}, {self.d_model}")
        if tuple(field.shape) != (self.n_src, self.d_model):
            expected = f"({self.n_src}, {self.d_model})"
            raise ValueError(f"field: expected shape (src, d_model) = {expected}, got {tuple(field.shape)}")
        values = torch.einsum("had,nd->hna", self.transports._v, field.detach().to(torch.float64))
        values = self.transports.per_head(values)
        mixed = torch.cat([attention @ values for attention in upcast(self.attention)], 1)
        return torch.einsum("hna,hda->nd", mixed, self.transports._o)

    def apply(self, field: Field) -> Section:
        r"""One step of the walk, :math:`P X` plus the constant section: the attention output, float64 (T1, T2).

        Parameters
        ----------
        field : Float[Tensor, "src d_model"]
            Token vectors as rows; upcast to float64.

        Raises
        ------
        ValueError
            If the field's shape does not fit.
        """
        result = self @ field
        return result if self.constant is None else result + self.constant.detach().to(torch.float64)

    def gates(self) -> Attention:
        r"""Gates :math:`\gamma^h_{ij} = A^h_{ij} / \sum_k A^k_{ij}`, float64 (T2).

        They sum to one over heads on the support and are zero off it, where they are undefined.
        """
        return gates(self.attention)

    def effective_walk(self, gauge: Gauge = "mean") -> Walk:
        r"""The walk matrix W of the single equivalent walk, float64 (T2).

        Parameters
        ----------
        gauge : {"mean", "sum", "norm"}
            K fixes (W, Omega) up to a positive factor per edge. ``mean``: :math:`W = \frac1H\sum_h A^h`,
            row-stochastic; ``sum``: :math:`W = \sum_h A^h`, rows sum to H and Omega is a convex mixture; ``norm``:
            :math:`W_{ij} = |K_{ij}|_F/\sqrt{d}`, what flows along the edge, with :math:`|\Omega_{ij}|_F=\sqrt d`.

        Raises
        ------
        ValueError
            If the gauge is unknown.
        """
        require_gauge(gauge)
        if gauge == "norm":
            return self.blocks.totals / self.heads * (self.blocks.squares / self.d_model).sqrt()
        return self.blocks.totals / self.heads if gauge == "mean" else self.blocks.totals.clone()

    def operator_block(self, dst: int, src: int) -> Float[Tensor, "d_model d_model"]:
        r"""The dense block :math:`K_{ij} = \sum_h A^h_{ij} T_h` of one edge ``src -> dst``, float64."""
        dst, src = require_token("dst", dst, self.n_dst), require_token("src", src, self.n_src)
        output = self.transports._o * self.attention.detach()[:, dst, src, None, None].to(torch.float64)
        return torch.einsum("hda,hae->de", output, self.transports.per_head(self.transports._v))

    def transport(self, dst: int, src: int, gauge: Gauge = "mean") -> Float[Tensor, "d_model d_model"]:
        r"""The transport :math:`\Omega_{ij} : F_j \to F_i` of one edge as a dense matrix, float64 (T2).

        Raises
        ------
        ValueError
            If the edge carries no weight (Omega is undefined there), an index is out of range, or the gauge
            is unknown.
        """
        block = self.operator_block(dst, src)
        weight = self.effective_walk(gauge)[dst, src]
        if weight == 0:
            raise ValueError(f"edge (dst={dst}, src={src}): expected W > 0, got 0; choose an edge in walk.support")
        return block / weight

    def attention_gram(self, other: "ConnectionWalk | None" = None) -> HeadGram:
        r""":math:`(G_A)_{hk} = \langle A^h, A'^k\rangle_F`, float64 (T3); ``other`` defaults to the same walk."""
        right = self if other is None else other
        if right.attention.shape[1:] != self.attention.shape[1:]:
            raise ValueError(
                f"other: expected attention over the same (dst, src) = {tuple(self.attention.shape[1:])} tokens, "
                f"got {tuple(right.attention.shape[1:])}"
            )
        return attention_gram(self.attention, right.attention)

    def inner(self, other: "ConnectionWalk | None" = None) -> float:
        r"""Inner product :math:`\langle K, K'\rangle_F = \sum_{hk}\langle A^h,A'^k\rangle\langle T_h,T'_k\rangle`."""
        gram = self.transports.head_gram if other is None else self.transports.gram(other.transports)
        return float((self.attention_gram(other) * gram).sum())

    def norm(self) -> float:
        r"""Frobenius norm :math:`|K|_F`, from H x H Gram matrices (T9)."""
        return self._norm

    @cached_property
    def _norm(self) -> float:
        return max(self.inner(), 0.0) ** 0.5

    def schmidt_values(self) -> Float[Tensor, " head"]:
        r"""Operator Schmidt values of K, descending (T3).

        The singular values of the realigned :math:`n^2 \times d^2` matrix with rows vec(K_ij); they are the square
        roots of the eigenvalues of :math:`G_A G_T`, computed as singular values of the product of a QR factor of the
        attention family and the symmetric square root of :math:`G_T`. Below about 1e-8 of the largest is rounding.

        Returns
        -------
        Float[Tensor, "head"]
            H values; their number above zero is the operator Schmidt rank, their sum of squares is |K|_F^2.
        """
        factor, (transports, size) = attention_factor(self.attention), near_one(self.transports)
        eigenvalues, vectors = torch.linalg.eigh(transports.head_gram)
        root = vectors * eigenvalues.clamp_min(0).sqrt()
        values = torch.linalg.svdvals(factor @ root) * size
        return torch.nn.functional.pad(values, (0, self.heads - values.numel()))

    def head_singular_values(self) -> Float[Tensor, "head rank"]:
        """Singular values of each T_h, descending, min(d_head, d_model) per head (T9)."""
        return self.transports.singular_values()

    def rank_bound(self) -> Float[Tensor, "dst src"]:
        r"""Bound on rank Omega_ij: the widths of the active value heads added up, at most d_model (T7)."""
        return self.blocks.ranks

    def edge_isometry(self) -> Float[Tensor, "dst src"]:
        r"""Isometry of every edge's transport on its rank bound r, float64 (T7, T9).

        With singular values s of :math:`\Omega_{ij}`, :math:`(\sum s^2)^2 / (r \sum s^4)` in (0, 1]: one iff the
        transport is a scaled partial isometry of rank r. Computed from the quadratic and the quartic form in the gates,
        O(H^3 d_head^3 + n^2 H^4), without any d_model x d_model matrix. Does not depend on the gauge.

        Returns
        -------
        Float[Tensor, "dst src"]
            NaN where the edge carries no weight, or its heads' transports cancel to below 1e-5 of their mean square.
        """
        transports, _ = near_one(self.transports)  # isometry does not depend on the scale
        blocks = self.blocks if transports is self.transports else FactoredBlocks(self.attention, transports)
        fourths, squares = blocks.quartics, blocks.squares  # in this order cores are computed once for both
        # Where head transports cancel, |Omega|^2 is a small difference of large terms, and the quartic form loses twice
        # the digits: at this ratio about five are right.
        scale = blocks.combine(torch.diag(transports.head_gram.diagonal()))
        defined = self.support & (squares > 1e-5 * scale) & (fourths > 0)
        return torch.where(defined, squares**2 / (self.blocks.ranks * fourths), torch.nan)

    def to_dense(self) -> Float[Tensor, "dst_fibre src_fibre"]:
        r"""The dense operator :math:`K`, shape (n_dst d_model, n_src d_model), float64: tiny examples only.

        Raises
        ------
        ValueError
            If K would take more than 1 GiB.
        """
        entries = self.n_dst * self.n_src * self.d_model**2
        if entries * 8 > 2**30:
            raise ValueError(
                f"to_dense: expected an operator of at most 1 GiB, got {entries * 8 / 2**30:.0f} GiB "
                f"({self.n_dst * self.d_model} x {self.n_src * self.d_model}); use apply, norm, inner or edge_isometry"
            )
        maps = torch.einsum("hda,hae->hde", self.transports._o, self.transports.per_head(self.transports._v))
        blocks = torch.einsum("hij,hde->idje", self.attention.detach().to(torch.float64), maps)
        return blocks.reshape(self.n_dst * self.d_model, self.n_src * self.d_model)
