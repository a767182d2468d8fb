"""The atlas: systems of the literature placed as connection walks, with the properties of each as numbers.

Every entry runs a system from its defining equation in NumPy, reads (W, Omega) off it in torch, and compares the two.
"""

import pandas as pd

from cwlib import (  # noqa: F401  (they enter SYSTEMS)
    atlas_attention,
    atlas_dynamics,
    atlas_energies,
    atlas_geometry,
    atlas_graphs,
    atlas_kernels,
    atlas_positions,
    atlas_recurrent,
    atlas_sheaves,
    atlas_signed,
    atlas_values,
)
from cwlib.atlas_pair import CONDITIONS, ROUNDING, SYSTEMS, Pair, Placed, defects, ranks
from cwlib.checks import Check


def place(name: str, seed: int = 0) -> Placed:
    """A system of the atlas on an instance of its own.

    Raises
    ------
    ValueError
        If there is no such system, or the seed is no nonnegative integer.
    """
    if not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: expected an integer, at least 0, got {seed!r}")
    if not isinstance(name, str) or name not in SYSTEMS:
        raise ValueError(f"name: expected one of {', '.join(SYSTEMS)}, got {name!r}")
    return SYSTEMS[name].place(seed)


def table(seed: int = 0) -> pd.DataFrame:
    """Every system: residual between it and the walk it induces, defects of the conditions, ranks, and a verdict.

    Returns
    -------
    pandas.DataFrame
        Indexed by ``system``; columns ``paper``, ``walk``, ``transport``, ``residual``, the `CONDITIONS`,
        ``walk_rank``, ``transport_rank``, ``schmidt_rank``, ``verdict`` and ``remark``.
    """
    rows = []
    for entry in SYSTEMS.values():
        placed = entry.place(seed)
        measured = defects(placed.pair)
        failing = [name for name in ("nonnegative", "stochastic") if measured[name] > ROUNDING]
        verdict = " and ".join(f"not {name}" for name in failing) or "stochastic walk"
        row = {"system": entry.name, "paper": entry.paper, "walk": entry.walk, "transport": entry.transport}
        row |= {"residual": placed.residual} | measured | ranks(placed.pair)
        rows.append(row | {"verdict": verdict, "remark": entry.remark})
    return pd.DataFrame(rows).set_index("system")


def checks(seed: int = 0) -> list[Check]:
    """What every system shows beyond its residual, as Checks."""
    return [check for entry in SYSTEMS.values() for check in entry.place(seed).checks]


__all__ = ["CONDITIONS", "ROUNDING", "SYSTEMS", "Pair", "checks", "defects", "place", "ranks", "table"]
