"""A study is the same table wherever its cells are computed, and a worker that dies takes nothing with it."""

import os
import signal
import time
from concurrent.futures import Executor, Future
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pandas as pd
import pytest
from dask.distributed import Client, LocalCluster

from cwlib import study
from cwlib.cells import Cell
from cwlib.corpus import Passage
from cwlib.workers import executors, results, weights_of

TEXTS = (Passage("first", "", "A short text, of two lines. It is here."), Passage("second", "", "Another one: 1, 2!!"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))


def run(**options: object) -> pd.DataFrame:
    return study.run(("tiny-bert", "tiny-gpt2"), None, TEXTS[:1], fresh=True, progress=False, **options)


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CWLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        return run()


def test_two_processes_give_the_same_table(inline: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(run(workers=2), inline, check_exact=True)


def test_a_dask_cluster_gives_the_same_table_though_a_worker_is_killed(inline: pd.DataFrame, tmp_path: Path) -> None:
    found: list[pd.DataFrame] = []
    options = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        first = next(iter(client.run(os.getpid).values()))
        address = cluster.scheduler_address
        thread = Thread(target=lambda: found.append(run(scheduler=address)))
        thread.start()
        while thread.is_alive() and len(list((tmp_path / "cache" / "study").glob("*.parquet"))) < 3:
            time.sleep(0.05)
        assert thread.is_alive(), "killed while cells are left to compute"
        os.kill(first, signal.SIGKILL)
        thread.join(timeout=240)
    pd.testing.assert_frame_equal(found[0], inline, check_exact=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, ("workers", "positive", "0")),
        ({"scheduler": "nowhere"}, ("scheduler", "tcp://", "nowhere")),
        ({"scheduler": "tcp://127.0.0.1:9"}, ("scheduler", "running Dask scheduler", "tcp://127.0.0.1:9")),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        run(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Remembering(Executor):
    """Computes nothing."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def submit(self, work: object, cell: Cell, device: str) -> Future:
        self.cells.append(cell)
        future: Future = Future()
        future.set_result((cell, pd.DataFrame(), {}))
        return future


def test_each_process_takes_whole_checkpoints_and_one_set_of_weights_after_the_other() -> None:
    counts = {"a": 5, "b": 3, "c": 3, "d": 1}
    cells = [
        Cell(name, name, source, seed, TEXTS[seed % 2], ("symmetry",))
        for name, count in counts.items()
        for seed, source in zip(range(count), ("trained", "init", "gaussian", "init", "trained"), strict=False)
    ]
    pools = [Remembering(), Remembering()]
    assert {cell.key for cell, *_ in results(cells, "cpu", pools)} == {cell.key for cell in cells}
    first, second = ({cell.checkpoint for cell in pool.cells} for pool in pools)
    assert not first & second and first | second == set(counts)
    assert abs(len(pools[0].cells) - len(pools[1].cells)) <= 1
    for pool in pools:
        opened = [weights_of(cell) for cell in pool.cells]
        changes = sum(a != b for a, b in pairwise(opened))
        assert changes == len(set(opened)) - 1, "no set of weights is opened twice"


def test_one_worker_needs_no_executor() -> None:
    with executors(1, None) as pools:
        assert pools == []
