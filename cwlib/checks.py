"""Numerical checks: a name, what is compared, how far apart it is, and how far apart it may be."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def tolerance(dtype: torch.dtype) -> float:
    """Relative tolerance of an identity whose inputs were rounded to ``dtype``.

    Parameters
    ----------
    dtype : torch.dtype
        One of float64, float32, float16, bfloat16.

    Returns
    -------
    float
        About 10^3 to 10^4 machine epsilons for float64 and 10^2 for float32: room for sums over a few
        thousand terms; five to ten epsilons for the 16-bit types, whose products are accumulated in float32.

    Raises
    ------
    ValueError
        If ``dtype`` is not one of the four.
    """
    if dtype not in TOLERANCE:
        known = ", ".join(str(d).removeprefix("torch.") for d in TOLERANCE)
        raise ValueError(f"dtype: expected one of {known}, got {dtype}; cast the tensor first")
    return TOLERANCE[dtype]


def relative_residual(lhs: Tensor, rhs: Tensor) -> float:
    r"""Relative Frobenius distance :math:`|lhs - rhs|_F / \max(|lhs|_F, |rhs|_F)`, accumulated in float64.

    Zero when both sides vanish. The result lies in [0, 2] and is NaN if either side holds a NaN.

    Raises
    ------
    ValueError
        If the shapes differ: broadcasting would hide a mistake.
    """
    if lhs.shape != rhs.shape:
        raise ValueError(f"lhs and rhs: expected equal shapes, got {tuple(lhs.shape)} and {tuple(rhs.shape)}")
    left, right = lhs.to(torch.float64), rhs.to(torch.float64)
    scale = torch.maximum(torch.linalg.vector_norm(left), torch.linalg.vector_norm(right))
    distance = torch.linalg.vector_norm(left - right)
    return 0.0 if scale == 0 else float(distance / scale)


@dataclass(frozen=True)
class Check:
    """One comparison of two sides of an identity.

    Attributes
    ----------
    name : str
        The statement checked, with its theorem ID.
    lhs, rhs : str
        The two expressions compared, as a reader would write them.
    residual : float
        Their distance (relative unless the name says otherwise).
    tolerance : float
        The bound: an upper one for an identity, a lower one for a counterexample.
    holds : bool
        True if the identity should hold (residual <= tolerance); False for a case that breaks a hypothesis, where
        the conclusion must fail visibly (residual >= tolerance).
    """

    name: str
    lhs: str
    rhs: str
    residual: float
    tolerance: float
    holds: bool = True

    @property
    def passed(self) -> bool:
        """Whether the residual is on the right side of the tolerance; a NaN never passes."""
        return self.residual <= self.tolerance if self.holds else self.residual >= self.tolerance


def compare(
    name: str, lhs: tuple[str, Tensor], rhs: tuple[str, Tensor], bound: float | None = None, holds: bool = True
) -> Check:
    """Check that two labelled tensors agree (or, with ``holds=False``, that they visibly do not).

    Parameters
    ----------
    name : str
        The statement checked.
    lhs, rhs : tuple of (str, Tensor)
        Label and value of each side; equal shapes.
    bound : float, optional
        The tolerance; by default that of the less precise of the two dtypes for an identity, 1e-2 for a
        counterexample.
    holds : bool
        See `Check`.
    """
    if bound is None:
        bound = max(tolerance(lhs[1].dtype), tolerance(rhs[1].dtype)) if holds else 1e-2
    return Check(name, lhs[0], rhs[0], relative_residual(lhs[1], rhs[1]), bound, holds)


def check_table(checks: Iterable[Check]) -> pd.DataFrame:
    """Summarise checks as a table with one line per name.

    Repeated checks of one name (other seeds, sizes, dtypes) are folded into their number and their worst
    residual: the largest for an identity, the smallest for a counterexample. An identity that holds is
    shown by its bound, since the digits below it are the processor's; a failure or a counterexample by two digits.

    Returns
    -------
    pandas.DataFrame
        Columns ``instances``, ``compares``, ``residual``, ``bound``, ``passed``, indexed by ``check``.

    Raises
    ------
    ValueError
        If there is nothing to tabulate.
    """
    groups: dict[tuple[str, str, str, bool], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.name, check.lhs, check.rhs, check.holds), []).append(check)
    if not groups:
        raise ValueError("checks: expected at least one Check, got none")
    rows = []
    for (name, lhs, rhs, holds), members in groups.items():
        bound = max(c.tolerance for c in members) if holds else min(c.tolerance for c in members)
        passed = all(c.passed for c in members)
        # numpy's extremes carry a NaN through, wherever it stands
        worst = (np.max if holds else np.min)([c.residual for c in members])
        # An identity is summarised by its bound unless it fails: digits below it are the processor's.
        shown = f"<= {bound:.0e}" if holds and passed else f"{worst:.1e}"
        rows.append(
            {
                "check": name,
                "instances": len(members),
                "compares": f"{lhs} {'=' if holds else '!='} {rhs}",
                "residual": shown,
                "bound": f"{'<=' if holds else '>='} {bound:.0e}",
                "passed": passed,
            }
        )
    return pd.DataFrame(rows).set_index("check")
