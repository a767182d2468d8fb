"""A study is the same table wherever its cells are computed, and a worker that dies takes nothing with it."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from threading import Event, Thread, current_thread

import jaxtyping
import pandas as pd
import psutil
import pytest
from dask.distributed import Client, LocalCluster

from cwlib import study, workers
from cwlib.catalogue import CheckpointError
from cwlib.cells import Cell, plan
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


def test_the_costliest_checkpoints_go_first() -> None:
    counts = {"minilm-l6": 8, "mpnet-base": 3, "gemma3-270m": 2}  # 23, 109 and 268 million parameters
    cells = [
        Cell(name, name, "trained", seed, TEXTS[0], ("symmetry",)) for name, n in counts.items() for seed in range(n)
    ]
    pools = [Remembering() for _ in counts]
    assert len(list(results(cells, "cpu", pools))) == len(cells)
    assert [pool.cells[0].checkpoint for pool in pools] == ["gemma3-270m", "mpnet-base", "minilm-l6"]


@pytest.fixture
def threads() -> Iterator[list[Executor]]:
    """Two workers whose work can be watched."""
    with ThreadPoolExecutor(1, "first") as first, ThreadPoolExecutor(1, "second") as second:
        yield [first, second]


def name_of_thread() -> str:
    return current_thread().name.partition("_")[0]


def test_a_worker_that_is_done_takes_the_next_checkpoint_whole(
    threads: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"a": 9, "b": 6, "c": 5, "d": 1}  # as costly by the cell
    cells = [
        Cell(name, name, source, seed, TEXTS[seed % 2], ("symmetry",))
        for name, count in counts.items()
        for seed, source in zip(range(count), 2 * ["trained", "init", "gaussian", "init", "q4_1"], strict=False)
    ]
    computed: list[tuple[str, Cell]] = []
    others_done = Event()

    def work(cell: Cell, _device: str) -> tuple[Cell, pd.DataFrame, dict]:
        if cell.checkpoint == "a":
            assert others_done.wait(30), "the other worker left checkpoints to the one that is busy"
        computed.append((name_of_thread(), cell))
        if sum(done.checkpoint != "a" for _, done in computed) == len(cells) - counts["a"]:
            others_done.set()
        return cell, pd.DataFrame(), {}

    monkeypatch.setattr(workers, "work", work)
    assert sorted(cell.key for cell, *_ in results(cells, "cpu", threads)) == sorted(cell.key for cell in cells)
    mine = {worker: [cell for name, cell in computed if name == worker] for worker in ("first", "second")}
    assert {cell.checkpoint for cell in mine["first"]} == {"a"}
    assert [name for name, _ in groupby(cell.checkpoint for cell in mine["second"])] == ["b", "c", "d"]
    for listed in mine.values():
        opened = [weights_of(cell) for cell in listed]
        assert len(list(groupby(opened))) == len(set(opened)), "no set of weights is opened twice"


def table_of(cell: Cell) -> tuple[Cell, pd.DataFrame, dict]:
    """A cell's result, without work."""
    head = (cell.checkpoint, cell.source, cell.seed, cell.passage_name)
    rows = pd.DataFrame([(*head, 0, "symmetry", "", "", 0.5)], columns=[*study.ROW, "value"])
    return cell, rows, dict(zip(study.IDENTITY, head, strict=True)) | {"key": cell.key}


@pytest.mark.parametrize("pools", [0, 2])
def test_an_error_stops_its_checkpoint_and_no_other_and_what_was_done_is_kept(
    pools: int, threads: list[Executor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    started: list[Cell] = []
    everything = plan(("tiny-bert", "tiny-gpt2"), TEXTS[:1])
    theirs = {cell.key for cell in everything if cell.checkpoint == "tiny-bert"}

    def work(cell: Cell, _device: str) -> tuple[Cell, pd.DataFrame, dict]:
        started.append(cell)
        if cell.checkpoint == "tiny-gpt2" and sum(done.checkpoint == "tiny-gpt2" for done in started) == 4:
            raise RuntimeError("this cell is broken")
        time.sleep(0.03)
        return table_of(cell)

    monkeypatch.setattr(workers, "work", work)
    monkeypatch.setattr(study, "executors", lambda *_: nullcontext(threads[:pools]))
    with pytest.raises(
        study.Incomplete, match=r"1 of 2 .*\n  - tiny-gpt2: RuntimeError: this cell is broken$"
    ) as caught:
        run(workers=2)
    assert isinstance(caught.value.__cause__, RuntimeError)
    for pool in threads:
        pool.shutdown()
    done = {path.stem for path in (tmp_path / "cache" / "study").glob("*.parquet")}
    assert theirs < done and len(done - theirs) >= 3, "the other is whole"
    assert len(caught.value.table) == len(theirs) and len(started) < len(everything), "the rest is left out"
    started.clear()
    monkeypatch.setattr(workers, "work", lambda cell, _: started.append(cell) or table_of(cell))
    monkeypatch.setattr(study, "executors", lambda *_: nullcontext([]))
    table = study.run(("tiny-bert", "tiny-gpt2"), None, TEXTS[:1], progress=False)
    assert {cell.key for cell in started} == {cell.key for cell in everything} - done
    assert len(table) == len(everything)


class Dying(Executor):
    """A process that ends as soon as it has work, of whatever checkpoint is named."""

    def __init__(self, fatal: str) -> None:
        self.fatal, self.dead = fatal, False

    def submit(self, _work: object, cell: Cell, _device: str) -> Future:
        future: Future = Future()
        self.dead = self.dead or cell.checkpoint == self.fatal
        if self.dead:
            future.set_exception(BrokenProcessPool("a process in the pool was terminated abruptly"))
        else:
            future.set_result(table_of(cell))
        return future


def test_when_a_process_ends_the_others_take_over_and_it_is_told_whose_cell_it_was() -> None:
    cells = [Cell(name, name, "gaussian", seed, TEXTS[0], ("symmetry",)) for name in "abcd" for seed in range(3)]
    failed: dict[str, Exception] = {}
    done = {cell.checkpoint for cell, *_ in results(cells, "cpu", [Dying("b"), Dying("b")], failed)}
    assert done == {"a", "c", "d"} and list(failed) == ["b"]
    assert "b: workers: a process ended" in str(failed["b"]) and "fewer workers" in str(failed["b"])
    failed.clear()
    assert not list(results(cells, "cpu", [Dying("a")], failed)), "no process is left"
    assert set(failed) == set("abcd")
    with pytest.raises(CheckpointError, match="fewer workers"):
        list(results(cells, "cpu", [Dying("a"), Dying("a")]))


class Finished(Executor):
    """All cells are done by the time they are asked for, and one of them failed."""

    def submit(self, _work: object, cell: Cell, _device: str) -> Future:
        future: Future = Future()
        if cell.seed == 0:
            future.set_exception(ValueError("broken"))
        else:
            future.set_result((cell, pd.DataFrame(), {}))
        return future


def test_cells_that_were_done_when_another_failed_are_not_lost() -> None:
    cells = [Cell("a", "a", "gaussian", seed, TEXTS[0], ("symmetry",)) for seed in range(9)]
    found = []
    with pytest.raises(ValueError, match="broken"):
        found.extend(cell.seed for cell, *_ in results(cells, "cpu", [Finished()]))
    assert sorted(found) == list(range(1, 9))


def test_one_worker_needs_no_executor() -> None:
    with executors(1, None) as pools:
        assert pools == []


# --- killed ---------------------------------------------------------------------------------------------------------

STUDY = """
import sys
from cwlib import study
from cwlib.corpus import Passage
text = Passage("first", "", "A short text, of two lines. It is here.")
study.run(("tiny-bert", "tiny-gpt2"), sys.argv[1], (text,), progress=False, workers=int(sys.argv[2]))
"""


def killed_after(count: int, folder: Path, cache: Path, workers: int) -> list[psutil.Process]:
    """Start a study, kill it when so many of its cells are done, and return those of its children that live on."""
    count = max(count, len(list(cache.glob("*.parquet"))) + 1)  # a kill comes late, when more are done already
    process = subprocess.Popen([sys.executable, "-c", STUDY, str(folder), str(workers)])
    while process.poll() is None and len(list(cache.glob("*.parquet"))) < count:
        time.sleep(0.01)
    assert process.poll() is None, "killed while cells are left to compute"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= (workers if workers > 1 else 0)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    alive = [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    for child in alive:
        child.kill()
    return alive


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a study that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CWLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        study.run(("tiny-bert", "tiny-gpt2"), folder, TEXTS[:1], progress=False)
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_a_study_killed_three_times_ends_with_the_same_table_and_leaves_no_process(
    workers: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in the whole study: cells.csv names the number
    folder, cache = tmp_path / "data", tmp_path / "cache" / "study"
    last = len(pd.read_csv(whole / "cells.csv")) - 3
    counts = sorted(random.Random(workers).sample(range(1, last), 3))
    orphans = [child.pid for count in counts for child in killed_after(count, folder, cache, workers)]
    assert not folder.exists()
    done = {path.name for path in cache.glob("*.parquet")}
    assert len(done) >= counts[-1]
    before = {name: (cache / name).stat().st_mtime_ns for name in done}
    table = study.run(("tiny-bert", "tiny-gpt2"), folder, TEXTS[:1], progress=False)
    assert before == {name: (cache / name).stat().st_mtime_ns for name in done}, "what was done is not done again"
    assert not table.duplicated(study.ROW).any()
    for file in ("study.csv", "cells.csv"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes()
    assert not orphans


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_the_command_in_a_line_and_the_same_again_goes_on(workers: int, tmp_path: Path) -> None:
    text, folder, cache = tmp_path / "text.txt", tmp_path / "data", tmp_path / "cache"
    text.write_text("A short text, of two lines. It is here.")
    options = ["--checkpoint", "tiny-bert", "--checkpoint", "tiny-gpt2", "--texts", text, "--folder", folder]
    command = [sys.executable, "-m", "cwlib", "study", *options, "--workers", workers]
    environment = os.environ | {"CWLIB_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        list(map(str, command)), start_new_session=True, stderr=subprocess.PIPE, text=True, env=environment
    )
    while process.poll() is None and len(list((cache / "study").glob("*.parquet"))) < 3:
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and told.endswith("stopped; what was finished is kept\n")
    assert "Traceback" not in told and not folder.exists()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive

    before = {path: path.stat().st_mtime_ns for path in (cache / "study").glob("*.parquet")}
    assert len(before) >= 3
    again = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert again.returncode == 0, again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in before}
    assert (folder / "study.csv").exists()
