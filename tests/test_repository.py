"""What holds across files: the lock, the import direction, the claims' three places, the state of notebooks."""

import ast
import hashlib
import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import nbformat
import pytest
import yaml
from conftest import snapshot
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
MODULES = {path.stem: path for path in sorted((ROOT / "cwlib").glob("*.py"))}
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# a module imports only modules that stand before it
ORDER = [
    *("files", "_types", "kernels", "validation", "checks", "cores", "blocks", "walk", "edges", "measures"),
    *("laplacian", "holonomy", "spectra", "synthetic", "nulls", "dense", "theorems_balance", "theorems_laplacian"),
    *("theorems_causal", "theorems_transport", "theorems_holonomy", "theorems", "exact", "atlas_pair"),
    *("atlas_attention", "atlas_positions", "atlas_values", "atlas_kernels", "atlas_recurrent", "atlas_signed"),
    *("atlas_graphs", "atlas_geometry", "atlas_sheaves", "atlas_dynamics", "atlas_energies", "atlas"),
    *("metrics_graph", "metrics_transport", "metrics_spectrum", "metric", "metrics", "corpus"),
    *("catalogue", "hub", "network", "loading", "fetch", "sources", "placement", "tiny", "checkpoint", "checkpoints"),
    *("quantise", "families", "architectures", "weights", "inputs", "background", "capture", "statistics", "cells"),
    *("timing", "estimate", "workers", "failures", "glossary", "profiles", "study", "effects", "claims", "verdicts"),
    *("style", "verify", "rivals", "big", "footprint", "cost", "sizes", "bench", "doctor"),
    *("plots_theory", "plots", "plots_claims", "plots_cost", "plots_atlas", "single", "chain", "__main__"),
]
TOP_LEVEL = {
    *("README.md", "environment.yml", "Makefile", "pyproject.toml", "LICENSE", "CITATION.cff"),
    *(".ci", ".gitignore", "cwlib", "notebooks", "figures", "tests"),
}
# the least that the code has to state; whatever else it states needs partners all the same
STATED = {*(f"T{i}" for i in range(1, 10)), "C1", "C2", "C3"}


def tracked() -> list[Path]:
    """Return the files that git tracks; in a downloaded archive, all files."""
    if not (ROOT / ".git").exists():
        return [ROOT / name for name in snapshot(ROOT)]
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listing.stdout.split("\0") if (ROOT / name).is_file()]


def texts() -> Iterator[tuple[Path, str]]:
    """Yield the text files, notebooks included."""
    for path in tracked():
        if path.suffix not in {".png", ".pdf"}:
            yield path, path.read_text(encoding="utf-8")


def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(name: str) -> set[str]:
    """Return what a module imports, at any depth of its code; its own package's modules as cwlib.NAME."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["cwlib" if node.level else None, node.module]))
            from_package = module == "cwlib"
            found |= {f"cwlib.{alias.name}" for alias in node.names} if from_package else {module}
    return {".".join(part.split(".")[: 2 if part.startswith("cwlib.") else 1]) for part in found}


# --- the lock ---------------------------------------------------------------------------------------------------


def declared() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["build-system"]["requires"], project["project"]["dependencies"]]
    groups += project["project"]["optional-dependencies"].values()
    found: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, chain.from_iterable(groups)):
        found.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return found


def locked() -> tuple[str, dict[str, Requirement]]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip[-1] == "-e ."
    pins = [Requirement(line) for line in pip[:-1]]
    (python,) = (entry.removeprefix("python=") for entry in conda if entry.startswith("python="))
    assert len({canonicalize_name(pin.name) for pin in pins}) == len(pins)
    return python, {canonicalize_name(pin.name): pin for pin in pins}


def test_lock_pins_exactly_the_declared_dependencies_within_their_ranges() -> None:
    _, pins = locked()
    assert pins.keys() == declared().keys()
    for name, requirements in declared().items():
        (specifier,) = pins[name].specifier
        assert specifier.operator == "==" and "*" not in specifier.version
        for requirement in requirements:
            assert specifier.version in requirement.specifier, f"{requirement} excludes {pins[name]}"
            assert requirement.extras == pins[name].extras


def test_lock_names_a_python_that_the_package_accepts() -> None:
    accepted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f"{locked()[0]}.0" in Requirement(f"python{accepted}").specifier


def test_make_turns_every_pin_into_a_constraint() -> None:
    # as make would: the command of its recipe, run alone
    recipe = (ROOT / "Makefile").read_text()
    command = re.search(r"sed -n .* environment\.yml(?= > build/constraints\.txt)", recipe)
    assert command
    shell = subprocess.run(command[0].replace("$$", "$"), shell=True, cwd=ROOT, capture_output=True, text=True)
    assert sorted(shell.stdout.split()) == sorted(f"{p.name}{p.specifier}" for p in locked()[1].values())


def test_make_compat_takes_the_oldest_transformers() -> None:
    taken = re.search(r"^TRANSFORMERS \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (requirement,) = declared()["transformers"]
    (oldest,) = (Version(bound.version) for bound in requirement.specifier if bound.operator == ">=")
    assert taken and Version(taken[1]) == oldest


# --- the tree ---------------------------------------------------------------------------------------------------


def test_top_level_holds_nothing_unforeseen() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} == TOP_LEVEL


@pytest.mark.parametrize("command", ["make figures", "make test"])
def test_readme_names_the_commands(command: str) -> None:
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")


def test_citation_names_the_paper_and_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert [reference["url"] for reference in citation["references"]] == ["https://arxiv.org/abs/2607.10677"]


def test_no_registry_host_and_nothing_left_to_do() -> None:
    # put together here, so that this file passes its own test
    hosts = [".".join(parts) for parts in [("pypi", "org"), ("pythonhosted", "org"), ("anaconda", "org")]]
    unfinished = ["TO" + "DO", "FIX" + "ME", "X" * 3]
    forbidden = re.compile("|".join([*map(re.escape, hosts), *(rf"\b{word}\b" for word in unfinished)]))
    picture = re.compile(r'"image/png": "[^"]*"')  # base64 may spell anything
    written = [(path.relative_to(ROOT), picture.sub("", text)) for path, text in texts()]
    found = [f"{path}: {match[0]}" for path, text in written for match in forbidden.finditer(text)]
    assert not found


def test_figures_are_those_of_the_manifest_and_of_existing_notebooks() -> None:
    manifest = json.loads((ROOT / "figures" / "manifest.json").read_text())
    recorded = {file: sha for entry in manifest.values() for file, sha in entry["sha256"].items()}
    present = {p.name: p for p in tracked() if p.parent == ROOT / "figures" and p.name != "manifest.json"}
    assert {name: hashlib.sha256(p.read_bytes()).hexdigest() for name, p in present.items()} == recorded
    assert {entry["notebook"] for entry in manifest.values()} <= {path.stem for path in NOTEBOOKS}


# --- modules ----------------------------------------------------------------------------------------------------


def test_order_lists_every_module_once() -> None:
    assert sorted(ORDER) == sorted(MODULES.keys() - {"__init__"})


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_upwards(name: str) -> None:
    own = {module.removeprefix("cwlib.") for module in imports(name) if module.split(".")[0] == "cwlib"}
    assert own <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        (
            "transformers",
            {"loading", "fetch", "tiny", "checkpoint", "checkpoints", "quantise", "architectures", "weights", "capture"}
            | {"big"},
        ),
        ("matplotlib", {"style", "plots", "plots_claims", "plots_theory", "plots_cost", "plots_atlas", "single"}),
        ("seaborn", {"style", "plots", "plots_claims"}),
        ("papermill", {"chain"}),
    ],
)
def test_library_is_confined(library: str, allowed: set[str]) -> None:
    users = {name for name in MODULES if library in imports(name)}
    assert users and users <= allowed


@pytest.mark.parametrize("name", ["style", "plots", "plots_claims", "plots_theory", "plots_cost", "plots_atlas"])
def test_plots_know_nothing_of_tensors(name: str) -> None:
    assert not {"torch", "transformers", "cwlib.walk", "cwlib.study"} & imports(name)


@pytest.mark.parametrize("name", MODULES)
def test_module_is_short(name: str) -> None:
    lines = MODULES[name].read_text(encoding="utf-8").count("\n")
    assert lines <= 300


# --- one claim, one ID, three places ----------------------------------------------------------------------------


def ids_in_code() -> dict[str, str]:
    """Return the statement of every theorem, from the docstring of its check, and of every claim."""
    homes = [name for name in MODULES if name.startswith("theorems")]
    functions = [node for name in homes for node in tree(name).body if isinstance(node, ast.FunctionDef)]
    checks = {f.name: ast.get_docstring(f) for f in functions if re.fullmatch(r"check_t\d+", f.name)}
    strings = {node.value for node in ast.walk(tree("claims")) if isinstance(node, ast.Constant)}
    claims = {text: text for text in strings if isinstance(text, str) and re.fullmatch(r"C\d+", text)}
    return {name.removeprefix("check_").upper(): text or "" for name, text in checks.items()} | claims


def ids_in_tests() -> set[str]:
    found = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.claim":
                found |= {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
    return found


def ids_in_notebooks() -> set[str]:
    found = set()
    for path in NOTEBOOKS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                found |= set(re.findall(r"\*\*([TC]\d+)\b", cell.source))
    return found


def test_code_states_the_theorems_and_claims() -> None:
    statements = ids_in_code()
    assert statements.keys() >= STATED
    for theorem in statements.keys() - {"C1", "C2", "C3"}:
        statement = statements[theorem]
        assert re.search(rf"\b{theorem}\b", statement) and len(statement.split()) >= 10, theorem


@pytest.mark.parametrize("place", [ids_in_tests, ids_in_notebooks])
def test_every_theorem_and_claim_has_its_partner(place: Callable[[], set[str]]) -> None:
    assert place() == ids_in_code().keys()


# --- notebooks --------------------------------------------------------------------------------------------------

LOCATION = re.compile("|".join([r"/(?:home|root|Users|tmp|var|opt)/", *map(re.escape, {str(ROOT), str(Path.home())})]))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_executed_in_order_and_repeatable(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert "papermill" not in notebook.metadata
    parameters = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) <= 1
    for cell in notebook.cells:
        assert len(cell.source.splitlines()) <= 25, cell.source
        assert not {"papermill", "execution"} & cell.metadata.keys()
    for output in (output for cell in code for output in cell.outputs):
        # progress bars and warnings: they differ from run to run
        assert output.output_type != "error" and output.get("name") != "stderr", output
        shown = json.dumps({k: v for k, v in output.get("data", {}).items() if k != "image/png"})
        shown += output.get("text", "")
        assert not LOCATION.search(shown), shown
        assert not re.search(r"\bat 0x[0-9a-f]+", shown), shown


def test_there_are_notebooks_numbered_in_order() -> None:
    assert NOTEBOOKS
    numbers = [path.stem[:3] for path in NOTEBOOKS]
    assert all(re.fullmatch(r"\d\d_", number) for number in numbers) and len(set(numbers)) == len(numbers)
    assert numbers[0] == "00_"
