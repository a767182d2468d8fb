"""Seeded walks with prescribed properties, and the Gaussian null model."""

import torch

from cwlib.cores import HeadTransports
from cwlib.walk import ConnectionWalk


def generator(seed: int) -> torch.Generator:
    """A CPU generator of its own, so that no instance depends on global state."""
    return torch.Generator().manual_seed(seed)


def random_walk(
    seed: int,
    heads: int = 3,
    tokens: int = 6,
    d_model: int = 8,
    d_head: int = 3,
    groups: int = 1,
    causal: bool = False,
    sources: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> ConnectionWalk:
    """A walk with Gaussian value, output and attention logits.

    Parameters
    ----------
    seed : int
        Fixes every number.
    heads, tokens, d_model, d_head, groups : int
        Shape; ``groups`` query heads share a value head.
    causal : bool
        Whether token i attends to tokens j <= i only.
    sources : int, optional
        Number of source tokens (cross-attention); ``tokens`` by default.
    dtype : torch.dtype
        Precision of the tensors.
    """
    rng = generator(seed)
    logits = torch.randn(heads, tokens, sources or tokens, dtype=torch.float64, generator=rng) * 2
    if causal:
        future = torch.ones(logits.shape[1:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(future, -torch.inf)
    value = torch.randn(heads // groups, d_head, d_model, dtype=torch.float64, generator=rng) / d_model**0.5
    output = torch.randn(heads, d_model, d_head, dtype=torch.float64, generator=rng) / d_head**0.5
    return ConnectionWalk(logits.softmax(-1).to(dtype), value.to(dtype), output.to(dtype), groups=groups)


def dependent_walk(seed: int, heads: int = 4, rank: int = 2, tokens: int = 6, d_model: int = 8) -> ConnectionWalk:
    """A walk of ``heads`` heads whose operator Schmidt rank is exactly ``rank`` (T3).

    Only ``rank`` different attention matrices occur, so the attention family is linearly dependent.
    """
    base = random_walk(seed, heads=heads, tokens=tokens, d_model=d_model)
    index = torch.arange(heads) % rank
    return ConnectionWalk(base.attention[index], base.value, base.output)


def isometric_transports(seed: int, heads: int, d_model: int, scale: float = 1.0) -> HeadTransports:
    """Heads whose transports are ``scale`` times independent random orthogonal d_model x d_model matrices."""
    rng = generator(seed)
    frames = torch.linalg.qr(torch.randn(heads, d_model, d_model, dtype=torch.float64, generator=rng)).Q
    identity = torch.eye(d_model, dtype=torch.float64).expand(heads, -1, -1)
    return HeadTransports(identity, scale * frames)


def gaussian_transports(like: HeadTransports, seed: int) -> HeadTransports:
    """The Gaussian null: value and output maps of the same shape with independent N(0, 1) entries.

    Products of Gaussian matrices with d_head << d_model are already close to isometries on their support, so a bare
    isometry number says nothing; this null is what it must be compared with. The scale does not matter to any
    metric of this package.
    """
    rng = generator(seed)
    # drawn on the CPU, so that a seed means the same numbers on every device
    value = torch.randn(like.value.shape, dtype=torch.float64, generator=rng).to(like.value.device)
    output = torch.randn(like.output.shape, dtype=torch.float64, generator=rng).to(like.output.device)
    return HeadTransports(value, output, like.groups)


def varied_shapes(seed: int) -> dict[str, int]:
    """A small random shape, so that checks do not all run at one size."""
    rng = generator(seed)
    heads = 2 * int(torch.randint(1, 4, (), generator=rng))
    return {
        "heads": heads,
        "tokens": int(torch.randint(2, 9, (), generator=rng)),
        "d_model": int(torch.randint(3, 13, (), generator=rng)),
        "d_head": int(torch.randint(1, 6, (), generator=rng)),
        "groups": 1 + seed % 2,
    }
