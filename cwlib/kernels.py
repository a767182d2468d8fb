"""Small dense kernels in float64, in pieces of bounded memory: what cores and blocks are computed with."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from cwlib._types import Attention

WORKSPACE = 2**23  #: bytes that one piece of a computation in pieces takes on the CPU, about those of its cache


def workspace(device: torch.device) -> int:
    """Bytes that one piece may take; a GPU needs larger pieces to be kept busy."""
    return WORKSPACE if device.type == "cpu" else 32 * WORKSPACE


def pieces(attention: Attention) -> Iterator[slice]:
    """Destinations, so many at a time that three or four float64 copies of their attention fit into the workspace."""
    step = max(1, workspace(attention.device) // (32 * attention.shape[0] * attention.shape[2]))
    return (slice(start, start + step) for start in range(0, attention.shape[1], step))


def upcast(attention: Attention) -> Iterator[Attention]:
    """The same pieces of the attention in float64."""
    return (attention[:, rows].detach().to(torch.float64) for rows in pieces(attention))


def row_sums(attention: Attention) -> Float[Tensor, "head dst"]:
    """Sums over sources, float64."""
    return torch.cat([some.sum(-1) for some in upcast(attention)], 1)


def quartic_form(weights: Float[Tensor, "head edge"], form: Tensor) -> Float[Tensor, " edge"]:
    """sum_khlm w_k w_h w_l w_m form_khlm for every edge, over unordered pairs of heads, in pieces of edges."""
    first, second = torch.triu_indices(len(weights), len(weights), device=weights.device)
    pairs = _fold(form, first, second)
    result = weights.new_empty(weights.shape[1])
    for edges in torch.arange(weights.shape[1], device=weights.device).split(
        max(1, workspace(weights.device) // (24 * len(first)))
    ):
        block = weights[:, edges]
        products = block[first] * block[second]
        result[edges] = (products * (pairs @ products)).sum(0)
    return result.clamp_min(0)


def _fold(form: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Add up a quartic form over both orders of each pair, so that unordered pairs index it."""
    both = form + form.transpose(0, 1)
    both = both + both.transpose(2, 3)
    multiplicity = torch.where(first == second, 0.5, 1.0).to(form)
    return both[first, second][:, first, second] * multiplicity[:, None] * multiplicity[None, :]


def grams(maps: Float[Tensor, "head row column"]) -> Float[Tensor, "head row row"]:
    """The Gram matrix of every head's rows, float64; heads are upcast a few at a time, which stay in the cache."""
    step = max(1, workspace(maps.device) // (64 * maps[0].numel()))
    upcast = (some.detach().to(torch.float64) for some in maps.split(step))
    return torch.cat([some @ some.mT for some in upcast])


def gram(rows: Float[Tensor, "row column"]) -> Float[Tensor, "row row"]:
    """The Gram matrix of rows; of its symmetric blocks only one half is computed."""
    result = rows.new_empty(2 * rows.shape[:1])
    step = max(128, -(-len(rows) // 4))  # smaller blocks lose more speed than they save work
    for start in range(0, len(rows), step):
        block = rows[start : start + step] @ rows[: start + step].T
        result[start : start + step, : start + step] = block
        result[:start, start : start + step] = block[:, :start].T
    return result


def composition_forms(
    output: Float[Tensor, "head d_model d_head"],
    value_cores: Float[Tensor, "kv_head head d_head d_head"],
    mixed_cores: Float[Tensor, "kv_head head d_head d_head"],
) -> tuple[Float[Tensor, "head head head"], Float[Tensor, "head head head head"]]:
    """The cubic and the quartic form of `HeadTransports.triangle_forms`, from O, B_yl = V_y V_l^T and C_xl = V_x O_l.

    For every head h, P_hk C_km for all k and m takes (H d_head)^2 numbers: only a few heads are computed at a time.
    """
    (heads, _, d), kv = output.shape, len(mixed_cores)
    groups, all_heads = heads // kv, output.to(torch.float64)
    step = max(1, workspace(output.device) // (32 * (heads * d) ** 2))
    forms = []
    for x in range(kv):
        inner = torch.einsum("ylab,lcb->lyac", value_cores, mixed_cores[x])  # B_yl C_xl^T, for all heads of a group
        for some in all_heads[x * groups : (x + 1) * groups].split(step):
            p = torch.einsum("hda,kdb->hkab", some, all_heads).unflatten(1, (kv, groups))
            outer = torch.einsum("hxnab,xmbc->hxnmac", p, mixed_cores).flatten(1, 2).unflatten(2, (kv, groups))
            cubic = torch.einsum("hymac,lyca->hlym", p, inner).flatten(2)
            forms.append((cubic, torch.einsum("hkymac,lyca->hklym", outer, inner).flatten(3)))
    cubic, quartic = map(torch.cat, zip(*forms, strict=True))
    return cubic, quartic
