"""Set up every test: type and shape checks at run time, no windows, one thread, a clean repository."""

from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import matplotlib
import pytest

# before any test imports cwlib: annotations of its functions are checked on every call
jaxtyping.install_import_hook("cwlib", "beartype.beartype")
matplotlib.use("Agg")

import torch  # noqa: E402

torch.set_num_threads(1)  # small matrices: a second thread costs more than it brings

ROOT = Path(__file__).resolve().parents[1]
# what tools may write; .gitignore names the same
UNWATCHED = {".git", ".venv", "build", "__pycache__", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"}
# outputs that a test could overwrite without adding a file
WATCHED_CONTENT = {"figures", "notebooks"}


def snapshot(root: Path) -> dict[str, int]:
    """Return the files of the repository; those that hold outputs with the time of their last change."""
    found = {}
    pending = [root]
    while pending:
        for path in pending.pop().iterdir():
            if path.name in UNWATCHED or path.name.endswith(".egg-info"):
                continue
            if path.is_dir():
                pending.append(path)
                continue
            relative = path.relative_to(root)
            found[str(relative)] = path.stat().st_mtime_ns if relative.parts[0] in WATCHED_CONTENT else 0
    return found


@pytest.fixture(autouse=True)
def clean_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send figures to a scratch folder, and fail a test that leaves or changes files in the repository."""
    monkeypatch.setenv("CWLIB_FIGURES", str(tmp_path / "figures"))
    monkeypatch.delenv("CWLIB_NOTEBOOK", raising=False)
    before = snapshot(ROOT)
    yield
    after = snapshot(ROOT)
    touched = sorted(file for file in after if after[file] != before.get(file))
    assert not touched, f"the test left or changed files in the repository: {touched}"


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch off the type checks, which users do not have: they take most of the time, and refuse some inputs first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
