"""Where the cells of a study are computed: in this process, in several on this machine, or on a Dask cluster."""

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from threading import Thread

import pandas as pd
import torch

from cwlib.architectures import AttentionLayer, attention_layers
from cwlib.catalogue import CATALOGUE, CheckpointError
from cwlib.cells import Cell, evaluate, open_weights, provenance, release_memory
from cwlib.checkpoints import Checkpoint
from cwlib.cores import HeadTransports
from cwlib.quantise import SCHEMES

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
    own = cell.source == "init" or cell.source in SCHEMES
    return (cell.checkpoint, cell.source, cell.seed) if own else (cell.checkpoint, "trained", 0)


def _opened(cell: Cell, device: str) -> _Opened:
    # the name alone may stand for other weights than a moment ago
    key = (*weights_of(cell), cell.sha256, cell.setup, cell.dtype, device)
    if key not in _OPENED:
        _OPENED.clear()  # before the next is read: two large models need not fit
        gc.collect()
        release_memory()
        checkpoint = open_weights(*weights_of(cell), device, cell.dtype)
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


def _start(threads: int) -> None:
    """Begin a worker process: as many threads as its parent, and no life after it, however that ends."""
    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()
    Thread(target=lambda: (wait_for([parent.sentinel]), os._exit(1)), daemon=True).start()


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
            pools = [ProcessPoolExecutor(1, context, _start, (threads,)) for _ in range(workers)]
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
    queue = deque(_shares(ordered) if len(pools) > 1 else [ordered])
    pending: dict[Future, Executor] = {}

    def feed(pool: Executor) -> None:
        pending.update({pool.submit(work, cell, device): pool for cell in (queue.popleft() if queue else ())})

    for pool in pools:
        feed(pool)
    try:
        while pending:
            done = wait(pending, return_when=FIRST_COMPLETED).done
            # a failure last, so that what was done beside it is kept
            for future in sorted(done, key=lambda future: future.exception() is not None):
                pool = pending.pop(future)
                if pool not in pending.values():
                    feed(pool)
                yield future.result()
    except BrokenProcessPool as error:
        raise CheckpointError(
            "workers: a process ended before its cell was done, perhaps for want of memory; what was computed is kept: "
            "run again, with fewer workers"
        ) from error
    finally:
        for future in pending:
            future.cancel()


def _shares(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells by checkpoint, so that no two processes hold the same weights; the costliest first, for an even end."""
    shares: dict[str, list[Cell]] = {}
    for cell in cells:
        shares.setdefault(cell.checkpoint, []).append(cell)
    size = {name: CATALOGUE[name].parameters if name in CATALOGUE else 1 for name in shares}
    return sorted(shares.values(), key=lambda share: -len(share) * size[share[0].checkpoint])
