"""One checkpoint on one text (`python -m cwlib measure`), and what the machine has (`python -m cwlib doctor`)."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from typer.testing import CliRunner

import cwlib
from cwlib import doctor, single
from cwlib.__main__ import app
from cwlib.catalogue import CATALOGUE
from cwlib.checkpoints import Checkpoint, open_checkpoint, tiny_checkpoint
from cwlib.synthetic import gaussian_transports
from cwlib.walk import ConnectionWalk

TEXT = "The lamp on the pier goes out at four; the boats know it."


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return tiny_checkpoint("llama")


@pytest.fixture(scope="module")
def table(checkpoint: Checkpoint) -> pd.DataFrame:
    return pd.concat(single.measured_layers(checkpoint, TEXT), ignore_index=True)


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    checkpoint.model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


# --- the table --------------------------------------------------------------------------------------------------------


def test_trained_rows_are_what_measure_gives(checkpoint: Checkpoint, table: pd.DataFrame) -> None:
    for gauge in ("mean", "norm"):
        for layer in cwlib.layers(checkpoint, TEXT):
            expected = cwlib.measure(layer, gauge=gauge)
            rows = table[(table["source"] == "trained") & (table["layer"] == layer.index)]
            rows = rows[rows["gauge"].isin(["", gauge])]
            assert dict(zip(rows["metric"], rows["value"], strict=True)) == pytest.approx(
                expected, rel=1e-9, nan_ok=True
            )


def test_gaussian_rows_are_those_of_the_twin(checkpoint: Checkpoint, table: pd.DataFrame) -> None:
    for layer in cwlib.layers(checkpoint, TEXT):
        twin = ConnectionWalk.from_transports(
            layer.walk.attention, gaussian_transports(layer.walk.transports, layer.index)
        )
        rows = table[(table["source"] == "gaussian") & (table["layer"] == layer.index)].set_index("metric")["value"]
        for name in ("edge_isometry", "head_isometry", "laplacian_defect"):
            assert rows[name] == pytest.approx(cwlib.measure(twin, [name])[name], rel=1e-9)


def test_depth_runs_from_zero_to_one(table: pd.DataFrame) -> None:
    assert table["depth"].min() == 0 and table["depth"].max() == 1


def test_undefined_values_have_a_reason(checkpoint: Checkpoint, table: pd.DataFrame) -> None:
    assert ((table["note"] == "") == np.isfinite(table["value"])).all()
    notes = table[table["note"] != ""].groupby("note")["metric"].agg(set).to_dict()
    assert notes == {
        "there is no layer before": {"depth_step", "operator_cosine", "spectral_step"},
        "under causal attention nothing flows back": {"inverse_defect"},
    }
    short = pd.concat(single.measured_layers(checkpoint, TEXT[:8], ["sink_mass", "edge_isometry"]))
    assert set(short["note"]) == {"", "it takes 9 tokens or more"}
    assert "sink_mass is not defined at any layer: it takes 9 tokens or more" in single.report(short)
    sinks = pd.concat(single.measured_layers(tiny_checkpoint("gpt_oss"), TEXT, ["entropy_rate"]))
    assert sinks["value"].isna().sum() == (sinks["gauge"] == "mean").sum() > 0
    assert set(sinks["note"]) == {
        "",
        "learned sinks take a part of the attention, so that the rows of W do not sum to one",
    }


def test_the_report_has_a_range_on_every_line(table: pd.DataFrame) -> None:
    lines = {words[0]: words for line in single.report(table).splitlines() if (words := line.split())}
    assert lines["head_isometry"][1:3] == ["(0,", "1]"] and lines["entropy_rate"][1:5] == ["[0,", "log", "n]", "nats"]
    first = table[(table["metric"] == "head_isometry") & (table["source"] == "trained") & (table["layer"] == 0)]
    assert lines["head_isometry"][3] == f"{first['value'].item():.4g}"
    assert "depth_step is not defined at layer 0: there is no layer before" in single.report(table)


def test_chosen_metrics_only(checkpoint: Checkpoint) -> None:
    rows = pd.concat(single.measured_layers(checkpoint, TEXT, ["sink_mass", "head_isometry"]))
    assert set(rows["metric"]) == {"sink_mass", "head_isometry"}


@pytest.mark.parametrize("name", ["isometry", "singular_spectrum", "layer_cosines"])
def test_a_metric_that_is_no_number_is_refused(checkpoint: Checkpoint, name: str) -> None:
    with pytest.raises(ValueError, match="metrics: expected names out of"):
        single.measured_layers(checkpoint, TEXT, [name])


def test_an_interrupted_run_keeps_the_finished_layers(table: pd.DataFrame, tmp_path: Path) -> None:
    def interrupted() -> Iterator[pd.DataFrame]:
        yield table[table["layer"] == 0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        single.collect(interrupted(), tmp_path / "table.csv")
    assert set(pd.read_csv(tmp_path / "table.csv")["layer"]) == {0}


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_measure_writes_a_table_and_a_figure(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, "utf-8")
    opened = open_checkpoint(folder, tokenizer=tiny_checkpoint("llama").tokenizer)
    monkeypatch.setattr("cwlib.checkpoints.open_checkpoint", lambda *_, **__: opened)
    out, figure = tmp_path / "out" / "table.csv", tmp_path / "out" / "depth.png"
    status, output = run("measure", folder, "--text", text, "--out", out, "--figure", figure)
    assert status == 0, output
    rows = pd.read_csv(out, keep_default_na=False)
    assert list(rows.columns) == single.COLUMNS and set(rows["source"]) == {"trained", "gaussian"}
    assert figure.read_bytes().startswith(b"\x89PNG") and f"{len(rows)} rows" in output
    assert "(0, 1]" in output and "depth_step is not defined at layer 0" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such-model", "--text", "{text}"), ("source: unknown name",)),
        (("{folder}", "--text", "missing.txt"), ("text: expected a file", "does not exist")),
        (("{folder}", "--text", "{folder}"), ("text: expected one file",)),
        (("{folder}", "--text", "{text}", "--figure", "depth.bmp"), ("figure: expected a .png",)),
        (("{folder}", "--text", "{text}"), ("no tokenizer",)),
        (("{folder}", "--text", "{text}", "--dtype", "int8"), ("dtype: expected one of",)),
    ],
)
def test_measure_refuses(folder: Path, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, "utf-8")
    status, output = run("measure", *(a.format(folder=folder, text=text) for a in arguments))
    assert status == 1
    for word in words:
        assert word in output.replace("\n", " ")


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and no connections."""
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def findings() -> dict[str, doctor.Finding]:
    return {finding.about: finding for finding in doctor.examine()}


@pytest.mark.usefixtures("bare")
def test_a_sound_machine_passes() -> None:
    found = findings()
    assert found["torch"].found == torch.__version__ and found["torch"].verdict == "ok"
    assert found["cuda" if not torch.cuda.is_available() else "cuda:0"].verdict != "fails"
    assert all(found[name].found == "not cached" for name in CATALOGUE)
    assert "HF_HUB_OFFLINE" in found["hub"].found
    lines: list[str] = []
    assert doctor.report(iter(found.values()), lines.append) and len(lines) == len(found)


@pytest.mark.usefixtures("bare")
def test_a_missing_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.version

    def without(name: str) -> str:
        if name == "gguf":
            raise PackageNotFoundError(name)
        return "1.0" if name == "pandas" else real(name)

    monkeypatch.setattr(doctor, "version", without)
    found = findings()
    assert found["gguf"].verdict == "fails" and "pip install 'gguf" in found["gguf"].advice
    assert found["pandas"].verdict == "note" and "pip install 'pandas" in found["pandas"].advice
    assert not doctor.report(iter(found.values()), lambda _: None)


@pytest.mark.usefixtures("bare")
def test_a_cache_that_is_no_folder_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "file"))
    found = findings()["cache"]
    assert found.verdict == "fails" and "CWLIB_CACHE" in found.advice


@pytest.mark.usefixtures("bare")
def test_little_memory_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**30})())
    found = findings()["memory"]
    assert found.verdict == "note" and "qwen2.5-coder-1.5b" in found.advice and "minilm-l6" not in found.advice


def test_a_hub_that_does_not_answer_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # the port of discard: closed
    [found] = doctor._hub()
    assert found.verdict == "note" and "not reached" in found.found


@pytest.mark.usefixtures("bare")
def test_doctor_tells_all(monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = run("doctor")
    assert status == 0 and "torch" in output and "hub" in output
    monkeypatch.setenv("CWLIB_CACHE", "/dev/null/none")
    assert run("doctor")[0] == 1
