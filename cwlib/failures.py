"""Checkpoints of a study that fail: each is told once, the others go on, and all is told again at the end."""

import sys

import pandas as pd
from tqdm import tqdm

from cwlib.catalogue import CheckpointError


class Incomplete(CheckpointError):
    """Some checkpoints of a study could not be measured; the others are in the tables.

    Attributes
    ----------
    failed : dict of str to Exception
        By the name of the checkpoint.
    table : pandas.DataFrame
        What `run` returns, of the others.
    """

    def __init__(self, failed: dict[str, Exception], table: pd.DataFrame) -> None:
        self.failed, self.table = failed, table
        named: dict[str, list[str]] = {}  # what holds for many is said once
        for name, error in failed.items():
            named.setdefault(_reason(name, error), []).append(name)
        lines = [f"  - {', '.join(names)}: {reason}" for reason, names in named.items()]
        asked = len(failed) + table["checkpoint"].nunique()
        others = "" if table.empty else "the others are in the tables, "
        super().__init__(
            f"{len(failed)} of {asked} checkpoints could not be measured; {others}"
            "what was computed is kept, and the same again goes on from there:\n" + "\n".join(lines)
        )


def _reason(name: str, error: Exception) -> str:
    kind = "" if isinstance(error, CheckpointError | ValueError | OSError) else f"{type(error).__name__}: "
    return kind + str(error).removeprefix("checkpoint ").removeprefix(name).removeprefix(": ").removeprefix(", ")


class Failures(dict[str, Exception]):
    """The first error of each checkpoint; each reason is told when it comes up first."""

    def __init__(self, tell: bool) -> None:
        super().__init__()
        self.tell = tell

    def alone(self) -> Exception:
        """The error of the only checkpoint, as one that says which; raise it."""
        ((name, error),) = self.items()
        if isinstance(error, CheckpointError | ValueError | OSError):
            return error
        found = CheckpointError(f"{name}: {_reason(name, error)}")
        found.__cause__ = error
        return found

    def __setitem__(self, name: str, error: Exception) -> None:
        reason = _reason(name, error)
        if self.tell and reason not in (_reason(*other) for other in self.items()):
            tqdm.write(f"cwlib: {name} is left out: {reason}", file=sys.stderr)
        super().__setitem__(name, error)
