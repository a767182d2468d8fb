"""Estimates hold against measurement, and the table says what a user has to know before the start."""

import time
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_folder import put

from cwlib import cells, estimate, placement, study, workers
from cwlib.big import configuration
from cwlib.checkpoint import Checkpoint
from cwlib.checkpoints import initialise
from cwlib.corpus import Passage, passages
from cwlib.estimate import Rates, overview
from cwlib.hub import HUB
from cwlib.placement import Shape
from cwlib.timing import peak_bytes
from cwlib.tiny import ByteTokenizer, random_model

MODELS = {
    "gpt2": {"n_layer": 3, "n_embd": 384, "n_head": 8, "vocab_size": 300},
    "llama": {
        "num_hidden_layers": 2,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 300,
    },
    "bert": {
        "num_hidden_layers": 3,
        "hidden_size": 384,
        "num_attention_heads": 12,
        "intermediate_size": 1024,
        "vocab_size": 300,
    },
}
RATES = Rates(5e10, 1e11)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def own_rate(dtype: torch.dtype) -> float:
    """Of this process, however busy the machine is."""
    matrix, best = torch.randn(1024, 1024, dtype=dtype), float("inf")
    for _ in range(4):
        start = time.process_time()
        matrix @ matrix
        best = min(best, time.process_time() - start)
    return 2 * 1024**3 / best


@pytest.mark.parametrize("name", MODELS)
def test_time_and_memory_are_about_those_that_are_measured(
    name: str, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    """A whole study of a random model of moderate size: time within a factor of three, memory within two."""
    model = random_model(configuration(name, **MODELS[name]), 0, rescale=False).eval().requires_grad_(False)
    checkpoint = Checkpoint("mine", model, ByteTokenizer(), "hash", "float32", "cpu", "float32")
    tokens = 150
    [first, *_] = passages()
    text = Passage("text", "", first.text.encode("ascii", "ignore").decode()[:tokens])
    monkeypatch.setattr(cells, "_identity", lambda _: ("hash", "", checkpoint.kind))

    def opened(_name: str, source: str, seed: int, *_: object) -> Checkpoint:
        return initialise(checkpoint, seed, device="cpu") if source == "init" else checkpoint

    monkeypatch.setattr(workers, "open_weights", opened)
    planned = cells.plan(["mine"], [text])
    list(workers.results([cell for cell in planned if cell.passage is None], "cpu", ()))  # what is loaded once
    spent = []

    def run() -> None:
        start = time.process_time()
        assert len(list(workers.results(planned, "cpu", ()))) == len(planned)
        spent.append(time.process_time() - start)

    shape, rates = Shape.of_model(model), Rates(own_rate(torch.float64), own_rate(torch.float32))
    peak = peak_bytes(run)
    found = estimate.estimate(shape, checkpoint.kind == "decoder", tokens, 1, rates)
    assert 1 / 3 < found.seconds / spent[0] < 3
    # the model was there before; what grows are random weights of its size, and what is beside them
    assert 1 / 2 < found.memory / peak < 2


def test_memory_of_the_range_in_round_numbers() -> None:
    """Weights in single precision dominate; what is kept for the Gaussian null is next."""
    found = {
        name: estimate.estimate(Shape.of(item), item.kind == "decoder", 300, 16, RATES) for name, item in HUB.items()
    }
    for name, item in HUB.items():
        assert 4 * item.parameters < found[name].memory < 4 * item.parameters * 2 + 0.5e9
        less = estimate.estimate(Shape.of(item), item.kind == "decoder", 300, 16, RATES, offloaded=True)
        assert less.seconds > found[name].seconds
        if item.parameters > 1e9:
            assert less.memory < found[name].memory / 1.4
    sizes = [found[name].seconds for name, item in HUB.items() if item.family == "Qwen2.5"]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("more", [{"tokens": 600}, {"passages": 64}, {"decoder": False}, {"rates": Rates(1e10, 2e10)}])
def test_longer_texts_more_of_them_and_slower_machines_take_longer(more: dict) -> None:
    shape = Shape.of(HUB["google-bert/bert-large-uncased"])
    usual = {"decoder": True, "tokens": 300, "passages": 16, "rates": RATES}
    less, longer = (estimate.estimate(shape, **facts) for facts in (usual, usual | more))
    assert longer.seconds > 1.1 * less.seconds and longer.memory >= less.memory


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def pretend(memory: int, *gpus: int) -> None:
        def room(place: torch.device) -> dict[int | str, int]:
            return dict(enumerate(gpus)) if place.type == "cuda" else {"cpu": memory}

        for module in (placement, estimate):
            monkeypatch.setattr(module, "free_memory", room)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")

    return pretend


def lines(found: str) -> dict[str, str]:
    return {line.split()[0]: line for line in found.splitlines() if "/" in line.split()[0]}


def test_the_table_says_where_each_model_will_be(free: Callable, tmp_path: Path) -> None:
    free(24 * 10**9)
    found = overview(HUB, passages(), "auto", RATES)
    on_cpu = lines(found)
    assert set(on_cpu) == set(HUB)
    assert "in memory" in on_cpu["openai-community/gpt2-xl"]
    assert "offloaded to its files" in on_cpu["meta-llama/Llama-3.1-8B"]
    assert "memory: 24.0 GB free" in found and "50 GFLOP/s in double precision, 100 in single" in found
    assert "98.5 GB to download into" in found
    free(10**9)
    assert "which may not suffice" in lines(overview(HUB, passages(), "auto", RATES))["meta-llama/Llama-3.1-8B"]
    free(24 * 10**9, 24 * 10**9, 24 * 10**9, 24 * 10**9)
    found = overview(HUB, passages(), "auto", RATES)
    on_gpus = lines(found)
    assert "in memory" in on_gpus["EleutherAI/pythia-2.8b"] and "on 3 GPUs" in on_gpus["mistralai/Mistral-7B-v0.1"]
    assert found.count("Some GPU: 24.0 GB free") == 3
    free(24 * 10**9, 24 * 10**9)
    assert "offloaded as far as needed" in lines(overview(HUB, passages(), "auto", RATES))["mistralai/Mistral-7B-v0.1"]


def test_what_is_here_counts_as_it_is_and_what_is_unknown_is_said(free: Callable, tmp_path: Path) -> None:
    free(24 * 10**9)
    put(tmp_path / "hub", "openai-community/gpt2", "gpt2", "a" * 40)
    folder = put(tmp_path / "hub", "org/mine", "llama")
    names = ["openai-community/gpt2", "org/mine", str(folder), "org/other", "tiny-bert", "minilm-l6"]
    found = overview(names, passages(), "cpu", RATES).splitlines()
    assert "a" * 12 in found[1] and "here" in found[1] and "0.1 GB" in found[1]
    assert "here" in found[2] and "here" in found[3] and "not here yet" in found[4]
    assert "here" in found[5] and "0.1 GB" in found[6]


def test_rates_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Rates.measured("cpu")
    assert 1e8 < found.double < 1e14 and 1e8 < found.single < 1e14
    assert "GFLOP/s" in study.preview(["tiny-bert"], device="cpu")
    with pytest.raises(ValueError, match="profile: expected"):
        study.preview("nope")


@pytest.mark.parametrize(("seconds", "words"), [(0.2, "1 s"), (80, "80 s"), (600, "10 min"), (7200, "2.0 h")])
def test_durations_read_well(seconds: float, words: str) -> None:
    assert estimate._duration(seconds) == words
