"""Where the cells of a study are computed: in this process, in several on this machine, or on a Dask cluster."""

import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from threading import Thread
from typing import Literal

import pandas as pd
import torch

from cwlib.architectures import AttentionLayer, attention_layers
from cwlib.catalogue import CheckpointError
from cwlib.cells import Cell, evaluate, open_weights, provenance, release_memory
from cwlib.checkpoints import Checkpoint
from cwlib.cores import HeadTransports
from cwlib.hub import known
from cwlib.placement import share
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


def _opened(cell: Cell, device: str, offload: bool | Literal["auto"]) -> _Opened:
    # the name alone may stand for other weights than a moment ago
    key = (*weights_of(cell), cell.sha256, cell.setup, cell.dtype, device)
    if key not in _OPENED or offload is True:
        _forget()  # before the next is read: two large models need not fit
        checkpoint = open_weights(*weights_of(cell), device, cell.dtype, offload, cell.tokens)
        _OPENED[key] = _Opened(checkpoint, attention_layers(checkpoint.model))
    return _OPENED[key]


def _forget() -> None:
    _OPENED.clear()
    gc.collect()
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def work(cell: Cell, device: str) -> Result:
    """Compute one cell in this process; a model that turns out not to fit into memory is offloaded and tried again.

    Raises
    ------
    ValueError
        Naming the checkpoint and the passage, if the cell cannot be computed.
    cwlib.CheckpointError
        If the checkpoint cannot be had, or there is too little memory for it in any case.
    """
    try:
        try:
            return _computed(cell, device, "auto")
        except (RuntimeError, MemoryError) as error:
            if not _is_for_want_of_memory(error):
                raise
        # here, since the error held what it happened in
        try:
            return _computed(cell, device, True)
        except (RuntimeError, MemoryError) as error:
            if not _is_for_want_of_memory(error):
                raise
            raise CheckpointError(
                f"{cell.checkpoint}: out of memory, even with its weights in their files ({error}): end what else uses "
                "the device, take shorter texts or a device with more memory (--device cpu), or fewer workers"
            ) from None
    except ValueError as error:
        where = "" if cell.passage is None else f", passage {cell.passage_name}"
        raise ValueError(f"checkpoint {cell.checkpoint}{where}: {error}") from error


def _computed(cell: Cell, device: str, offload: bool | Literal["auto"]) -> Result:
    opened = _opened(cell, device, offload)
    if cell.source != "gaussian":
        opened.gaussians.clear()  # they take as much as the attention's own weights, and their turn is over
    rows = evaluate(cell, opened.checkpoint, opened.gaussians.setdefault(cell.seed, {}), opened.found)
    return cell, rows, provenance(cell, opened.checkpoint)


def _is_for_want_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


def _start(threads: int, workers: int) -> None:
    """Begin a worker process: as many threads as its parent, and no life after it, however that ends."""
    torch.set_num_threads(threads)
    share(workers)
    parent = multiprocessing.parent_process()
    Thread(target=lambda: (wait_for([parent.sentinel]), os._exit(1)), daemon=True).start()


@contextmanager
def _processes(workers: int) -> Iterator[list[Executor]]:
    """As many executors of one process each; if the study ends early, their processes end at once."""
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    pools = [ProcessPoolExecutor(1, context, _start, (threads, workers)) for _ in range(workers)]
    others = multiprocessing.active_children()
    try:
        # Ctrl-C reaches all processes of a terminal: these inherit that it is blocked, and only the parent heeds it
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for pool in pools:
            pool.submit(os.getpid)  # starts the process
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        yield pools
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        for pool in pools:
            pool.shutdown()  # no cancelling: a pool whose process ends trips over what was cancelled
        raise
    for pool in pools:
        pool.shutdown(cancel_futures=True)


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
            yield stack.enter_context(_processes(workers))


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


def results(
    cells: Sequence[Cell], device: str, pools: Sequence[Executor], failed: dict[str, Exception] | None = None
) -> Iterator[Result]:
    """Compute cells and yield each as soon as it is done; weights are opened once per process where possible.

    Parameters
    ----------
    cells : sequence of Cell
        In any order.
    device : str
        As in `cwlib.open_checkpoint`.
    pools : sequence of Executor
        From `executors`.
    failed : dict of str to Exception, optional
        Takes the first error of each checkpoint, whose other cells are then left out; without it an error is raised.
    """
    ordered = sorted(cells, key=weights_of)
    if not pools:
        try:
            for cell in ordered:
                if cell.checkpoint in (failed or ()):
                    continue
                try:
                    result = work(cell, device)
                except Exception as error:
                    _note(cell.checkpoint, error, failed)
                else:
                    yield result
        finally:
            _OPENED.clear()
        return
    queue = deque(_shares(ordered) if len(pools) > 1 else [ordered])
    pending: dict[Future, tuple[Executor, Cell]] = {}
    sound = list(pools)

    def feed(pool: Executor) -> None:
        if pool in sound and queue:
            pending.update({pool.submit(work, cell, device): (pool, cell) for cell in queue.popleft()})

    for pool in pools:
        feed(pool)
    try:
        while pending:
            done = wait(pending, return_when=FIRST_COMPLETED).done
            # a failure last, so that what was done beside it is kept
            for future in sorted(done, key=lambda future: future.cancelled() or future.exception() is not None):
                pool, cell = pending.pop(future)
                error = None if future.cancelled() else future.exception()
                if isinstance(error, BrokenProcessPool):
                    sound = [other for other in sound if other is not pool]
                    error = _ended(cell.checkpoint)
                if error is not None:
                    _note(cell.checkpoint, error, failed)
                    for other, (_, theirs) in pending.items():
                        if theirs.checkpoint == cell.checkpoint:
                            other.cancel()
                if all(pool is not other for other, _ in pending.values()):
                    feed(pool)
                if error is None and not future.cancelled():
                    yield future.result()
        for cell in (cell for cells in queue for cell in cells):  # no process is left
            _note(cell.checkpoint, _ended(cell.checkpoint), failed)
    finally:
        for future, (pool, _) in pending.items():
            if not isinstance(pool, ProcessPoolExecutor):  # see `_processes`
                future.cancel()


def _note(name: str, error: Exception, failed: dict[str, Exception] | None) -> None:
    if failed is None:
        raise error
    if name not in failed:
        failed[name] = error


def _ended(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: workers: a process ended before its cell was done, perhaps for want of memory; run again, with fewer "
        "workers"
    )


def _shares(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells by checkpoint, so that no two processes hold the same weights; the costliest first, for an even end."""
    shares: dict[str, list[Cell]] = {}
    for cell in cells:
        shares.setdefault(cell.checkpoint, []).append(cell)
    facts = {name: known(name) for name in shares}
    size = {name: 1 if fact is None else fact.parameters for name, fact in facts.items()}
    return sorted(shares.values(), key=lambda share: -len(share) * size[share[0].checkpoint])
