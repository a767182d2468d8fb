r"""A connection walk given edge by edge: any nonnegative W, any transport on each edge.

Attention gives transports that are mixtures of H maps. The theorems speak of all connection walks, and a mesh or a
point cloud gives one with its own map on every edge; this is their plain form, as a list of edges.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_matrix
from torch import Tensor

from cwlib._types import Field, Gauge, Section, Walk
from cwlib.blocks import PerToken
from cwlib.validation import require_dense, require_finite, require_gauge, require_token
from cwlib.walk import ConnectionWalk

Frames = Float[Tensor, "token d_model d_model"]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False, repr=False)
class EdgeWalk:
    r"""The operator :math:`(PX)_i = \sum_j W_{ij}\Omega_{ij}x_j` as a list of edges :math:`j \to i`.

    Parameters
    ----------
    tokens : int
        Number of tokens n.
    dst, src : Int[Tensor, "edge"]
        Destination i and source j of each edge, every pair at most once.
    weight : Float[Tensor, "edge"]
        :math:`W_{ij} > 0`; rows need not sum to one.
    maps : Float[Tensor, "edge d_model d_model"]
        :math:`\Omega_{ij} : F_j \to F_i`.

    Tensors must not change afterwards: build a new walk instead. They are kept, and computed with, where the maps are.

    Raises
    ------
    ValueError
        If shapes differ, an index is out of range, an edge is given twice, a weight is not positive, or an entry is not
        finite.
    """

    tokens: int
    dst: Int[Tensor, " edge"]
    src: Int[Tensor, " edge"]
    weight: Float[Tensor, " edge"]
    maps: Float[Tensor, "edge d_model d_model"]

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int):
            raise ValueError(f"tokens: expected an int, got {self.tokens!r}")
        require_finite("weight", self.weight, 1, "edge")
        require_finite("maps", self.maps, 3, "edge, d_model, d_model")
        for name in ("weight", "maps"):  # a frozen dataclass: set past its guard, once
            object.__setattr__(self, name, getattr(self, name).detach().to(self.maps.device, torch.float64))
        for name in ("dst", "src"):
            index = getattr(self, name)
            require_dense(name, index, "integers, one per edge")
            if index.ndim != 1 or index.dtype not in INTEGERS:
                got = f"{index.dtype} of shape {tuple(index.shape)}"
                raise ValueError(f"{name}: expected a tensor of integers of shape (edge), got {got}")
            object.__setattr__(self, name, index.to(self.maps.device, torch.int64))
        edges = len(self.weight)
        if self.maps.shape != (edges, self.d_model, self.d_model) or not len(self.dst) == len(self.src) == edges:
            raise ValueError(
                f"maps: expected one square matrix, dst and src for each of {edges} weights, got maps "
                f"{tuple(self.maps.shape)}, {len(self.dst)} dst, {len(self.src)} src"
            )
        for name, index in (("dst", self.dst), ("src", self.src)):
            if index.min() < 0 or index.max() >= self.tokens:
                raise ValueError(
                    f"{name}: expected token indices in [0, {self.tokens}), got {index.min()} to {index.max()}"
                )
        if (self.weight <= 0).any():
            raise ValueError(
                f"weight: expected positive weights, got {float(self.weight.min()):.3g}; leave edges of weight 0 out"
            )
        if len(torch.unique(self.dst * self.tokens + self.src)) < edges:
            raise ValueError("dst, src: expected every edge once, got one twice; add their blocks up first")

    def __repr__(self) -> str:
        return f"EdgeWalk(tokens={self.tokens}, edges={len(self.weight)}, d_model={self.d_model})"

    @classmethod
    def from_dense(cls, walk: Walk, maps: Float[Tensor, "dst src d_model d_model"]) -> "EdgeWalk":
        """The edges with positive weight of a dense pair (W, Omega)."""
        if walk.ndim != 2 or walk.shape[0] != walk.shape[1]:
            raise ValueError(f"walk: expected a square matrix, got shape {tuple(walk.shape)}")
        if maps.ndim != 4 or maps.shape[:2] != walk.shape:
            raise ValueError(
                f"maps: expected shape ({len(walk)}, {len(walk)}, d_model, d_model), got {tuple(maps.shape)}"
            )
        dst, src = (walk != 0).nonzero().T
        return cls(walk.shape[0], dst, src, walk[dst, src].to(torch.float64), maps[dst, src].to(torch.float64))

    @classmethod
    def from_walk(cls, walk: ConnectionWalk) -> "EdgeWalk":
        """The edges of an attention layer in the mean gauge (T2): tiny examples only, for it forms every transport."""
        if walk.n_dst != walk.n_src:
            raise ValueError(f"walk: expected as many destinations as sources, got {walk.n_dst} and {walk.n_src}")
        dst, src = walk.support.nonzero().T
        pairs = zip(dst.tolist(), src.tolist(), strict=True)
        maps = torch.stack([walk.transport(i, j) for i, j in pairs])
        return cls(walk.n_dst, dst, src, walk.effective_walk()[dst, src], maps)

    @property
    def n_dst(self) -> int:
        """Number of tokens."""
        return self.tokens

    n_src = n_dst

    @property
    def d_model(self) -> int:
        """Dimension of a fibre."""
        return self.maps.shape[-1]

    @property
    def support(self) -> Tensor:
        """Edges that carry weight."""
        return self._spread(torch.ones_like(self.weight)) > 0

    def _spread(self, values: Float[Tensor, " edge"]) -> Walk:
        """Numbers per edge as a matrix, zero elsewhere."""
        matrix = self.maps.new_zeros(self.tokens, self.tokens)
        matrix[self.dst, self.src] = values.to(torch.float64)
        return matrix

    def effective_walk(self, gauge: Gauge = "mean") -> Walk:
        r"""The walk matrix: W as given (``mean``, ``sum``), or :math:`|K_{ij}|_F/\sqrt d` (``norm``)."""
        require_gauge(gauge)
        scale = torch.linalg.matrix_norm(self.maps) / self.d_model**0.5 if gauge == "norm" else 1.0
        return self._spread(self.weight * scale)

    def transport(self, dst: int, src: int) -> Float[Tensor, "d_model d_model"]:
        """The transport of one edge; ValueError if the edge carries no weight or an index is out of range."""
        dst, src = require_token("dst", dst, self.tokens), require_token("src", src, self.tokens)
        found = ((self.dst == dst) & (self.src == src)).nonzero().flatten()
        if not len(found):
            raise ValueError(f"edge (dst={dst}, src={src}): expected W > 0, got 0; choose an edge in walk.support")
        return self.maps[int(found)]

    def __matmul__(self, field: Field) -> Section:
        r"""One step :math:`\sum_j W_{ij}\Omega_{ij}x_j`, in float64."""
        require_finite("field", field, 2, f"{self.tokens}, {self.d_model}")
        if tuple(field.shape) != (self.tokens, self.d_model):
            raise ValueError(f"field: expected shape ({self.tokens}, {self.d_model}), got {tuple(field.shape)}")
        messages = self.weight[:, None] * torch.einsum("eab,eb->ea", self.maps, field.to(torch.float64)[self.src])
        return messages.new_zeros(self.tokens, self.d_model).index_add(0, self.dst, messages)

    def sparse(self) -> csr_matrix:
        """K as a scipy sparse matrix of shape (tokens d_model, tokens d_model)."""
        d = self.d_model
        fibre = torch.arange(d)
        rows = (self.dst.cpu() * d)[:, None, None] + fibre[:, None]
        columns = (self.src.cpu() * d)[:, None, None] + fibre
        rows, columns = (t.expand(-1, d, d).flatten().numpy() for t in (rows, columns))
        entries = (self.weight[:, None, None] * self.maps).flatten().cpu().numpy()
        return csr_matrix((entries, (rows, columns)), shape=(self.tokens * d,) * 2)

    def to_dense(self) -> Float[Tensor, "dst_fibre src_fibre"]:
        """K as a dense matrix of shape (tokens d_model, tokens d_model)."""
        return torch.from_numpy(self.sparse().toarray()).to(self.maps.device)

    def change_frames(self, frames: Frames) -> "EdgeWalk":
        r"""The same walk after :math:`x_i \to g_i x_i`: transports become :math:`g_i\Omega_{ij}g_j^{-1}`."""
        require_finite("frames", frames, 3, "token, d_model, d_model")
        if tuple(frames.shape) != (self.tokens, self.d_model, self.d_model):
            raise ValueError(
                f"frames: expected shape ({self.tokens}, {self.d_model}, {self.d_model}), got {tuple(frames.shape)}"
            )
        frames = frames.detach().to(torch.float64)
        inverse, singular = torch.linalg.inv_ex(frames)
        if singular.any():
            raise ValueError(
                f"frames: expected invertible matrices, got a singular one at token {int(singular.argmax())}"
            )
        maps = frames[self.dst] @ self.maps @ inverse[self.src]
        return EdgeWalk(self.tokens, self.dst, self.src, self.weight, maps)

    @cached_property
    def blocks(self) -> "ExplicitBlocks":
        """Norms, traces and ranks of the transports, edge by edge."""
        return ExplicitBlocks(self)


@dataclass(frozen=True, eq=False)
class ExplicitBlocks:
    """The blocks of an `EdgeWalk`; see `cwlib.blocks.Blocks`."""

    walk: EdgeWalk

    @cached_property
    def squares(self) -> Walk:
        return self.walk._spread((self.walk.maps**2).sum((1, 2)))

    @cached_property
    def quartics(self) -> Walk:
        return self.walk._spread(((self.walk.maps.transpose(1, 2) @ self.walk.maps) ** 2).sum((1, 2)))

    @cached_property
    def _returns(self) -> Tensor:
        """There and back, Omega_ij Omega_ji; zero without a way back."""
        walk = self.walk
        position = walk.dst.new_full((walk.tokens, walk.tokens), -1)
        position[walk.dst, walk.src] = torch.arange(len(walk.weight), device=walk.dst.device)
        back = position[walk.src, walk.dst]
        return torch.where((back >= 0)[:, None, None], walk.maps @ walk.maps[back], 0.0)

    @cached_property
    def pairings(self) -> Walk:
        return self.walk._spread(self._returns.diagonal(dim1=1, dim2=2).sum(1))

    @cached_property
    def round_trips(self) -> Walk:
        return self.walk._spread((self._returns**2).sum((1, 2)))

    @cached_property
    def ranks(self) -> Walk:
        return self.walk._spread(torch.full_like(self.walk.weight, self.walk.d_model))

    def _gather(self, flow: Walk, per_edge: Tensor) -> Tensor:
        walk = self.walk
        scaled = torch.einsum("e,e...->e...", flow[walk.dst, walk.src], per_edge)
        return scaled.new_zeros(walk.tokens, *scaled.shape[1:]).index_add(0, walk.src, scaled)

    def incoming(self, flow: Walk) -> tuple[PerToken, PerToken]:
        metrics = self._gather(flow, self.walk.maps.transpose(1, 2) @ self.walk.maps)
        return metrics.diagonal(dim1=1, dim2=2).sum(1), (metrics**2).sum((1, 2))

    def incoming_energy(self, flow: Walk, field: Field) -> PerToken:
        images = torch.einsum("eab,eb->ea", self.walk.maps, field.to(torch.float64)[self.walk.src])
        return self._gather(flow, (images**2).sum(1))
