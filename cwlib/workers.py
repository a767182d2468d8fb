"""Where the cells of a study are computed: in this process, in several on this machine, or on a Dask cluster."""

import gc
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pandas as pd
import torch

from cwlib.architectures import AttentionLayer, attention_layers
from cwlib.cells import Cell, evaluate, open_weights, provenance
from cwlib.checkpoints import Checkpoint, initialise
from cwlib.cores import HeadTransports

Result = tuple[Cell, pd.DataFrame, dict[str, object]]


@dataclass(frozen=True)
class _Opened:
    """A set of weights in memory, and what cells of it share."""

    checkpoint: Checkpoint
    found: Sequence[AttentionLayer]
    gaussians: dict[int, dict[int, HeadTransports]] = field(default_factory=dict)


_OPENED: dict[tuple, _Opened] = {}  # of this process: the last set of weights


def weights_of(cell: Cell) -> tuple[str, str, int]:
    """Which weights must be in memory; the nulls that change a layer run on the trained model."""
    return (cell.checkpoint, "init", cell.seed) if cell.source == "init" else (cell.checkpoint, "trained", 0)


def _opened(cell: Cell, device: str) -> _Opened:
    # the name alone may stand for other weights than a moment ago
    key = (*weights_of(cell), cell.sha256, cell.setup, cell.dtype, device)
    if key not in _OPENED:
        _OPENED.clear()  # before the next is read: two large models need not fit
        gc.collect()
        checkpoint = open_weights(cell.checkpoint, device, cell.dtype)
        if cell.source == "init":
            checkpoint = initialise(checkpoint, cell.seed, device=device)
        _OPENED[key] = _Opened(checkpoint, attention_layers(checkpoint.model))
    return _OPENED[key]


def work(cell: Cell, device: str) -> Result:
    """Compute one cell in this process.

    Raises
    ------
    ValueError
        Naming the checkpoint and the passage, if the cell cannot be computed.
    cwlib.CheckpointError
        If the checkpoint cannot be had.
    """
    try:
        opened = _opened(cell, device)
        gaussians = opened.gaussians.setdefault(cell.seed, {})
        rows = evaluate(cell, opened.checkpoint, gaussians, opened.found)
    except ValueError as error:
        where = "" if cell.passage is None else f", passage {cell.passage_name}"
        raise ValueError(f"checkpoint {cell.checkpoint}{where}: {error}") from error
    return cell, rows, provenance(cell, opened.checkpoint)


@contextmanager
def executors(workers: int, scheduler: str | None) -> Iterator[list[Executor]]:
    """Executors for `results`: none for this process, one per worker, or one that speaks for a Dask cluster.

    Parameters
    ----------
    workers : int
        Processes on this machine. Each takes whole checkpoints, so that no two hold the same weights.
    scheduler : str, optional
        Address of a Dask scheduler, such as tcp://host:8786; it finds another worker for a cell whose worker dies.

    Raises
    ------
    ValueError
        If ``workers`` is not a positive integer, or Dask is not installed.
    """
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers: expected a positive number of processes, got {workers!r}")
    with ExitStack() as stack:
        if scheduler is not None:
            yield [stack.enter_context(_cluster(scheduler))]
        elif workers == 1:
            yield []
        else:
            context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
            pools = [ProcessPoolExecutor(1, context, torch.set_num_threads, (threads,)) for _ in range(workers)]
            for pool in pools:
                stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            yield pools


@contextmanager
def _cluster(scheduler: str) -> Iterator[Executor]:
    try:
        from dask.distributed import Client
    except ImportError as error:
        raise ValueError("scheduler: Dask is not installed here; pip install 'cwlib[distributed]'") from error
    try:
        client = Client(scheduler, timeout="10s")
    except (OSError, TimeoutError, ValueError) as error:
        raise ValueError(
            f"scheduler: expected the address of a running Dask scheduler, such as tcp://127.0.0.1:8786, got "
            f"{scheduler!r} ({error})"
        ) from error
    with client:
        yield client.get_executor(pure=False)


def results(cells: Sequence[Cell], device: str, pools: Sequence[Executor]) -> Iterator[Result]:
    """Compute cells and yield each as soon as it is done; weights are opened once per process where possible."""
    ordered = sorted(cells, key=weights_of)
    if not pools:
        try:
            for cell in ordered:
                yield work(cell, device)
        finally:
            _OPENED.clear()
        return
    pool = _share_out(ordered, pools)
    futures = [pool[cell.checkpoint].submit(work, cell, device) for cell in ordered]
    try:
        for future in as_completed(futures):
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def _share_out(cells: Iterable[Cell], pools: Sequence[Executor]) -> dict[str, Executor]:
    """An executor for each checkpoint: the one with most cells first, always to the one that has least to do."""
    counts = pd.Series([cell.checkpoint for cell in cells]).value_counts()
    load, share = [0] * len(pools), {}
    for checkpoint, count in counts.items():
        least = load.index(min(load))
        share[checkpoint] = pools[least]
        load[least] += count
    return share
