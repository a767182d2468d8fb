"""Styles are pure and distinct; saved figures are byte-stable and recorded."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from cwlib import style

CATALOGUE = {
    "minilm-l6": "encoder",
    "mpnet-base": "encoder",
    "smollm2-135m": "decoder",
    "gemma3-270m": "decoder",
    "qwen2.5-coder-0.5b": "decoder",
    "qwen2.5-coder-1.5b": "decoder",
}

DRAW = """
import sys
from pathlib import Path
import matplotlib.pyplot as plt
from cwlib import style
with plt.rc_context(style.rc("text")):
    fig, ax = plt.subplots()
    ax.plot([0, 1], [1, 0], label=r"$\\Omega_{ij}$", **style.checkpoint("minilm-l6", "encoder"))
    ax.set_title("byte-stable")
    ax.legend()
    style.save_figure(fig, "lines", Path(sys.argv[1]), notebook="07")
"""


def draw() -> plt.Figure:
    fig, ax = plt.subplots()
    ax.plot([0, 1])
    return fig


@pytest.mark.parametrize(("width", "inches"), [("column", 3.3), ("text", 6.8)])
def test_figure_is_as_wide_as_its_column_and_legible(width: str, inches: float, tmp_path: Path) -> None:
    parameters = style.rc(width, aspect=0.5)
    with plt.rc_context(parameters):
        _, png = style.save_figure(draw(), "wide", tmp_path)
    assert plt.imread(png).shape[:2] == (round(0.5 * inches * 200), round(inches * 200))
    sizes = {k: v for k, v in parameters.items() if k.endswith("size") and k.split(".")[0] != "figure"}
    assert min(v for k, v in sizes.items() if k != "lines.markersize") >= 7
    assert parameters == style.rc(width, aspect=0.5)


@pytest.mark.parametrize("arguments", [("page", 0.6), ("text", 0.0), ("text", float("nan"))])
def test_rc_names_a_bad_argument(arguments: tuple[str, float]) -> None:
    with pytest.raises(ValueError, match=r"^(width|aspect): expected .* got .*"):
        style.rc(*arguments)


def test_catalogue_styles_are_distinct_in_colour_and_kinds_in_shape() -> None:
    styles = {name: style.checkpoint(name, kind) for name, kind in CATALOGUE.items()}
    assert len({s["color"] for s in styles.values()} | {style.NULL["color"]}) == len(styles) + 1
    for attribute in ("marker", "linestyle"):
        encoders, decoders = (
            {styles[name][attribute] for name, kind in CATALOGUE.items() if kind == wanted}
            for wanted in ("encoder", "decoder")
        )
        assert not encoders & decoders
        assert style.NULL[attribute] not in encoders | decoders


def test_other_checkpoints_get_a_style_that_depends_on_the_name_alone() -> None:
    names = [f"model-{i}" for i in range(60)]
    first = {name: style.checkpoint(name, "decoder") for name in names}
    again = {name: style.checkpoint(name, "decoder") for name in reversed(names)}
    assert first == again
    assert {s["color"] for s in first.values()} == set(style.PALETTE)
    assert {s["marker"] for s in first.values()}.isdisjoint(
        style.checkpoint(name, "encoder")["marker"] for name in names
    )


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind: expected one of .* got 'seq2seq'"):
        style.checkpoint("t5", "seq2seq")


def test_files_repeat_byte_for_byte_in_another_process_and_carry_no_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-c", DRAW, str(tmp_path / "one")], check=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["", str(tmp_path / "two")])
        exec(DRAW, {})
    for file in ("lines.pdf", "lines.png", "manifest.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    pdf = (tmp_path / "one" / "lines.pdf").read_bytes()
    assert b"/Creator (cwlib)" in pdf and b"CreationDate" not in pdf
    assert b"Software" not in (tmp_path / "one" / "lines.png").read_bytes()


def test_manifest_holds_hashes_versions_and_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CWLIB_NOTEBOOK", "07_graphs")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    files = style.save_figure(draw(), "b", tmp_path)
    style.save_figure(draw(), "a", tmp_path, notebook="08_transports")
    monkeypatch.delenv("CWLIB_NOTEBOOK")
    style.save_figure(draw(), "b", tmp_path)  # by hand: still the figure of its notebook
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert list(manifest) == ["a", "b"]
    assert manifest["a"]["notebook"] == "08_transports"
    assert manifest["b"]["notebook"] == "07_graphs"
    assert manifest["b"]["threads"] == 2
    assert set(manifest["b"]["packages"]) == {"matplotlib", "numpy", "torch", "transformers"}
    assert manifest["b"]["sha256"] == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pdf", "a.png", "b.pdf", "b.png", "manifest.json"]


@pytest.mark.parametrize("name", ["", "a.pdf", "../a", "A", "a b"])
def test_bad_figure_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name: expected lower-case letters"):
        style.save_figure(draw(), name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_figures_go_where_the_variable_says_else_to_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CWLIB_FIGURES", str(tmp_path / "elsewhere"))
    assert style.figures_dir() == tmp_path / "elsewhere"
    assert style.save_figure(draw(), "a")[0].parent == tmp_path / "elsewhere"
    monkeypatch.delenv("CWLIB_FIGURES")
    assert style.figures_dir() == Path(__file__).resolve().parents[1] / "figures"
    monkeypatch.setattr(style, "__file__", str(tmp_path / "site-packages" / "cwlib" / "style.py"))
    with pytest.raises(ValueError, match="CWLIB_FIGURES: expected a folder"):
        style.figures_dir()
