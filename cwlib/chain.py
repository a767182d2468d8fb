"""Execute the notebooks in order: `python -m cwlib.chain`, which is what `make figures` runs.

Whether a notebook is current is decided by content, never by dates. Its stamp, written after its last successful
execution, holds (a) a hash over the sources of its cells, of all notebooks before it and of the package; (b) the
hashes of the tables in `figures/data`; (c) the hashes of the figures that the manifest ascribes to it. All three
must still hold, but for tables that a later notebook writes: they are no input.

Executed notebooks go to `build/notebooks`; one that failed stays there as NAME.failed.ipynb and is not stamped, so
that the next run resumes from it.
"""

import hashlib
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import nbformat
import papermill
import typer
from nbformat import NotebookNode
from papermill.exceptions import PapermillExecutionError

from cwlib.files import write_atomically
from cwlib.style import figures_dir, read_manifest

KERNEL_ENVIRONMENT = {
    "OMP_NUM_THREADS": "2",
    "SOURCE_DATE_EPOCH": "1767225600",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # progress bars, and tqdm's complaint that it has no widgets, would be outputs that differ from run to run
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore:IProgress",
}
"""What every kernel is given, for outputs that repeat. The Makefile gives the same to nbval."""


class ChainError(Exception):
    """A notebook did not run to its end; the message says where and why."""


@dataclass
class Chain:
    """The notebooks of a folder, in the order of their names.

    Attributes
    ----------
    notebooks, build, figures : Path
        Where notebooks are read, where executed ones and stamps go, where they save figures. Absolute.
    code : tuple of Path
        Files and folders on which every notebook depends.
    stamps, writers : dict
        What `build/stamps.json` holds: the stamp of each notebook, and which one writes each table.
    """

    notebooks: Path
    build: Path
    figures: Path
    code: tuple[Path, ...]
    stamps: dict[str, Any] = field(init=False)
    writers: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        path = self.build / "stamps.json"
        try:
            state = json.loads(path.read_text())
            state["stamps"], state["writers"]
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or damaged: then nothing is current
            state = {"stamps": {}, "writers": {}}
        self.stamps, self.writers = state["stamps"], state["writers"]

    @cached_property
    def keys(self) -> dict[str, str]:
        """Per notebook, in order: the hash of its sources, its predecessors' and the package's."""
        code = {str(path): _hashes(path) for path in self.code}
        key = _sha256(json.dumps([hashes for _, hashes in sorted(code.items())]).encode())
        keys = {}
        for path in sorted(self.notebooks.glob("*.ipynb")):
            cells = [[cell.cell_type, cell.source] for cell in _read(path).cells]
            key = keys[path.stem] = _sha256(json.dumps([key, path.stem, cells]).encode())
        return keys

    def select(self, name: str | None) -> list[str]:
        """Return all names, or the one that starts with `name`.

        Raises
        ------
        ValueError
            If none does, or several.
        """
        names = list(self.keys)
        matches = [n for n in names if n.startswith(name)] if name else names
        if not names or (name and len(matches) != 1):
            raise ValueError(f"only: expected the beginning of one of {names}, got {name!r} ({len(matches)} match)")
        return matches

    def why_stale(self, name: str) -> str | None:
        """Return why notebook `name` has to be executed, or None if it is current."""
        stamp = self.stamps.get(name)
        if stamp is None or not self.executed(name).exists():
            return "not executed yet"
        if stamp["key"] != self.keys[name]:
            return "sources changed"
        later = [n for n in self.keys if n > name]
        now = _hashes(self.figures / "data")
        for file in sorted(now.keys() | stamp["data"].keys()):
            if self.writers.get(file) in later:
                continue
            # a table of its own may have been continued by a later notebook
            heirs = later if self.writers.get(file) == name else []
            accepted = [s["data"].get(file) for s in (stamp, *map(self.stamps.get, heirs)) if s]
            if now.get(file) not in accepted:
                return f"data/{file} changed"
        ascribed = self._ascribed(name)
        for file in sorted(ascribed.keys() | stamp["figures"].keys()):
            path = self.figures / file
            on_disk = _sha256(path.read_bytes()) if path.exists() else None
            if not on_disk == ascribed.get(file) == stamp["figures"].get(file):
                return f"{file} is missing or altered"
        return None

    def execute(self, name: str) -> None:
        """Execute one notebook with the defaults of its parameters cell, and stamp it.

        Raises
        ------
        ChainError
            If a cell raises, or the kernel dies.
        """
        self.stamps.pop(name, None)
        unfinished = self.build / f"{name}.failed.ipynb"
        self.build.mkdir(parents=True, exist_ok=True)
        before = _file_states(self.figures / "data")
        try:
            with _environment(KERNEL_ENVIRONMENT | {"CWLIB_NOTEBOOK": name, "CWLIB_FIGURES": str(self.figures)}):
                papermill.execute_notebook(
                    self.notebooks / f"{name}.ipynb",
                    unfinished,
                    cwd=self.notebooks,
                    kernel_name="python3",
                    progress_bar={"desc": name, "disable": False},
                    # chunks of one stream arrive as they please
                    coalesce_streams=True,
                    extra_arguments=["--IPKernelApp.log_level=40"],
                )
            os.replace(unfinished, self.executed(name))
            data, figures = _hashes(self.figures / "data"), self._ascribed(name)
            self.stamps[name] = {"key": self.keys[name], "data": data, "figures": figures}
        except PapermillExecutionError as error:
            raise ChainError(_report(name, error.cell_index, error.source, str(error), unfinished)) from error
        except RuntimeError as error:  # nbclient: the kernel died or did not start
            cells = _read(unfinished).cells if unfinished.exists() else []
            # papermill's mark: the kernel may be gone before it has counted its last cell
            begun = [cell.metadata.get("papermill", {}).get("start_time") is not None for cell in cells]
            started = [i for i, cell in enumerate(cells) if begun[i] and cell.cell_type == "code"] or [0]
            source = cells[started[-1]].source if cells else ""
            raise ChainError(_report(name, started[-1], source, str(error), unfinished)) from error
        finally:
            after = _file_states(self.figures / "data")
            for file in after:
                if after[file] != before.get(file):
                    # of two notebooks that write one table, the first makes it and the other reads it too
                    self.writers[file] = min(self.writers.get(file, name), name)
            state = {"stamps": self.stamps, "writers": self.writers}
            write_atomically(self.build / "stamps.json", json.dumps(state, indent=1).encode())

    def update(self, name: str) -> bool:
        """Copy the outputs of the executed notebook into the committed one; return whether that changed it."""
        path = self.notebooks / f"{name}.ipynb"
        notebook = _read(path)
        executed = {cell.id: cell for cell in _read(self.executed(name)).cells}
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = executed[cell.id].outputs
                cell.execution_count = executed[cell.id].execution_count
        content = (nbformat.writes(notebook) + "\n").encode()
        changed = content != path.read_bytes()
        if changed:
            write_atomically(path, content)
        return changed

    def executed(self, name: str) -> Path:
        """Return where the executed notebook lies."""
        return self.build / f"{name}.ipynb"

    def _ascribed(self, name: str) -> dict[str, str]:
        entries = read_manifest(self.figures).values()
        return {file: sha for e in entries if e["notebook"] == name for file, sha in e["sha256"].items()}


def _read(path: Path) -> NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    if notebook.nbformat_minor < 5:
        raise ValueError(f"{path}: expected nbformat 4.5 or later (cells with ids); save it once in JupyterLab")
    return notebook


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _files(path: Path) -> dict[str, Path]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {p.relative_to(path).as_posix(): p for p in files if "__pycache__" not in p.parts}


def _hashes(path: Path) -> dict[str, str]:
    return {name: _sha256(p.read_bytes()) for name, p in _files(path).items()}


def _file_states(path: Path) -> dict[str, list[int]]:
    # tells which notebook wrote a table, even one rewritten with the same content; not used to judge staleness
    stats = {name: p.stat() for name, p in _files(path).items()}
    return {name: [s.st_ino, s.st_mtime_ns, s.st_size] for name, s in stats.items()}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    saved = dict(os.environ)
    # a backend chosen by the caller would keep figures from being shown inline
    os.environ.pop("MPLBACKEND", None)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _report(name: str, cell: int, source: str, error: str, kept: Path) -> str:
    where = f"{name}: cell {cell + 1} (from 1, text cells counted) failed"
    return f"{where}:\n\n{source}\n\n{error.strip()}\n\nKept as {kept}; mend and run again."


def _peak_memory_gb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit / 1e9


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    only: Annotated[str | None, typer.Option(help="Run one notebook: its name or the beginning of it.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Execute current notebooks too.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Copy outputs into notebooks/*.ipynb.")] = False,
) -> None:
    """Execute the notebooks that are not current, in order; stop at the first failure."""
    package = Path(__file__).resolve().parent
    root = package.parent
    lock = root / "environment.yml"
    chain = Chain(root / "notebooks", root / "build" / "notebooks", figures_dir(), (package, lock))
    try:
        names = chain.select(only)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    rows = []
    for name in names:
        reason = "asked for" if fresh else chain.why_stale(name)
        if reason is None:
            print(f"{name}: current", flush=True)
            rows.append((name, "current", "", ""))
            continue
        print(f"{name}: executing ({reason})", flush=True)
        start = time.perf_counter()
        try:
            chain.execute(name)
        except ChainError as error:
            sys.exit(str(error))
        # the operating system reports the largest kernel so far, not each
        rows.append((name, "executed", f"{time.perf_counter() - start:.1f}", f"{_peak_memory_gb():.2f}"))
    print(f"\n{'notebook':<40} {'':<9} {'seconds':>8} {'peak GB so far':>15}")
    for name, outcome, seconds, peak in rows:
        print(f"{name:<40} {outcome:<9} {seconds:>8} {peak:>15}")
    if update:
        changed = [name for name, *_ in rows if chain.update(name)]
        print(f"notebooks updated: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    app()
