"""Recompute committed numbers, on this machine, and say which of them are reproduced."""

import hashlib
import random
import warnings
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from cwlib import study
from cwlib.cells import IDENTITY, ROW, plan
from cwlib.corpus import Passage
from cwlib.metrics import METRICS
from cwlib.style import read_manifest
from cwlib.verdicts import derived_tables
from cwlib.workers import results

RELATIVE = 2e-3  #: of the committed value; single precision on another processor moves most metrics by less than 1e-4
ABSOLUTE = 2e-5  #: of the metric's largest value in the table, for values near zero
SPECTRUM = 5e-3  #: likewise, for densities, whose Lanczos nodes amplify rounding
DERIVED = 2e-6  #: of derived tables, which follow from the committed rows; as they are rounded
T2_BOUND = 2e-5  #: residuals are rounding, which no two processors share: they agree if both are below it


@dataclass(frozen=True)
class Verification:
    """What was compared.

    Attributes
    ----------
    rows : pandas.DataFrame
        Recomputed rows: those of the table, with ``committed``, ``recomputed`` and ``agrees``.
    damaged : pandas.DataFrame
        Cells whose committed rows are not those that were written, or not of this version of the metrics.
    parts : pandas.DataFrame
        One line per claim, derived table and figure, and one for the numbers: ``verdict`` is reproduced or differs.
    cells : int
        Number of cells in the study.
    """

    rows: pd.DataFrame
    damaged: pd.DataFrame
    parts: pd.DataFrame
    cells: int

    @property
    def reproduced(self) -> bool:
        """Whether nothing differs."""
        return bool(self.rows["agrees"].all() and self.damaged.empty and (self.parts["verdict"] == "reproduced").all())

    def report(self) -> str:
        """A table of parts, then the rows that differ, the worst first."""
        looked = self.rows[IDENTITY].drop_duplicates()
        differing = self.rows[~self.rows["agrees"]]
        lines = [
            f"{len(self.rows)} rows of {len(looked)} of {self.cells} cells recomputed, {len(differing)} differ",
            self.parts.to_string(index=False),
        ]
        if len(self.damaged):
            lines.append("cells that are damaged or not current (`make study` computes them anew):")
            lines.append(self.damaged.to_string(index=False))
        if len(differing):
            size = differing["committed"].abs() + differing["recomputed"].abs()
            gap = ((differing["committed"] - differing["recomputed"]).abs() / size).fillna(float("inf"))
            worst = differing.assign(gap=gap).sort_values("gap", ascending=False).drop(columns=["gap", "agrees"])
            lines += ["rows that differ (at most 20):", worst.head(20).to_string(index=False)]
        return "\n\n".join(lines)


def verify(
    folder: str | Path,
    profile: str = "wheels",
    full: bool = False,
    seed: int = 0,
    device: str = "cpu",
    texts: tuple[Passage, ...] | None = None,
) -> Verification:
    """Recompute cells of a committed study and compare every row of them.

    Parameters
    ----------
    folder : path
        Holds study.csv and cells.csv; derived tables, and the figures in the folder above, are compared if they exist.
    profile : str
        Of `cwlib.study.PROFILES`.
    full : bool
        All cells; by default a sample of one cell on a text and one of the weights alone per checkpoint, and every
        cell whose rows are not those that its line of cells.csv speaks of.
    seed : int
        Of the sample.
    device : str
        As in `cwlib.open_checkpoint`.
    texts : tuple of Passage, optional
        The corpus that was measured; the built-in one by default.

    Raises
    ------
    ValueError
        If there is no study, the profile is unknown, or a file is damaged.
    """
    folder = Path(folder)
    found = study.committed(folder)
    if not isinstance(profile, str) or profile not in study.PROFILES:
        raise ValueError(f"profile: expected one of {', '.join(study.PROFILES)}, got {profile!r}")
    if found is None:
        raise ValueError(f"folder: expected study.csv and cells.csv in {folder}, found none; run the study first")
    table, origin = found
    names, control = study.PROFILES[profile]
    planned = plan(names, study.corpus_of(profile) if texts is None else texts, control)
    whole = dict(zip(origin["key"], origin["whole"], strict=True))
    missing = [cell for cell in planned if not whole.get(cell.key, False)]
    chosen = {cell.key: cell for cell in (planned if full else missing)}
    if not full:
        draw = random.Random(seed)
        for name in sorted({cell.checkpoint for cell in planned}):
            mine = [c for c in planned if c.checkpoint == name]
            for cells in ([c for c in mine if c.passage is not None], [c for c in mine if c.passage is None]):
                cell = draw.choice(cells)
                chosen[cell.key] = cell
    parts = []
    for cell, rows, _ in tqdm(results(list(chosen.values()), device, ()), total=len(chosen), unit="cell"):
        identity = [cell.checkpoint, cell.source, cell.seed, cell.passage_name]
        mine = (table[IDENTITY] == identity).all(axis=1)
        parts.append(table[mine].merge(rows, on=ROW, how="outer", suffixes=("", " again")))
    rows = pd.concat(parts).rename(columns={"value": "committed", "value again": "recomputed"})
    names = [(c.checkpoint, c.source, c.seed, c.passage_name) for c in missing]
    damaged = pd.DataFrame(names, columns=IDENTITY)
    rows = rows.assign(agrees=_agree(rows, table, damaged))
    strangers = sorted(set(table["checkpoint"]) - {cell.checkpoint for cell in planned})
    return Verification(rows, damaged, _parts(folder, rows, strangers), len(planned))


def _agree(rows: pd.DataFrame, table: pd.DataFrame, damaged: pd.DataFrame) -> pd.Series:
    size = table.assign(value=table["value"].abs()).groupby("metric")["value"].max()
    spectra = {name for name, metric in METRICS.items() if metric.about == "spectrum"}
    share = {name: SPECTRUM if name in spectra else ABSOLUTE for name in size.index}
    near_zero = rows["metric"].map(size) * rows["metric"].map(share)
    # In a cell that was tampered with, small numbers are no excuse.
    suspect = rows[IDENTITY].merge(damaged, how="left", indicator=True)["_merge"].eq("both").to_numpy()
    bound = RELATIVE * rows["committed"].abs() + near_zero.where(~suspect, 0.0)
    close = (rows["committed"] - rows["recomputed"]).abs() <= bound  # False where either is missing
    rounding = (rows["committed"] <= T2_BOUND) & (rows["recomputed"] <= T2_BOUND)
    return close.where(rows["metric"] != "t2_residual", rounding)


def _parts(folder: Path, rows: pd.DataFrame, strangers: list[str]) -> pd.DataFrame:
    """Claims and tables: they follow from the rows, which were reproduced. Figures: those of the manifest.

    Derived tables are looked at if there is any of them; strangers are checkpoints that the profile does not have, and
    that cannot be checked.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of altered rows, which are reported here
        tables = derived_tables(folder)
    lines = [(f"checkpoint {name}", False) for name in strangers]
    if any((folder / f"{name}.csv").exists() for name in tables):
        for name, frame in tables.items():
            again, committed = pd.read_csv(StringIO(frame.to_csv(index=False))), _written(folder / f"{name}.csv")
            if name != "evidence":
                lines.append((f"{name}.csv", _same(committed, again)))
                continue
            for claim, evidence in again.groupby("claim"):
                mine = committed[committed["claim"] == claim] if "claim" in committed else committed
                recomputed = rows[rows["metric"].isin(evidence["metric"])]["agrees"]
                lines.append((claim, len(recomputed) > 0 and recomputed.all() and _same(mine, evidence)))
    figures = folder.parent
    for name, entry in read_manifest(figures).items():
        lines.append((name, all(_sha256(figures / file) == sha for file, sha in entry["sha256"].items())))
    lines.append(("numbers", rows["agrees"].all()))
    verdicts = [(name, "reproduced" if same else "differs") for name, same in lines]
    return pd.DataFrame(verdicts, columns=["claim, table or figure", "verdict"])


def _written(path: Path) -> pd.DataFrame:
    """A derived table as committed; empty if it is missing or cannot be read, and so the same as nothing."""
    try:
        return pd.read_csv(path)
    except (OSError, ValueError):
        return pd.DataFrame()


def _same(committed: pd.DataFrame, again: pd.DataFrame) -> bool:
    try:
        options = {"check_dtype": False, "rtol": DERIVED, "atol": DERIVED}
        pd.testing.assert_frame_equal(committed.reset_index(drop=True), again.reset_index(drop=True), **options)
    except AssertionError:
        return False
    return True


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
