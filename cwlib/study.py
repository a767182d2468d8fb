"""The study: checkpoint x passage x layer x metric, trained weights beside nulls, as one tidy table.

The unit of work is a *cell*: one passage (or the weights alone) under one set of weights. A cell is content-addressed:
its key hashes the checkpoint's sha256, the passage, the source and seed of the weights, the dtype, and the name and
version of every metric. A finished cell is stored at once, so an interrupted run loses at most the cell it was in, and
a rerun computes only what is missing.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from cwlib.capture import checkpoint_layers, layers
from cwlib.catalogue import CATALOGUE, cache_dir
from cwlib.checkpoints import Checkpoint, initialise, open_checkpoint, tiny_checkpoint
from cwlib.cores import HeadTransports
from cwlib.corpus import Passage, passages
from cwlib.metrics import METRICS, TRIANGLES, Layer
from cwlib.synthetic import gaussian_transports
from cwlib.walk import ConnectionWalk

WEIGHTS = "-"  #: in the passage column: the row depends on weights only
INIT_SEEDS = (0, 1, 2)  #: seeds of the random-initialisation null
GAUSSIAN_SEEDS = (0,)
NULL_PASSAGES = 4  #: passages on which nulls are measured, spread evenly over the corpus
EXACTNESS_PASSAGES = 4  #: likewise for checkpoints of which only the T2 residual is measured
ROW = ["checkpoint", "source", "seed", "passage", "layer", "metric", "gauge"]

PROFILES = {
    # name -> checkpoints measured in full, checkpoints of which only T2 is checked
    "smoke": (("tiny-bert", "tiny-llama"), ("tiny-gpt2",)),
    "wheels": (
        ("minilm-l6", "mpnet-base", "smollm2-135m", "gemma3-270m"),
        ("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"),
    ),
}


@dataclass(frozen=True)
class Cell:
    """One unit of work: some metrics of every layer, for one set of weights on one passage."""

    checkpoint: str
    sha256: str
    source: str  # "trained", "gaussian" or "init"
    seed: int
    passage: Passage | None  # None: weights only
    metrics: tuple[str, ...]
    dtype: str = "float32"

    @property
    def passage_name(self) -> str:
        """The passage column of this cell's rows."""
        return WEIGHTS if self.passage is None else self.passage.name

    @property
    def key(self) -> str:
        """Content address: changes whenever a number in the cell could."""
        content = [
            self.sha256,
            self.source,
            self.seed,
            None if self.passage is None else self.passage.sha256,
            self.dtype,
            [(name, METRICS[name].version) for name in self.metrics],
            TRIANGLES,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


@dataclass(frozen=True, eq=False)
class _NullLayer:
    """A captured layer whose transports are replaced by Gaussian ones of the same shape."""

    walk: ConnectionWalk
    field: torch.Tensor
    previous: "_NullLayer | None"


def _open(name: str, device: str, dtype: str) -> Checkpoint:
    if name.startswith("tiny-"):
        return tiny_checkpoint(name.removeprefix("tiny-"), dtype=dtype)
    return open_checkpoint(name, device=device, dtype=dtype)


def _sha256(name: str, device: str, dtype: str) -> str:
    # Catalogue entries are addressed without opening them, so that a current table needs no download.
    return CATALOGUE[name].sha256 if name in CATALOGUE else _open(name, device, dtype).sha256


def _spread(items: Sequence[Passage], count: int) -> list[Passage]:
    if len(items) <= count:
        return list(items)
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]


def plan(
    full: Iterable[str], exactness: Iterable[str] = (), texts: Sequence[Passage] = (), device: str = "auto"
) -> list[Cell]:
    """The cells of a study.

    Parameters
    ----------
    full : iterable of str
        Checkpoints measured in full: all metrics on all passages, and both nulls on `NULL_PASSAGES` of them.
    exactness : iterable of str
        Checkpoints of which only the T2 residual is measured.
    texts : sequence of Passage
        The corpus.
    device : str
        Where a checkpoint that is not in the catalogue is opened to find its sha256.
    """
    on_weights = tuple(m.name for m in METRICS.values() if m.weights_only)
    on_text = tuple(m.name for m in METRICS.values() if not m.weights_only)
    null_texts = _spread(texts, NULL_PASSAGES)
    cells = []
    for name in full:
        sha = _sha256(name, device, "float32")
        variants = [("trained", 0, texts, on_text)]
        nulls = tuple(n for n in on_text if n != "t2_residual")
        variants += [("gaussian", seed, null_texts, nulls) for seed in GAUSSIAN_SEEDS]
        variants += [("init", seed, null_texts, nulls) for seed in INIT_SEEDS]
        for source, seed, chosen, names in variants:
            cells.append(Cell(name, sha, source, seed, None, on_weights))
            cells += [Cell(name, sha, source, seed, passage, names) for passage in chosen]
    for name in exactness:
        sha = _sha256(name, device, "float32")
        chosen = _spread(texts, EXACTNESS_PASSAGES)
        cells += [Cell(name, sha, "trained", 0, passage, ("t2_residual",)) for passage in chosen]
    return cells


def _measured(cell: Cell, checkpoint: Checkpoint, gaussians: dict[int, HeadTransports]) -> Iterator[tuple[int, Layer]]:
    """The layers of a cell as something `METRICS` can be computed on."""

    def gaussian(index: int, like: HeadTransports) -> HeadTransports:
        if index not in gaussians:
            gaussians[index] = gaussian_transports(like, seed=1000 * cell.seed + index)
        return gaussians[index]

    if cell.passage is None:
        for entry in checkpoint_layers(checkpoint):
            transports = entry.transports
            if cell.source == "gaussian":
                transports = gaussian(entry.index, transports)
            nothing = torch.ones(transports.heads, 1, 1, dtype=torch.float64)  # weights only: any attention will do
            walk = ConnectionWalk.from_transports(nothing, transports)
            yield entry.index, _NullLayer(walk, torch.empty(0, transports.d_model), None)
        return
    previous = None
    for layer in layers(checkpoint, cell.passage.text):
        if cell.source == "gaussian":
            transports = gaussian(layer.index, layer.walk.transports)
            walk = ConnectionWalk.from_transports(layer.walk.attention, transports)
            # The step from the last layer needs that layer, but not the one before it.
            before = previous and _NullLayer(previous.walk, previous.field, None)
            previous = _NullLayer(walk, layer.field, before)
            yield layer.index, previous
        else:
            yield layer.index, layer


def evaluate(cell: Cell, checkpoint: Checkpoint, gaussians: dict[int, HeadTransports] | None = None) -> pd.DataFrame:
    """Compute one cell: a row per layer, metric and gauge; undefined values are left out.

    Parameters
    ----------
    cell : Cell
        What to compute.
    checkpoint : Checkpoint
        The weights, trained or initialised, that ``cell`` names.
    gaussians : dict, optional
        Gaussian transports by layer, kept between cells so that their cores are computed once.
    """
    gaussians = {} if gaussians is None else gaussians
    rows = []
    for index, layer in _measured(cell, checkpoint, gaussians):
        for name in cell.metrics:
            metric = METRICS[name]
            gauges = ("mean", "norm") if metric.about == "graph" else ("",)
            for gauge in gauges:
                if cell.source == "gaussian" and gauge == "mean":
                    continue  # the null keeps the attention: the same number as the trained row
                value = metric.compute(layer, gauge or "mean")
                if not np.isnan(value):
                    rows.append((index, name, gauge, value))
    table = pd.DataFrame(rows, columns=["layer", "metric", "gauge", "value"])
    head = {"checkpoint": cell.checkpoint, "source": cell.source, "seed": cell.seed, "passage": cell.passage_name}
    return table.assign(**head)[[*ROW, "value"]]


def _provenance(cell: Cell, checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "checkpoint": cell.checkpoint,
        "kind": checkpoint.kind,
        "source": cell.source,
        "seed": cell.seed,
        "passage": cell.passage_name,
        "key": cell.key,
        "sha256": cell.sha256,
        "parameters": checkpoint.parameters,
        "stored_as": checkpoint.precision,
        "dtype": cell.dtype,
        "device": checkpoint.device,
        "threads": torch.get_num_threads(),
        "torch": version("torch").partition("+")[0],
        "transformers": version("transformers"),
    }


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name in the same folder, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _committed(folder: Path | None) -> tuple[pd.DataFrame, pd.DataFrame] | None:
    """The rows and cells of an earlier run in ``folder``; None if there are none."""
    if folder is None or not (folder / "study.csv").exists() or not (folder / "cells.csv").exists():
        return None
    return (
        pd.read_csv(folder / "study.csv", keep_default_na=False, na_values={"value": [""]}),
        pd.read_csv(folder / "cells.csv", keep_default_na=False),
    )


def run(
    profile: str | Sequence[str] = "wheels",
    folder: str | Path | None = None,
    texts: Sequence[Passage] | None = None,
    fresh: bool = False,
    device: str = "auto",
    progress: bool = True,
) -> pd.DataFrame:
    """Run a study, or find it current.

    Parameters
    ----------
    profile : "smoke", "wheels" or sequence of str
        A profile, or checkpoints of your own: catalogue names, folders, .gguf files or hub ids. ``smoke`` takes tiny
        random models, in seconds; ``wheels`` takes real checkpoints from the package index.
    folder : path, optional
        Where ``study.csv`` (the rows), ``cells.csv`` (where each came from) and ``glossary.csv`` are kept. Rows found
        there are reused when their cell's key is current. By default rows are kept only in the cache.
    texts : sequence of Passage, optional
        The built-in corpus by default; `cwlib.corpus.read_passages` reads your own.
    fresh : bool
        Recompute every cell.
    device : str
        As in `cwlib.open_checkpoint`.
    progress : bool
        Show a bar with the time left.

    Returns
    -------
    pandas.DataFrame
        Columns checkpoint, source, seed, passage, layer, metric, gauge, value; sorted.

    Raises
    ------
    ValueError
        If the profile is unknown.
    cwlib.CheckpointError
        If a checkpoint cannot be had. Cells already computed are kept.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise ValueError(
                f"profile: expected one of {', '.join(PROFILES)} or a list of checkpoints, got {profile!r}; "
                f"for one checkpoint write [{profile!r}]"
            )
        full, exactness = PROFILES[profile]
    else:
        full, exactness = tuple(profile), ()
    texts = passages() if texts is None else tuple(texts)
    folder = None if folder is None else Path(folder)
    work = cache_dir() / "study"
    cells = plan(full, exactness, texts, device)

    earlier = None if fresh else _committed(folder)
    known = set() if earlier is None else set(earlier[1]["key"])
    missing = [c for c in cells if c.key not in known and (fresh or not (work / f"{c.key}.parquet").exists())]
    _compute(missing, work, device, progress)

    tables, origins = [], []
    if earlier is not None:
        wanted = {c.key for c in cells}
        kept = earlier[1][earlier[1]["key"].isin(wanted)]
        identity = ["checkpoint", "source", "seed", "passage"]
        tables.append(earlier[0].merge(kept[identity], on=identity))
        origins.append(kept)
    for cell in cells:
        if cell.key not in known:
            tables.append(pd.read_parquet(work / f"{cell.key}.parquet"))
            origins.append(pd.DataFrame([json.loads((work / f"{cell.key}.json").read_text())]))
    table = pd.concat(tables).sort_values(ROW, ignore_index=True)
    if folder is not None:
        origin = pd.concat(origins).sort_values(["checkpoint", "source", "seed", "passage"], ignore_index=True)
        _write(folder / "study.csv", lambda p: table.to_csv(p, index=False, float_format="%.6g"))
        _write(folder / "cells.csv", lambda p: origin.to_csv(p, index=False))
        _write(folder / "glossary.csv", lambda p: glossary().to_csv(p, index=False))
    return table


def _compute(missing: Sequence[Cell], work: Path, device: str, progress: bool) -> None:
    """Compute cells, opening each set of weights once, and store each as soon as it is done."""

    def weights(cell: Cell) -> tuple[str, str, int]:
        # The Gaussian null replaces transports only; it runs on the trained model.
        return (
            cell.checkpoint,
            "init" if cell.source == "init" else "trained",
            cell.seed if cell.source == "init" else 0,
        )

    with tqdm(total=len(missing), unit="cell", disable=not progress or not missing) as bar:
        for (name, source, seed), group in groupby(sorted(missing, key=weights), key=weights):
            bar.set_description(f"{name} {source}")
            checkpoint = _open(name, device, "float32")
            if source == "init":
                checkpoint = initialise(checkpoint, seed, device=device)
            gaussians: dict[tuple[str, int], dict] = {}
            for cell in group:
                rows = evaluate(cell, checkpoint, gaussians.setdefault((cell.source, cell.seed), {}))
                origin = json.dumps(_provenance(cell, checkpoint))
                _write(work / f"{cell.key}.json", lambda p, text=origin: p.write_text(text))
                # Last, for its presence marks the cell as done.
                _write(work / f"{cell.key}.parquet", lambda p, frame=rows: frame.to_parquet(p, index=False))
                bar.update()


def load(folder: str | Path) -> pd.DataFrame:
    """Read a study's table, with each checkpoint's ``kind`` and the relative ``depth`` (0 first, 1 last) beside it.

    Raises
    ------
    ValueError
        If the folder holds no study.
    """
    found = _committed(Path(folder))
    if found is None:
        raise ValueError(f"folder: expected study.csv and cells.csv in {folder}, found none; run cwlib.study.run first")
    table, cells = found
    table["kind"] = table["checkpoint"].map(dict(zip(cells["checkpoint"], cells["kind"], strict=True)))
    last = table.groupby("checkpoint")["layer"].transform("max")
    return table.assign(depth=table["layer"] / last.clip(lower=1))


def glossary() -> pd.DataFrame:
    """What every column and every metric means."""
    columns = [
        ("checkpoint", "column", "", "catalogue name, folder or hub id"),
        (
            "source",
            "column",
            "",
            "trained; gaussian: O_h, V_h replaced by N(0, 1) entries; init: random initialisation",
        ),
        ("seed", "column", "", "seed of a null; 0 for trained weights"),
        ("passage", "column", "", f"text of the corpus; {WEIGHTS}: the value depends on weights only"),
        ("layer", "column", "", "attention layer from 0; a step is filed under the later of its two layers"),
        (
            "gauge",
            "column",
            "",
            "token walk looked at: mean (what attends) or norm (what flows); empty: does not matter",
        ),
    ]
    metrics = [(m.name, m.about, m.range, m.description) for m in METRICS.values()]
    return pd.DataFrame(columns + metrics, columns=["name", "about", "range", "meaning"])
