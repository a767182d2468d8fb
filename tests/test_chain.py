"""The chain executes what is not current, stops at a failure, resumes, and refreshes outputs reproducibly."""

import json
import os
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from typer.testing import CliRunner

from cwlib import chain as chain_module
from cwlib.chain import Chain, ChainError

FIRST = """
from pathlib import Path
import os, sys, tqdm.auto
import matplotlib.pyplot as plt
from cwlib.style import figures_dir, save_figure
for _ in tqdm.auto.tqdm(range(number)):
    print("to stdout")
    print("to stderr", file=sys.stderr)
(figures_dir() / "data").mkdir(exist_ok=True)
_ = (figures_dir() / "data" / "rows.csv").write_text(f"{number}")
"""
FIGURE = """
fig, ax = plt.subplots()
ax.plot([0, number])
save_figure(fig, "line")
plt.show()
"""
SECOND = """
import os
from pathlib import Path
print((Path(os.environ["CWLIB_FIGURES"]) / "data" / "rows.csv").read_text(), Path.cwd().name)
"""
THIRD = """
data = Path(os.environ["CWLIB_FIGURES"]) / "data"
(data / "summary.csv").write_text((data / "rows.csv").read_text())
"""


def write(folder: Path, name: str, *sources: str) -> None:
    cells = [new_markdown_cell(f"# {name}", id="title")]
    cells += [new_code_cell(source.strip(), id=f"cell-{i}") for i, source in enumerate(sources)]
    folder.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")


def edit(root: Path, name: str, cell: int, source: str) -> None:
    path = root / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[cell].source = source
    nbformat.write(notebook, path)


def at(root: Path) -> Chain:
    return Chain(root / "notebooks", root / "build", root / "figures", (root / "code",))


def stale(root: Path) -> dict[str, str | None]:
    return {name: at(root).why_stale(name) for name in at(root).select(None)}


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("chain")
    write(root / "notebooks", "00_first", "number = 3", FIRST, FIGURE)
    write(root / "notebooks", "01_second", SECOND, THIRD)
    (root / "code").mkdir()
    (root / "code" / "module.py").write_text("x = 1")
    chain = at(root)
    assert [chain.why_stale(name) for name in chain.select(None)] == ["not executed yet"] * 2
    for name in chain.select(None):
        chain.execute(name)
    return root


@pytest.fixture
def root(executed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(executed, tmp_path / "copy"))


CURRENT = {"00_first": None, "01_second": None}


def test_executed_notebooks_are_current_wherever_the_clone_lies(root: Path) -> None:
    assert stale(root) == CURRENT
    assert sorted(p.name for p in (root / "build").iterdir()) == [
        "00_first.ipynb",
        "01_second.ipynb",
        "stamps.json",
    ]


def test_kernels_run_in_the_notebooks_folder_without_progress_bars_and_show_figures(root: Path) -> None:
    first, second = (
        nbformat.read(root / "build" / name, as_version=4) for name in ("00_first.ipynb", "01_second.ipynb")
    )
    assert [o.text for o in second.cells[1].outputs] == ["3 notebooks\n"]
    assert {o.name: o.text for o in first.cells[2].outputs} == {
        "stdout": "to stdout\n" * 3,
        "stderr": "to stderr\n" * 3,
    }
    assert "image/png" in first.cells[3].outputs[0].data
    manifest = json.loads((root / "figures" / "manifest.json").read_text())
    assert manifest["line"]["notebook"] == "00_first"
    assert manifest["line"]["threads"] == 2


@pytest.mark.parametrize("cell", [0, 1])
def test_changed_source_text_or_code_makes_it_and_its_successors_stale(root: Path, cell: int) -> None:
    edit(root, "01_second", cell, "number = 4")
    assert stale(root) == {"00_first": None, "01_second": "sources changed"}
    edit(root, "00_first", cell, "number = 4")
    assert set(stale(root).values()) == {"sources changed"}


def test_changed_or_new_package_file_makes_all_stale_but_dates_and_caches_do_not(root: Path) -> None:
    os.utime(root / "code" / "module.py", (1, 1))
    os.utime(root / "figures" / "line.png", (1, 1))
    (root / "code" / "__pycache__").mkdir()
    (root / "code" / "__pycache__" / "module.pyc").write_text("")
    assert stale(root) == CURRENT
    (root / "code" / "passage.txt").write_text("")
    assert set(stale(root).values()) == {"sources changed"}


@pytest.mark.parametrize("file", ["line.png", "line.pdf"])
def test_altered_or_missing_figure_makes_its_notebook_stale(root: Path, file: str) -> None:
    path = root / "figures" / file
    content = path.read_bytes()
    wanted = {"00_first": f"{file} is missing or altered", "01_second": None}
    path.unlink()
    assert stale(root) == wanted
    path.write_bytes(content + b" ")
    assert stale(root) == wanted
    path.write_bytes(content)
    assert stale(root) == CURRENT
    (root / "figures" / "manifest.json").unlink()
    assert stale(root)["00_first"] is not None


def test_tables_count_for_their_writer_and_those_after_it(root: Path) -> None:
    data = root / "figures" / "data"
    (data / "rows.csv").write_text("3")  # rewritten, same content
    assert stale(root) == CURRENT
    (data / "summary.csv").write_text("by hand")
    assert stale(root) == {"00_first": None, "01_second": "data/summary.csv changed"}
    (data / "summary.csv").unlink()
    assert stale(root) == {"00_first": None, "01_second": "data/summary.csv changed"}
    (data / "rows.csv").write_text("4")
    assert stale(root) == {"00_first": "data/rows.csv changed", "01_second": "data/rows.csv changed"}


def test_table_of_unknown_origin_counts_for_all(root: Path) -> None:
    (root / "figures" / "data" / "brought.csv").write_text("")
    assert set(stale(root).values()) == {"data/brought.csv changed"}


def test_failure_names_cell_source_and_error_keeps_the_rest_and_resumes(root: Path) -> None:
    edit(root, "01_second", 2, THIRD + "1 / 0  # on purpose")
    environment = dict(os.environ)
    with pytest.raises(ChainError) as caught:
        at(root).execute("01_second")
    assert dict(os.environ) == environment
    message = str(caught.value)
    assert message.startswith("01_second: cell 3 ")
    assert "1 / 0  # on purpose" in message and "ZeroDivisionError: division by zero" in message
    failed = root / "build" / "01_second.failed.ipynb"
    assert str(failed) in message
    assert nbformat.read(failed, as_version=4).cells[-1].outputs[0].ename == "ZeroDivisionError"
    assert stale(root) == {"00_first": None, "01_second": "not executed yet"}
    edit(root, "01_second", 2, THIRD)
    at(root).execute("01_second")
    assert stale(root) == CURRENT
    assert not failed.exists()


def test_dead_kernel_is_reported_with_its_cell(root: Path) -> None:
    edit(root, "01_second", 1, "import os; os._exit(137)")
    with pytest.raises(ChainError, match=r"01_second: cell 2 [^:]*:\n\nimport os; os._exit\(137\)\n\n.*died"):
        at(root).execute("01_second")
    assert stale(root)["01_second"] == "not executed yet"


def test_update_writes_outputs_only_and_a_fresh_clone_repeats_them(root: Path) -> None:
    path = root / "notebooks" / "00_first.ipynb"
    before = nbformat.read(path, as_version=4)
    assert at(root).update("00_first")
    once = path.read_bytes()
    after = nbformat.read(path, as_version=4)
    assert [c.execution_count for c in after.cells if c.cell_type == "code"] == [1, 2, 3]
    assert not {"papermill", "execution"} & {key for cell in after.cells for key in cell.metadata}
    assert after.metadata == before.metadata
    assert [(c.id, c.source) for c in after.cells] == [(c.id, c.source) for c in before.cells]
    assert stale(root) == CURRENT  # outputs are not sources
    # as in a fresh clone: no stamps, and tables and figures are rewritten with the content that was committed
    shutil.rmtree(root / "build")
    chain = at(root)
    for name in chain.select(None):
        chain.execute(name)
    assert stale(root) == CURRENT
    assert not at(root).update("00_first")
    assert path.read_bytes() == once


def test_select_takes_the_beginning_of_one_name(root: Path) -> None:
    assert at(root).select("01") == ["01_second"]
    for name, count in (("0", 2), ("02", 0)):
        with pytest.raises(ValueError, match=rf"only: .*00_first.* got '{name}' \({count} match\)"):
            at(root).select(name)


def test_notebook_without_cell_ids_is_refused(root: Path) -> None:
    notebook = new_notebook(nbformat_minor=4)
    nbformat.write(notebook, root / "notebooks" / "02_old.ipynb")
    with pytest.raises(ValueError, match=r"02_old.ipynb: expected nbformat 4.5"):
        at(root).select(None)


def test_command_skips_stops_and_tells(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = root / "cwlib"
    package.mkdir()
    (root / "environment.yml").write_text("")
    (root / "build").rename(root / "old")
    shutil.copytree(root / "old", root / "build" / "notebooks")
    monkeypatch.setattr(chain_module, "__file__", str(package / "chain.py"))
    monkeypatch.setenv("CWLIB_FIGURES", str(root / "figures"))
    run = CliRunner().invoke
    edit(root, "01_second", 2, "raise SystemError('stop here')")
    write(root / "notebooks", "02_third", "1 + 1")
    stopped = run(chain_module.app, [])
    assert stopped.exit_code == 1
    assert "01_second: executing (sources changed)" in stopped.output
    assert "01_second: cell 3 " in stopped.output and "stop here" in stopped.output
    assert "02_third" not in stopped.output
    edit(root, "01_second", 2, THIRD)
    resumed = run(chain_module.app, ["--update"])
    assert resumed.exit_code == 0
    assert "00_first: current" in resumed.output
    assert "notebooks updated: 00_first, 01_second, 02_third" in resumed.output
    again = run(chain_module.app, ["--update", "--only", "02"])
    assert "02_third: current" in again.output and "00_first" not in again.output
    assert "notebooks updated: none" in again.output
    assert "02_third: executing (asked for)" in run(chain_module.app, ["--fresh", "--only", "02"]).output
    assert run(chain_module.app, ["--only", "9"]).exit_code == 2


def test_make_gives_nbval_the_same_environment() -> None:
    makefile = (Path(__file__).resolve().parents[1] / "Makefile").read_text().replace("\\\n", " ")
    line = next(line for line in makefile.splitlines() if line.startswith("KERNEL_ENVIRONMENT :="))
    settings = dict(word.split("=", 1) for word in line.split(":=")[1].split())
    assert settings == chain_module.KERNEL_ENVIRONMENT
