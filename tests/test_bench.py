"""The benchmark's tables say what was measured, its clocks and memory are right, and its large folders are models."""

import gc
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

import cwlib
from cwlib import bench, big, cost, footprint, rivals, timing
from cwlib.__main__ import app
from cwlib.bench import Bench
from cwlib.big import configuration, write_random_checkpoint
from cwlib.catalogue import CheckpointError
from cwlib.checkpoints import open_checkpoint
from cwlib.sizes import PROFILES, Shape, causal_attention, fresh, transports_of
from cwlib.timing import Timing, interleaved, peak_bytes
from cwlib.weights import weight_layers

IDS = [7, 40, 3, 99, 12, 40, 8]
MIB = 2**20
SMOKE = PROFILES["smoke"]
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts memory in /proc")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Spare the garbage collector, which is called before every run that is timed, all that was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


# --- the table ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke() -> tuple[pd.DataFrame, list[str]]:
    """The whole benchmark at tiny sizes, and what it reported; only the first time is memory measured by a process."""
    said: list[str] = []
    asked: list[dict] = []
    process = Bench.footprint

    def footprint_of(self: Bench, **request: object) -> dict[str, float | int]:
        asked.append(request | {"device": self.device})
        if len(asked) == 1:
            return process(self, **request)
        # A process needs seconds to start; but this one may have so much to spare that nothing is taken.
        found = footprint.main(json.loads(json.dumps(asked[-1])))
        return found | {"bytes": max(found["bytes"], 1)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bench, "footprint", footprint_of)
        table = bench.run("smoke", report=said.append)
    ways = [request["way"] for request in asked if "folder" not in request]
    assert ways[0] == "cwlib" and {*ways} == {
        way for way in footprint.WAYS if way != "TransformerLens" or rivals.lens_installed()
    }
    return table, said


@pytest.fixture
def table(smoke: tuple[pd.DataFrame, list[str]]) -> pd.DataFrame:
    return smoke[0]


def compared(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of comparisons in time."""
    return table[(table["unit"] == "s") & table["ratio"].notna()]


def test_every_part_has_its_rows(smoke: tuple[pd.DataFrame, list[str]]) -> None:
    table, said = smoke
    assert list(table.columns) == cost.COLUMNS
    ways = {group: set(rows["way"]) for group, rows in table.groupby("group")}
    lens = rivals.lens_installed()
    captures = {"cwlib", "plain forward", "output_attentions"} | ({"TransformerLens"} if lens else set())
    singular = {"TransformerLens", "TransformerLens, float64", "TransformerLens, by layer"} if lens else set()
    assert ways == {
        "matrix products": {"float64"},
        "singular values": {"cwlib", "dense", "dense, float32"} | singular,
        "edge isometry": {"cwlib", "dense", "batched einsum", "batched einsum, float32"},
        "Laplacian defect": {"cwlib", "dense"},
        "Schmidt values": {"cwlib", "dense"},
        "growth": {str(size) for sizes in SMOKE.growth.values() for size in sizes},
        "capture": captures,
        "capture memory": captures,
        "metrics of weights": {"cwlib"},
        "metrics of weights memory": {"cwlib"},
    }
    assert set(table.loc[table["group"] == "singular values", "case"]) == {shape.name for shape in SMOKE.shapes}
    for group in ways:
        assert any(part.startswith(group) for part in said) or group == "metrics of weights memory", group
    assert not table.duplicated(["group", "case", "way", "tokens"]).any()


def test_values_are_positive_and_between_their_quartiles(table: pd.DataFrame) -> None:
    assert (table["value"] >= 0).all() and table["unit"].isin({"s", "B", "1/s"}).all()
    timed = table[table["repeats"].notna()]
    assert set(timed["unit"]) == {"s"} and (timed["low"] > 0).all()
    assert (timed["low"] <= timed["value"]).all() and (timed["value"] <= timed["high"]).all()
    assert compared(table)["repeats"].between(1, 3).all()
    memory = table[table["unit"] == "B"]
    assert (memory["value"] < 2**30).all() and (memory["value"] % 1 == 0).all()


def test_ratios_are_to_cwlibs_value(table: pd.DataFrame) -> None:
    rated = table[table["ratio"].notna() & (table["group"] != "matrix products")]
    groups = rated.groupby(["group", "case", "tokens"], dropna=False)
    assert set(rated["group"]) == {
        *("singular values", "edge isometry", "Laplacian defect", "Schmidt values", "capture", "capture memory")
    }
    for _, rows in groups:
        (mine,) = rows.loc[rows["way"] == "cwlib", "value"]
        np.testing.assert_allclose(rows["ratio"], rows["value"] / mine, rtol=1e-12)
    products = table[table["group"] == "matrix products"]
    np.testing.assert_allclose(products["ratio"], products["value"] / products["value"].iloc[0], rtol=1e-12)
    assert (products["ratio"].iloc[1:] < 1).all(), "a share of the rate of a large product"


def test_every_other_way_to_a_number_agrees_with_cwlib(table: pd.DataFrame) -> None:
    rows = compared(table)
    rows = rows[rows["group"] != "capture"]
    assert (rows["error"].isna() == (rows["way"] == "cwlib")).all()
    errors = rows.loc[rows["way"] != "cwlib", "error"]
    assert (errors <= 5e-6).all()
    double = rows["way"].isin({"dense", "batched einsum"}) | rows["way"].str.endswith("float64")
    assert (rows.loc[double, "error"] <= 1e-9).all()


def test_what_was_timed_on_a_part_is_said(table: pd.DataFrame) -> None:
    rows = compared(table).set_index(["group", "case", "way"])["sampled"]
    assert ((rows > 0) & (rows <= 1)).all()
    assert rows["singular values", "tiny", "cwlib"] == 1  # both layers
    assert rows["singular values", "tiny grouped", "cwlib"] == 1 / 2  # one layer of two
    assert rows["singular values", "tiny", "dense"] == 2 / 8  # two heads of two layers of four
    assert rows["edge isometry", "tiny", "cwlib"] == 1
    assert rows["edge isometry", "tiny", "dense"] == 3 / 78  # the edges of twelve tokens that see what is before them
    assert rows["edge isometry", "tiny", "batched einsum"] == 24 / 78


def test_growth_covers_every_exponent_of_the_theory(table: pd.DataFrame) -> None:
    fitted = cost.exponents(table)
    assert list(zip(fitted["work"], fitted["variable"], strict=True)) == list(cost.THEORY)
    assert list(fitted["theory"]) == list(cost.THEORY.values())
    assert np.isfinite(fitted["exponent"]).all()


def test_a_table_comes_back_from_its_file(table: pd.DataFrame, tmp_path: Path) -> None:
    cost.write_partial(table.head(2), tmp_path / "new" / "folder")
    cost.write(table, tmp_path / "new" / "folder", timing.machine("cpu"))
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["bench.csv", "bench.json"]
    back = pd.read_csv(tmp_path / "new" / "folder" / "bench.csv")
    pd.testing.assert_frame_equal(back, table, rtol=1e-5, check_dtype=False)
    assert np.allclose(cost.exponents(back)["exponent"], cost.exponents(table)["exponent"], atol=1e-4)
    assert "TransformerLens" in cost.report(back) or not rivals.lens_installed()
    machine = json.loads((tmp_path / "new" / "folder" / "bench.json").read_text())
    assert machine == timing.machine("cpu")
    assert machine["torch"] == torch.__version__ and machine["device"] == "cpu" and machine["threads"] == 1
    assert machine["cores"] >= 1 and machine["processor"]


def test_report_shows_the_rows_and_the_exponents(table: pd.DataFrame) -> None:
    text = cost.report(table)
    assert len(text.splitlines()) == 1 + len(table) + 2 + 1 + len(cost.THEORY)
    assert "batched einsum, float32" in text and "<NA>" not in text and "nan" not in text.lower()


# --- running it ---------------------------------------------------------------------------------------------------


def command(*words: str) -> object:
    return CliRunner().invoke(app, ["bench", *words])


def test_command_line(table: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(
        profile: str, device: str, report: Callable[[str], None], keep: Callable[[pd.DataFrame], None]
    ) -> pd.DataFrame:
        asked.append((profile, device))
        report("a part")
        keep(table.head(3))
        if len(asked) > 1:
            raise KeyboardInterrupt
        return table

    monkeypatch.setattr(bench, "run", run)
    done = command("--profile", "smoke", "--folder", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    assert asked == [("smoke", "cpu")]
    assert "measured: a part" in done.output and cost.report(table) in done.output and "bench.json" in done.output
    assert len(pd.read_csv(tmp_path / "out" / "bench.csv")) == len(table)
    assert not (tmp_path / "out" / "bench.partial.csv").exists()
    # interrupted: the rows so far are kept, and the table of the run before
    assert command("--profile", "smoke", "--folder", str(tmp_path / "out")).exit_code == 130
    assert len(pd.read_csv(tmp_path / "out" / "bench.partial.csv")) == 3
    assert len(pd.read_csv(tmp_path / "out" / "bench.csv")) == len(table)


@pytest.mark.parametrize("device", ["nope", "meta", "cuda:99"])
def test_a_device_that_is_not_there(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = command("--profile", "smoke", "--device", device)
    assert done.exit_code == 1 and done.output.startswith("error: device: ")


def test_unknown_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="profile: expected one of full, smoke, got 'huge'"):
        bench.run("huge")
    done = command("--profile", "huge")
    assert done.exit_code == 1
    assert done.output == "error: profile: expected one of full, smoke, got 'huge'\n"
    assert not list(tmp_path.iterdir())


def test_a_process_that_fails_is_reported_in_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("gemm", "singular_values", "edge_isometry", "operators", "growth", "capture"):
        monkeypatch.setattr(Bench, part, lambda self: self.number("a part", "of it", "cwlib", 1.0, "s"))
    monkeypatch.setattr(Bench, "big", lambda self: self.footprint(folder=str(tmp_path / "nowhere")))
    done = command("--profile", "smoke", "--folder", str(tmp_path / "out"))
    assert done.exit_code == 1
    (said,) = done.output.splitlines()
    assert re.fullmatch(r"error: .* -m cwlib\.footprint \{.*nowhere.*\} failed: .*; rows so far are in .*", said)
    assert f"failed: ValueError: source: there is no folder {tmp_path / 'nowhere'}" in said
    assert len(pd.read_csv(tmp_path / "out" / "bench.partial.csv")) == 6


def test_without_transformerlens_its_rows_are_left_out_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "lens_installed", lambda: False)
    monkeypatch.setattr(Bench, "footprint", lambda *_, **request: {"bytes": 1000.0 * len(request["way"]), "seconds": 1})
    for part in ("gemm", "edge_isometry", "operators", "growth", "big"):
        monkeypatch.setattr(Bench, part, lambda _: None)
    said: list[str] = []
    table = bench.run("smoke", report=said.append)
    ways = {group: set(rows["way"]) for group, rows in table.groupby("group")}
    assert ways == {
        "singular values": {"cwlib", "dense", "dense, float32"},
        "capture": {"cwlib", "plain forward", "output_attentions"},
        "capture memory": {"cwlib", "plain forward", "output_attentions"},
    }
    memory = table[table["group"] == "capture memory"].set_index("way")["ratio"]
    assert memory.to_dict() == {"cwlib": 1.0, "plain forward": 13 / 5, "output_attentions": 17 / 5}
    assert said[-1] == "TransformerLens is not installed and was not measured: pip install 'cwlib[bench]'"


def test_with_transformerlens_nothing_is_said_of_it(smoke: tuple[pd.DataFrame, list[str]]) -> None:
    pytest.importorskip("transformer_lens")
    assert not any("not installed" in part for part in smoke[1])


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
def test_shapes_are_those_of_possible_models(name: str) -> None:
    profile = PROFILES[name]
    for shape in (*profile.shapes, *profile.edges_of):
        assert 1 <= shape.timed <= shape.layers and shape.heads % shape.kv_heads == 0
        assert profile.sample[0] <= shape.heads
    assert all(d_model % heads == 0 for _, d_model, heads in profile.models.values())
    assert {variable for _, variable in cost.THEORY} == profile.growth.keys()
    assert all(len(sizes) > 1 for sizes in profile.growth.values())


def test_layers_are_laid_out_as_in_a_model_and_differ() -> None:
    shape = Shape("", d_model=10, heads=6, kv_heads=2, d_head=4, layers=3, timed=2)
    first, second = transports_of(shape, "cpu")
    assert (first.heads, first.kv_heads, first.d_head, first.d_model, first.groups) == (6, 2, 4, 10, 3)
    assert first.value.is_contiguous() and first.output.stride() == (4, 24, 1), "columns of one matrix"
    assert not torch.equal(first.value, second.value) and first.value.dtype == torch.float32
    assert torch.equal(first.value, transports_of(shape, "cpu")[0].value), "seeded"
    form = first.head_gram
    again = fresh(first)
    assert again.value is first.value and again.output is first.output and again.groups == 3
    assert again.head_gram is not form, "computed anew"


def test_attention_is_causal_and_stochastic() -> None:
    attention = causal_attention(3, 7, "cpu")
    assert attention.shape == (3, 7, 7) and not attention.triu(1).any()
    assert (attention.sum(2) - 1).abs().max() < 1e-6
    assert not torch.equal(attention[0], attention[1])


# --- clocks and memory --------------------------------------------------------------------------------------------


def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of `cwlib.timing` by a number that tests advance."""
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def taking(now: list[float], *seconds: float) -> Callable[[], None]:
    """Work that takes so many seconds, run by run."""
    left: Iterator[float] = iter(seconds)

    def work() -> None:
        now[0] += next(left)

    return work


def test_ways_take_turns_and_are_counted() -> None:
    log: list[str] = []
    ways = {name: lambda name=name: log.append(name) for name in "abc"}
    timings = interleaved(ways, {"a": 3, "b": 1, "c": 2})
    assert "".join(log) == "abc" + "abc" + "ac" + "a", "once before, uncounted"
    assert {name: found.repeats for name, found in timings.items()} == {"a": 3, "b": 1, "c": 2}
    log.clear()
    assert interleaved(ways, 2).keys() == set("abc")
    assert "".join(log) == "abc" * 3


def test_times_are_medians_and_quartiles_without_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = clock(monkeypatch)
    ways = {"slow first": taking(now, 100, 4, 1, 2), "steady": taking(now, 8, 8, 8, 8), "once": taking(now, 5, 7)}
    found = interleaved(ways, {"slow first": 3, "steady": 3, "once": 1})
    assert found == {
        "slow first": Timing(2.0, 1.5, 3.0, 3),
        "steady": Timing(8.0, 8.0, 8.0, 3),
        "once": Timing(7.0, 7.0, 7.0, 1),
    }


def test_time_of_more_work() -> None:
    assert Timing(2.0, 1.0, 3.0, 5).times(2.5) == Timing(5.0, 2.5, 7.5, 5)


def test_rate_of_products_is_that_of_the_best_run(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = iter([0, 10, 10, 12, 20, 24, 30, 33, 40, 48, 50, 59])
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: next(stamps)))
    assert timing.gemm_rate(size=16) == 2 * 16**3 / 2


@linux
@pytest.mark.parametrize("mib", [64, 96])
def test_peak_of_memory_is_what_was_taken_at_a_time(mib: int) -> None:
    def touch(size: int) -> torch.Tensor:
        return torch.ones(size * MIB, dtype=torch.uint8)

    held = touch(150)  # there before, and a higher peak before
    touch(300)
    assert peak_bytes(lambda: touch(mib)) == pytest.approx(mib * MIB, rel=0.25)
    assert peak_bytes(lambda: [touch(mib) is None for _ in range(3)]) == pytest.approx(mib * MIB, rel=0.25)
    assert peak_bytes(lambda: [touch(mib), touch(mib)]) == pytest.approx(2 * mib * MIB, rel=0.25)
    assert peak_bytes(lambda: held.add_(1)) < 8 * MIB


def test_memory_is_counted_on_linux_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timing, "_STATUS", tmp_path / "status")
    with pytest.raises(RuntimeError, match=r"expected Linux, which counts memory in .*, got"):
        peak_bytes(lambda: None)


def test_ways_of_capturing_leave_the_model_as_it_was() -> None:
    model = footprint.gpt2(2, 16, 2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    ids = footprint.token_ids(9)
    assert ids.shape == (1, 9) and ids.min() >= 0 and ids.max() < footprint.VOCABULARY
    assert len(footprint.capture_way("output_attentions", model, ids)().attentions) == 2
    for way in footprint.WAYS:
        if way != "TransformerLens" or rivals.lens_installed():
            footprint.capture_way(way, model, ids)()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


# --- powers of growth ---------------------------------------------------------------------------------------------


def growth(powers: dict[tuple[str, str], float]) -> pd.DataFrame:
    """A table whose values grow with given powers, between rows of other groups."""
    rows = [{"group": "capture", "case": "capture over layers", "way": "cwlib", "value": 1.0}]
    for (work, variable), power in powers.items():
        for size in (3, 6, 12):
            value = 0.01 * size**power
            rows.append({"group": "growth", "case": f"{work} over {variable}", "way": str(size), "value": value})
    return pd.DataFrame(rows)


def test_exponents_are_the_powers_of_a_table_that_grows_with_them() -> None:
    powers = {key: 0.5 * n - 1 for n, key in enumerate(cost.THEORY)}
    fitted = cost.exponents(growth(powers)).set_index(["work", "variable"])
    assert fitted["exponent"].to_dict() == pytest.approx(powers, abs=1e-12)
    assert fitted["theory"].to_dict() == cost.THEORY


def test_exponents_are_least_squares_on_logarithms() -> None:
    table = growth(dict.fromkeys(cost.THEORY, 1.0))
    scattered = (table["case"] == "edge_isometry over heads") & (table["way"] == "6")
    table.loc[scattered, "value"] *= 5  # in the middle, where it does not turn the line
    assert np.allclose(cost.exponents(table)["exponent"], 1.0)
    table.loc[table["way"] == "12", "value"] *= 2
    slopes = cost.exponents(table)["exponent"]
    assert np.allclose(slopes, 1.5)  # log 2 over twice log 2
    last = cost.exponents(table).set_index(["work", "variable"])["last"]
    assert last.pop(("edge_isometry", "heads")) == pytest.approx(2 - np.log2(5))
    assert np.allclose(last, 2.0), "between the two largest sizes alone"


def test_what_was_too_small_to_be_measured_has_no_logarithm() -> None:
    table = growth(dict.fromkeys(cost.THEORY, 1.0)).assign(
        tokens=np.nan, unit="B", sampled=1.0, ratio=np.nan, error=np.nan
    )
    memory = table["case"] == "capture memory over layers"
    table.loc[memory & (table["way"] == "3"), "value"] = 0
    assert np.allclose(cost.exponents(table)[["exponent", "last"]], 1.0)
    text = cost.report(table)
    assert text.endswith("too small to be measured, and left out of the powers: capture memory over layers at 3")
    table.loc[memory & (table["way"] == "6"), "value"] = 0
    fitted = cost.exponents(table).set_index(["work", "variable"])[["exponent", "last"]]
    assert fitted.loc["capture memory", "layers"].isna().all()
    assert np.allclose(fitted.drop(("capture memory", "layers")), 1.0)
    assert cost.report(table).endswith("capture memory over layers at 3, capture memory over layers at 6")
    assert np.isnan(cost.exponents(table[~memory]).set_index("work").loc["capture memory", "exponent"])


def test_markdown_gives_no_ratio_to_nothing() -> None:
    def rows(mine: float, theirs: float) -> pd.DataFrame:
        row = {"group": "capture memory", "case": "tiny", "tokens": 8.0, "unit": "B", "sampled": 1.0}
        return pd.DataFrame([row | {"way": "cwlib", "value": mine}, row | {"way": "plain forward", "value": theirs}])

    assert cost.markdown(rows(2e6, 3e6)).endswith("| capture memory, tiny, 8 tokens | 2 MB | plain forward 1.5 |")
    assert cost.markdown(rows(2e6, 0.0)).endswith("| capture memory, tiny, 8 tokens | 2 MB | plain forward 0 |")
    assert cost.markdown(rows(0.0, 3e6)).endswith("| capture memory, tiny, 8 tokens | 0 MB | plain forward – |")


# --- large folders ------------------------------------------------------------------------------------------------

TINY = {
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 100,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64},
    "bert": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 100,
    },
}


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big, "SHARD", 8000)


@pytest.mark.claim("T2")
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("family", TINY)
def test_a_random_folder_is_a_checkpoint(
    family: str, shards: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if shards:
        request.getfixturevalue("small_shards")
    folder = tmp_path / "model"
    parameters = write_random_checkpoint(configuration(family, **TINY[family]), folder)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == shards
    opened = open_checkpoint(folder, device="cpu", dtype="bfloat16")
    assert opened.parameters == parameters and opened.precision == "bfloat16"
    residuals = [layer.residual() for layer in cwlib.layers(opened, IDS)]
    assert len(residuals) == 2 and max(residuals) <= 4e-2
    found = list(weight_layers(folder))
    assert [layer.transports.d_model for layer in found] == [32, 32]
    assert footprint.measure_weights(str(folder)) == 2
    total = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert total == 2 * parameters


@pytest.mark.parametrize("room", [1000, 8000])
def test_files_are_full_but_not_too_large(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(big, "SHARD", room)
    write_random_checkpoint(configuration("llama", **TINY["llama"]), tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    sizes = []
    for path in sorted(tmp_path.glob("*.safetensors")):
        weights = load_file(path)
        assert {index[name] for name in weights} == {path.name}
        sizes.append([weight.numel() * 2 for weight in weights.values()])
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert all(sum(some) <= room or len(some) == 1 for some in sizes) and [] not in sizes
    assert all(sum(some) + max(after) > room for some, after in pairwise(sizes)), "the next did not fit"
    assert sum(map(len, sizes)) == len(index)


def test_weights_are_seeded_and_of_the_size_that_keeps_vectors(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> dict[str, torch.Tensor]:
        write_random_checkpoint(configuration("bert", **TINY["bert"]), tmp_path / name, seed)
        (path,) = (tmp_path / name).glob("*.safetensors")
        return load_file(path)

    first, same, other = weights("first", 0), weights("same", 0), weights("other", 1)
    values = "encoder.layer.0.attention.self.value.weight"
    assert all(torch.equal(weight, same[name]) for name, weight in first.items())
    assert not torch.equal(first[values], other[values])
    assert not torch.equal(first[values], first[values.replace("layer.0", "layer.1")])
    for name, weight in first.items():
        assert weight.dtype == torch.bfloat16
        if weight.ndim == 2:
            assert float(weight.double().std()) == pytest.approx(weight.shape[1] ** -0.5, rel=0.15), name
            assert abs(float(weight.double().mean())) < 0.2 * weight.shape[1] ** -0.5, name
        else:
            assert (weight == (1 if name.endswith("weight") else 0)).all(), name


def test_drawing_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    write_random_checkpoint(configuration("gpt2", **TINY["gpt2"]), tmp_path)
    assert torch.equal(before, torch.get_rng_state())


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(ValueError, match=r"folder: expected an empty or new folder, got .* with files in it"):
        write_random_checkpoint(configuration("llama", **TINY["llama"]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_run_leaves_no_model(
    error: BaseException | type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, save = [], big.save_file

    def interrupt(*arguments: object) -> None:
        if written:
            raise error
        written.append(save(*arguments))

    monkeypatch.setattr(big, "save_file", interrupt)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        write_random_checkpoint(configuration("llama", **TINY["llama"]), tmp_path / "model")
    assert written and list((tmp_path / "model").glob("*.safetensors"))
    for way in (open_checkpoint, weight_layers):
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            way(tmp_path / "model")
