"""Refusals at the boundary: what a tensor must be before it becomes an operator."""

import operator

import torch
from torch import Tensor

from cwlib._types import GAUGES
from cwlib.kernels import row_sums

# Rows of a softmax sum to one up to the rounding of their dtype. float64 gets float32's room, because several
# models round the softmax to float32 even when they run in float64.
ROW_SUM_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 1e-2}


def require_dense(name: str, tensor: object, axes: str) -> None:
    """Refuse anything but a dense tensor that holds numbers."""
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"{name}: expected a torch.Tensor ({axes}), got {type(tensor).__name__}; "
            "use torch.from_numpy or torch.as_tensor"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{name}: expected a dense tensor ({axes}), got layout {tensor.layout}; use .to_dense()")
    if tensor.is_meta:
        raise ValueError(
            f"{name}: expected a tensor that holds numbers ({axes}), got one on the meta device; load the weights"
        )


def require_floating(name: str, tensor: object, ndim: int, axes: str) -> None:
    """Refuse anything but a dense floating-point tensor with ``ndim`` axes."""
    require_dense(name, tensor, axes)
    if tensor.dtype not in ROW_SUM_TOLERANCE:
        use = "take .real" if tensor.is_complex() else "use .double()"
        raise ValueError(f"{name}: expected a floating-point tensor of 16 to 64 bits, got {tensor.dtype}; {use}")
    if tensor.ndim != ndim or 0 in tensor.shape:
        raise ValueError(f"{name}: expected a non-empty tensor of shape ({axes}), got shape {tuple(tensor.shape)}")


def require_finite(name: str, tensor: object, ndim: int, axes: str) -> None:
    """Refuse anything but a finite floating-point tensor with ``ndim`` axes."""
    require_floating(name, tensor, ndim, axes)
    # A finite sum has finite terms, and is the fastest pass over a tensor; one that overflows decides nothing.
    if not torch.isfinite(tensor.detach().sum()):
        bad = (~torch.isfinite(tensor.detach())).nonzero()
        if len(bad):
            at = bad[0].tolist()
            raise ValueError(
                f"{name}: expected finite entries, got {tensor[tuple(at)].item()} at {at}, the first of {len(bad)} "
                "that are not; recompute them, in a wider dtype if they overflowed"
            )


def validate_attention(attention: Tensor, absorption: Tensor | None = None) -> None:
    """Refuse attention that is not a finite, nonnegative, row-stochastic (head, dst, src) tensor.

    With a declared ``absorption`` (head, dst), between zero and one, rows sum to one together with it.

    Raises
    ------
    ValueError
        Naming the first offending head and row, what was expected and what to do.
    """
    require_floating("attention", attention, 3, "head, dst, src")
    bound = ROW_SUM_TOLERANCE.get(attention.dtype, 0.0)
    # Sums in the dtype at hand are enough to see that all is well, and see NaN and infinity too: two passes.
    quick = torch.float32 if attention.dtype in (torch.float16, torch.bfloat16) else attention.dtype
    near = ((attention.detach().sum(-1, dtype=quick) - 1).abs() <= bound / 2).all()
    if absorption is None and bound and near & (attention.detach().amin() >= 0):
        return
    require_finite("attention", attention, 3, "head, dst, src")
    if attention.detach().amin() < 0:
        head, dst, src = (attention < 0).nonzero()[0].tolist()
        raise ValueError(
            f"attention: expected nonnegative entries, got {attention[head, dst, src].item():.3g} at head {head}, "
            f"dst {dst}, src {src}; pass the softmax output, not its logits"
        )
    sums = row_sums(attention)
    if absorption is not None:
        require_finite("absorption", absorption, 2, "head, dst")
        absorption = absorption.detach().to(torch.float64)
        if absorption.shape != sums.shape or absorption.min() < 0 or absorption.max() > 1:
            raise ValueError(
                f"absorption: expected shape (head, dst) = {tuple(sums.shape)} with entries in [0, 1], got "
                f"{tuple(absorption.shape)} in [{absorption.min():.3g}, {absorption.max():.3g}]"
            )
        sums = sums + absorption
    worst = (sums - 1).abs()
    if worst.max() > bound:
        head, dst = divmod(int(worst.argmax()), attention.shape[1])
        raise ValueError(
            f"attention: expected rows that sum to one within {bound:.0e}, got {sums[head, dst].item():.6g} at head "
            f"{head}, dst {dst}; axes are (head, dst, src) with the softmax over src: transpose, divide by row sums or "
            "declare the mass that goes to a learned sink as absorption="
        )


def as_integer(given: object) -> int | None:
    """The integer that Python's or numpy's number is; None for anything else, and for booleans."""
    try:
        return None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        return None


def require_token(name: str, given: object, tokens: int) -> int:
    """The index of a token from 0 on, for one that may be counted from the end; refuse any other."""
    index = as_integer(given)
    if index is None or not -tokens <= index < tokens:
        raise ValueError(
            f"{name}: expected an integer, a token index below {tokens} (or from -{tokens}, counted from the end), "
            f"got {given!r}"
        )
    return index % tokens


def require_kind(name: str, given: object, kind: type, remedy: str) -> None:
    """Refuse anything but an object of one class."""
    if not isinstance(given, kind):
        raise ValueError(f"{name}: expected {kind.__name__}, got {type(given).__name__}; {remedy}")


def require_gauge(gauge: str) -> None:
    """Refuse a gauge that is not one of `GAUGES`."""
    if gauge not in GAUGES:
        raise ValueError(f"gauge: expected one of {', '.join(GAUGES)}, got {gauge!r}")
