"""The paper's range from a fake hub: what is there is measured, what is not is told in seconds, nothing is lost."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pandas as pd
import pytest
import torch
from hub_folder import TEXTS, commit_of, no_network, put
from transformers import AutoConfig, AutoModel
from typer.testing import CliRunner

import cwlib
from cwlib import hub, network, placement, sources, study, verdicts
from cwlib.__main__ import app
from cwlib.catalogue import CATALOGUE, CheckpointError, HubUnreachable
from cwlib.checkpoints import open_checkpoint, outline, tiny_checkpoint
from cwlib.claims import evidence_table
from cwlib.hub import HUB
from cwlib.loading import quiet

GPT2, MEDIUM, LARGE = (f"openai-community/gpt2{size}" for size in ("", "-medium", "-large"))
BERT, LLAMA, QWEN = "google-bert/bert-base-uncased", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-0.5B"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub's cache, an empty cache of our own, and a hub that was not asked yet."""
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(network._asked, "silent until", -1.0)
    sources._tell.cache_clear()
    return tmp_path / "hub"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under HF_HUB_OFFLINE=1."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def tried() -> Iterator[list[object]]:
    """The network is off; what was tried all the same."""
    with no_network() as found:
        yield found


# --- the list -------------------------------------------------------------------------------------------------------

# what the list does not hold, but a configuration needs: type, width of the MLP, and what else differs from defaults
REST = {
    "GPT-2": ("gpt2", {768: 3072, 1024: 4096, 1280: 5120, 1600: 6400}, {}),
    "Pythia": ("gpt_neox", {512: 2048, 768: 3072, 1024: 4096, 2048: 8192, 2560: 10240, 4096: 16384}, {}),
    "BERT": ("bert", {768: 3072, 1024: 4096}, {}),
    "RoBERTa": ("roberta", {768: 3072, 1024: 4096}, {"max_position_embeddings": 514, "type_vocab_size": 1}),
    "ModernBERT": ("modernbert", {768: 1152, 1024: 2624}, {}),
    "Qwen2.5": ("qwen2", {896: 4864, 1536: 8960, 2048: 11008, 3584: 18944}, {}),
    "Llama 3.1": ("llama", {4096: 14336}, {}),
    "Mistral": ("mistral", {4096: 14336}, {}),
}


def test_the_list_is_the_paper_s_range() -> None:
    counts = {"GPT-2": 4, "Pythia": 7, "BERT": 2, "RoBERTa": 2, "ModernBERT": 2, "Qwen2.5": 4, "Llama 3.1": 1}
    assert Counter(item.family for item in HUB.values()) == counts | {"Mistral": 1}
    assert study.PROFILES["hub"] == (tuple(HUB), ())
    assert not set(HUB) & set(CATALOGUE)
    for name, item in HUB.items():
        assert item.name == name and item.kind == ("encoder" if "BERT" in item.family else "decoder")
        assert item.revision is None or (len(item.revision) == 40 and int(item.revision, 16))
    assert len({item.revision for item in HUB.values()}) == len(HUB)
    assert {name for name, item in HUB.items() if item.gated} == {LLAMA, "mistralai/Mistral-7B-v0.1"}
    ladder = [item.parameters for item in HUB.values() if item.family == "Pythia"]
    assert ladder == sorted(ladder)
    assert hub.known(GPT2) is HUB[GPT2] and hub.known("minilm-l6") is CATALOGUE["minilm-l6"] and hub.known("x") is None


@pytest.mark.parametrize("name", HUB)
def test_the_list_s_numbers_are_those_of_the_architecture(name: str) -> None:
    item = HUB[name]
    kind, widths, more = REST[item.family]
    inner = "n_inner" if kind == "gpt2" else "intermediate_size"
    fields = {"hidden_size": item.d_model, "num_hidden_layers": item.layers, "num_attention_heads": item.heads}
    fields |= {"num_key_value_heads": item.kv_heads} if item.kv_heads < item.heads else {}
    fields |= {"vocab_size": item.vocabulary, inner: widths[item.d_model], **more}
    with quiet(), torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(kind, **fields))
    assert placement.Shape.of_model(model) == placement.Shape.of(item)
    assert item.heads * item.d_head == item.d_model


def test_download_sizes_are_those_of_files_on_the_hub() -> None:
    """Sizes of model.safetensors as published; files of GPT-2 hold causal masks too."""
    published = {"EleutherAI/pythia-1b": 2_090_701_528, "EleutherAI/pythia-6.9b": 9_911_600_880 + 3_937_278_816}
    published |= {BERT: 440_449_768, "answerdotai/ModernBERT-large": 1_583_544_840}
    for name, size in published.items():
        assert HUB[name].download_bytes == pytest.approx(size, rel=0.05)


# --- with the network off -------------------------------------------------------------------------------------------


def test_what_is_local_opens_without_a_single_attempt_to_connect(cache: Path, tried: list, tmp_path: Path) -> None:
    snapshot = put(cache, GPT2, "gpt2", HUB[GPT2].revision)
    folder = shutil.copytree(snapshot, tmp_path / "mine")
    for source in (GPT2, folder, str(snapshot), tiny_checkpoint("bert").model):
        opened = open_checkpoint(source, device="cpu")
        assert len(list(cwlib.layers(opened, [5, 6, 7, 8]))) == 3
    assert outline(GPT2).kind == "decoder" and sum(1 for _ in cwlib.weight_layers(GPT2)) == 3
    assert study.run([GPT2], None, TEXTS[:1], progress=False)["checkpoint"].nunique() == 1
    assert tried == []


def test_the_commit_of_a_snapshot_is_known(cache: Path, tried: list) -> None:
    snapshot = put(cache, GPT2, "gpt2", HUB[GPT2].revision)
    assert open_checkpoint(GPT2, device="cpu").revision == open_checkpoint(snapshot, device="cpu").revision
    assert outline(GPT2).revision == HUB[GPT2].revision
    assert cwlib.checkpoints.initialise(GPT2, 0, device="cpu").revision == HUB[GPT2].revision
    assert tiny_checkpoint("gpt2").revision == "" and tried == []


@pytest.mark.parametrize("main", [True, False])
def test_the_pinned_commit_is_preferred(cache: Path, tried: list, main: bool) -> None:
    put(cache, GPT2, "gpt2", commit_of("another"), n_layer=4)
    put(cache, GPT2, "gpt2", HUB[GPT2].revision, main)
    assert outline(GPT2).revision == HUB[GPT2].revision and outline(GPT2).model.config.n_layer == 3
    assert tried == []


def test_another_commit_is_taken_where_there_is_no_network_and_it_is_said(
    cache: Path, offline: None, tried: list, capsys: pytest.CaptureFixture
) -> None:
    put(cache, GPT2, "gpt2", commit_of("another"))
    assert outline(GPT2).revision == open_checkpoint(GPT2, device="cpu").revision == commit_of("another")
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and HUB[GPT2].revision[:12] in told and commit_of("another")[:12] in told
    assert tried == []


def test_a_model_of_which_a_part_is_there_is_not_taken_for_whole(cache: Path, offline: None) -> None:
    snapshot = put(cache, GPT2, "gpt2", HUB[GPT2].revision)
    (snapshot / "model.safetensors").rename(snapshot / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HubUnreachable, match="not whole, in the hub's cache"):
        open_checkpoint(GPT2)


def test_an_id_that_is_not_there_fails_at_once_when_the_hub_is_switched_off(offline: None, tried: list) -> None:
    start = time.monotonic()
    with pytest.raises(HubUnreachable, match=r"gpt2: .*unset HF_HUB_OFFLINE, or fetch it .*hf download.*HF_HOME"):
        open_checkpoint(GPT2)
    assert time.monotonic() - start < 2 and tried == []


def test_a_hub_that_cannot_be_reached_is_asked_once_for_all(tried: list, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    ask = network.answers
    monkeypatch.setattr(network, "answers", lambda: asked.append(time.monotonic()) or ask())
    start = time.monotonic()
    for name in HUB:
        with pytest.raises(HubUnreachable, match=r"cannot be reached.*check the network.*HF_ENDPOINT"):
            open_checkpoint(name)
    assert len(asked) == 1 and len(tried) >= 1
    assert time.monotonic() - start < network.SECONDS
    monkeypatch.setattr(network.time, "monotonic", lambda: start + network.PAUSE + 10)
    assert network.why_unreachable() and len(asked) == 2, "later it is asked again"


def test_a_hub_that_is_silent_does_not_hold_us_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "SECONDS", 0.3)
    session = SimpleNamespace(head=lambda *_, **__: time.sleep(20))
    monkeypatch.setattr(network, "get_session", lambda: session)
    start = time.monotonic()
    assert "cannot be reached" in network.why_unreachable()
    assert time.monotonic() - start < 5
    monkeypatch.setattr(network, "get_session", lambda: SimpleNamespace(head=lambda *_, **__: None))
    assert "cannot be reached" in network.why_unreachable(), "for a while"
    monkeypatch.setitem(network._asked, "silent until", -1.0)
    assert network.why_unreachable() == ""


# --- the study ------------------------------------------------------------------------------------------------------


@pytest.fixture
def range_on_disk(cache: Path) -> Path:
    """Six of the range, tiny: a ladder of three sizes, an encoder, one to be offloaded; the gated one is not there."""
    for name, width in ((GPT2, 24), (MEDIUM, 36), (LARGE, 48)):
        put(cache, name, "gpt2", HUB[name].revision, hidden_size=width)
    put(cache, BERT, "bert", HUB[BERT].revision)
    put(cache, QWEN, "qwen2")  # of another commit than the one that is pinned
    return cache


def hub_client(refused: dict[str, Exception], otherwise: Exception) -> object:
    """A hub's client that answers with errors, and finds what is in the cache."""
    download = huggingface_hub.snapshot_download

    def client(repo: str, local_files_only: bool, **options: object) -> str:
        if local_files_only:
            return download(repo, local_files_only=True, **options)
        raise refused.get(repo, otherwise)

    return client


def error(kind: str) -> Exception:
    response = SimpleNamespace(headers={}, request=None, status_code=401)
    return getattr(huggingface_hub.errors, kind)("401 Client Error", response=response)


@pytest.mark.claim("C3")
def test_the_study_measures_what_is_there_and_tells_the_rest(
    range_on_disk: Path,
    tried: list,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unchecked: None,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(sources, "why_unreachable", lambda: "")
    answer = hub_client({LLAMA: error("GatedRepoError")}, error("RepositoryNotFoundError"))
    monkeypatch.setattr(sources, "snapshot_download", answer)
    monkeypatch.setattr("cwlib.study.overview", lambda *_: "what it will take")
    place, offloaded = placement.place_model, []

    def too_large(shape: placement.Shape, *rest: object) -> placement.Placement:
        if shape.kv_heads < shape.heads:  # as if Qwen did not fit
            offloaded.append(shape)
            return placement.Placement("files")
        return place(shape, *rest)

    monkeypatch.setattr(cwlib.checkpoints, "place_model", too_large)
    put(range_on_disk, QWEN, "qwen2", HUB[QWEN].revision)
    with pytest.raises(study.Incomplete) as caught:
        study.run("hub", tmp_path / "data", TEXTS)
    there = {GPT2, MEDIUM, LARGE, BERT, QWEN}
    assert set(caught.value.failed) == set(HUB) - there, [caught.value.failed.get(name) for name in there]
    assert set(caught.value.table["checkpoint"]) == there
    told = str(caught.value)
    assert f"{len(HUB) - 5} of {len(HUB)} checkpoints could not be measured" in told
    assert told.count("no such model") == 1 and told.count("hf auth login` with a token") == 1
    assert f"{LLAMA}: its authors grant access on request: ask on its page, https://huggingface.co/{LLAMA}" in told
    err = capsys.readouterr().err
    assert err.startswith("what it will take") and err.count("is left out") == 2, (
        "every reason is told when it comes up"
    )
    assert len(offloaded) == 4, "trained weights and three that are initialised"
    assert tried == []

    cells = pd.read_csv(tmp_path / "data" / "cells.csv", keep_default_na=False)
    commits = {name: HUB[name].revision for name in sorted(there)}
    assert dict(zip(cells["checkpoint"], cells["revision"], strict=True)) == commits == study.commits(tmp_path / "data")
    assert set(cells.groupby("checkpoint").size()) == {17, 19}  # encoders have no sink to remove
    table = study.load(tmp_path / "data")
    assert table.loc[table["metric"] == "t2_residual", "value"].max() <= 1e-5
    kinds = dict(zip(table["checkpoint"], table["kind"], strict=True))
    assert kinds == {name: HUB[name].kind for name in there}
    assert set(table["stored_as"]) == {"float32"}

    evidence = evidence_table(table)
    assert verdicts.model_groups(evidence)["family GPT-2"] == [GPT2, MEDIUM, LARGE]
    scale = verdicts.scale_table(table, evidence, verdicts.parameter_counts(tmp_path / "data"))
    ladder = scale[scale["group"] == "family GPT-2"]
    assert set(ladder["models"]) == {3} and ladder["slope"].notna().all()
    assert set(ladder["rests on"]) == {"C2"}, "C1 rests on steps between layers; those of three layers have no thirds"
    assert not any("Qwen" in group for group in scale["group"]), "one model is no ladder"


def test_a_second_run_computes_nothing_and_still_tells_what_is_missing(
    range_on_disk: Path, offline: None, tried: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    monkeypatch.setitem(study.PROFILES, "hub", ((GPT2, LLAMA), ()))
    with pytest.raises(study.Incomplete) as first:
        study.run("hub", tmp_path, TEXTS[:1], progress=False)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")}
    monkeypatch.setattr("cwlib.workers.evaluate", lambda *_: pytest.fail("computed again"))
    start = time.monotonic()
    with pytest.raises(study.Incomplete) as again:
        study.run("hub", tmp_path, TEXTS[:1], progress=False)
    assert time.monotonic() - start < 10
    pd.testing.assert_frame_equal(first.value.table, again.value.table, rtol=1e-5)
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")}
    assert str(first.value) == str(again.value) and list(again.value.failed) == [LLAMA] and tried == []


def test_of_one_checkpoint_its_own_error_is_raised(offline: None) -> None:
    with pytest.raises(HubUnreachable, match=rf"^{GPT2}: it is not, or not whole, in the hub's cache"):
        study.run([GPT2], None, TEXTS[:1], progress=False)
    with pytest.raises(study.Incomplete, match=r"2 of 2 checkpoints") as caught:
        study.run([GPT2, BERT], None, TEXTS[:1], progress=False)
    assert caught.value.table.empty


def test_the_command_says_what_it_will_take_what_it_did_and_what_failed(range_on_disk: Path, tmp_path: Path) -> None:
    """In a process of its own, with HF_HOME as a user sets it; the network is a port at which nobody listens."""
    home = tmp_path / "home"
    home.mkdir()
    shutil.copytree(range_on_disk, home / "hub")
    (tmp_path / "text.txt").write_text(TEXTS[0].text)
    command = ["-m", "cwlib", "study", "--checkpoint", GPT2, "--checkpoint", LLAMA, "--folder", str(tmp_path / "out")]
    environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
    environment.pop("HF_HUB_CACHE", None)
    ran = subprocess.run(
        [sys.executable, *command, "--texts", str(tmp_path / "text.txt")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    assert ran.stderr.index("in memory") < ran.stderr.index(f"cwlib: {LLAMA} is left out")
    assert "error: 1 of 2 checkpoints could not be measured" in ran.stderr
    assert f"rows of 1 checkpoints in {tmp_path / 'out'}" in ran.stdout
    assert f"{GPT2}: commit {HUB[GPT2].revision}" in ran.stdout


def test_a_dry_run_downloads_and_computes_nothing(range_on_disk: Path, tried: list, tmp_path: Path) -> None:
    folder = tmp_path / "nothing"
    words = ["study", "--profile", "hub", "--dry-run", "--device", "cpu", "--folder", str(folder)]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    lines = {name: next(line for line in found.output.splitlines() if f"{name} " in line) for name in HUB}
    assert "here" in lines[GPT2] and HUB[GPT2].revision[:12] in lines[GPT2]
    assert "16.1 GB" in lines[LLAMA] and "gated" in lines[LLAMA]
    assert f"https://huggingface.co/{LLAMA} and" in found.output and "hf auth login" in found.output
    assert all(word in found.output for word in ("GFLOP/s", "to download into", "In all about", "memory:"))
    assert tried == [] and not folder.exists() and not (tmp_path / "cache").exists()


def test_errors_of_the_list_of_names_come_before_anything(range_on_disk: Path, offline: None) -> None:
    with pytest.raises(ValueError, match="unknown name 'nope'"):
        study.run([GPT2, "nope"], None, TEXTS[:1], progress=False)
    with pytest.raises(ValueError, match=r"profile: expected one of smoke, wheels, hub or a list"):
        study.run("hubs")
    assert issubclass(study.Incomplete, CheckpointError)
