"""The table is complete, reproducible, and never computed twice, whatever interrupts it."""

import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse.linalg import svds
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import cwlib
from cwlib import cells, profiles, study, workers
from cwlib.cells import Cell
from cwlib.checkpoints import initialise, tiny_checkpoint
from cwlib.corpus import Passage
from cwlib.metrics import METRICS
from cwlib.synthetic import gaussian_transports

TEXTS = (
    Passage("first", "two short sentences", "A short text, of two lines. It is here."),
    Passage("second", "numbers", "Another one: 1, 2, 3; then 4 and 5!!"),
)
NAMES = ("tiny-bert", "tiny-llama")
CONTROL, SCHEMES = "tiny-bert", ("q4_1", "q5_0")
LAYERS, HEADS = 3, 4
GRAPH = {"depth_step", "spectral_step", "reversibility_defect", "spectral_gap", "entropy_rate", "sink_mass"}
STEPS = {"depth_step", "spectral_step", "operator_cosine"}  # not defined at the first layer
WEIGHTS_ONLY = {"head_isometry", "sum_isometry", "symmetry", "identity_alignment"}
ON_TEXT = {"schmidt_participation", "single_walk_error", "edge_isometry", "holonomy_defect"}
ON_TEXT |= {"norm_cv", "angle_correlation", "operator_cosine", "laplacian_defect", "metric_defect", "inverse_defect"}
ON_TEXT |= {"metric_balance_defect", "mass", "dirichlet_energy", "parallel_defect"}
GRID = [f"{i / 10 - 1:g}" for i in range(41)]  # eigenvalues at which a spectral density is reported
RANKS = [f"{i / 20:g}" for i in range(21)]  # relative, at which singular values are reported
ONCE = {"spectral_density", "spectral_density_error", "spectrum_lowest", "spectrum_highest", "layer_cosines"}
KEYS = ["checkpoint", "source", "seed", "passage", "layer", "metric", "gauge", "at"]
FILES = ("study.csv", "cells.csv", "glossary.csv", "study.parquet")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of its own for each test."""
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "study"


def run(folder: Path | None, profile: str | tuple = "smoke", texts: tuple = TEXTS, **options: object) -> pd.DataFrame:
    return study.run(profile, folder=folder, texts=texts, progress=False, **options)


def small(folder: Path | None, **options: object) -> pd.DataFrame:
    """A part of the smoke study: one checkpoint, one text."""
    return run(folder, **{"profile": ("tiny-bert",), "texts": TEXTS[:1], **options})


SMALL_CELLS = 11  # trained, Gaussian and three initialised sets of weights: alone, and on the text; shuffled heads


@dataclass(frozen=True)
class Smoke:
    table: pd.DataFrame
    folder: Path
    cache: Path


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Smoke:
    """One smoke study for all tests, with what it left; they copy it and change their copy."""
    folder, cache = (tmp_path_factory.mktemp(name) for name in ("data", "cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CWLIB_CACHE", str(cache))
        return Smoke(run(folder), folder, cache / "study")


@pytest.fixture
def warm(smoke: Smoke, cache: Path) -> Path:
    """A cache in which all cells of the smoke study are."""
    return shutil.copytree(smoke.cache, cache)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch, unchecked: None) -> list[Cell]:
    """The cells that a run computes, as they are computed."""
    done = []
    evaluate = workers.evaluate

    def counting(cell: Cell, *rest: object) -> pd.DataFrame:
        done.append(cell)
        return evaluate(cell, *rest)

    monkeypatch.setattr(workers, "evaluate", counting)
    return done


def content(folder: Path) -> dict[str, bytes]:
    return {file: (folder / file).read_bytes() for file in FILES}


def assert_equal(left: pd.DataFrame, right: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(left, right, check_exact=True)


def assert_close(left: pd.DataFrame, right: pd.DataFrame) -> None:
    assert list(left[KEYS].itertuples(index=False)) == list(right[KEYS].itertuples(index=False))
    np.testing.assert_allclose(left["value"], right["value"], rtol=1e-5)


# --- what is in the table -----------------------------------------------------------------------------------------


def expected_rows() -> Iterator[tuple]:
    variants = [("trained", 0), ("gaussian", 0), ("init", 0), ("init", 1), ("init", 2)]
    variants += [(source, 0) for source in ("shuffled", "sinkless", *SCHEMES)]
    for name, (source, seed), layer in itertools.product(NAMES, variants, range(LAYERS)):
        decoder = name == "tiny-llama"
        if (source == "sinkless" and not decoder) or (source in SCHEMES and name != CONTROL):
            continue  # token 0 is a sink in decoders
        if source not in ("shuffled", "sinkless"):  # which leave the weights alone
            places = [(metric, "") for metric in WEIGHTS_ONLY] + [("singular_spectrum", at) for at in RANKS]
            yield from ((name, source, seed, "-", layer, metric, "", at) for metric, at in places)
        for text in TEXTS:
            gauges = ("norm",) if source in ("gaussian", "shuffled") else ("mean", "norm")  # these nulls keep W
            places = [(metric, gauge, "") for metric in GRAPH for gauge in gauges]
            places += [(metric, "", "") for metric in ON_TEXT]
            places += [("schmidt_spectrum", "", str(rank)) for rank in range(1, HEADS + 1)]
            if source == "trained":
                places.append(("t2_residual", "", ""))
            if text == TEXTS[0] and source in ("trained", "gaussian"):
                places += [(f"spectral_density{end}", "", at) for end in ("", "_error") for at in GRID]
                places += [("spectrum_lowest", "", ""), ("spectrum_highest", "", "")]
            if text == TEXTS[0] and source in ("trained", "gaussian", "sinkless"):
                places += [("layer_cosines", "", str(earlier)) for earlier in range(layer)]
            for metric, gauge, at in places:
                no_way_back = decoder and metric == "inverse_defect"
                of_maps = source == "shuffled" and metric in {"norm_cv", "angle_correlation"}
                if not no_way_back and not of_maps and (layer > 0 or metric not in STEPS):
                    yield name, source, seed, text.name, layer, metric, gauge, at


def test_the_table_holds_each_expected_row_once_in_order(smoke: Smoke) -> None:
    table = smoke.table
    assert list(table.columns) == [*KEYS, "value"]
    assert list(table[KEYS].itertuples(index=False, name=None)) == sorted(expected_rows())
    assert np.isfinite(table["value"]).all()


def in_range(value: float, bounds: str) -> bool:
    """Whether a value lies where the glossary says, as in "(0, 1]"; H heads, at most n tokens of one byte each."""
    open_ended = {">= 0": value >= 0, "< 1": value < 1, "real": np.isfinite(value)}
    if bounds in open_ended:
        return bool(open_ended[bounds])
    longest = max(len(text.text) for text in TEXTS)
    ends = bounds.removesuffix(" nats").replace("log n", str(math.log(longest))).replace("H", str(HEADS))
    low, high = map(float, ends[1:-1].split(", "))
    slack = 1e-12  # rounding may cross a closed end
    above = value > low if ends[0] == "(" else value >= low - slack
    return above and (value < high if ends[-1] == ")" else value <= high + slack)


@pytest.mark.parametrize("name", METRICS)
def test_values_lie_in_the_range_that_the_glossary_gives(smoke: Smoke, name: str) -> None:
    values = smoke.table.loc[smoke.table["metric"] == name, "value"]
    assert values.nunique() > 1
    assert all(in_range(value, METRICS[name].range) for value in values)
    assert not in_range(float("nan"), METRICS[name].range)


def test_the_t2_residual_is_at_rounding(smoke: Smoke) -> None:
    table = smoke.table
    assert table.loc[table["metric"] == "t2_residual", "value"].max() <= 1e-5


def test_values_are_those_of_the_metrics_on_the_captured_layers(smoke: Smoke) -> None:
    table = smoke.table.set_index(KEYS)["value"]
    weights = {
        ("trained", 0): tiny_checkpoint("llama"),
        ("init", 2): initialise(tiny_checkpoint("llama"), 2),
    }
    for (source, seed), checkpoint in weights.items():
        for layer in cwlib.layers(checkpoint, TEXTS[1].text):
            for name, gauge in itertools.product(METRICS, ("mean", "norm")):
                passage = "-" if name in WEIGHTS_ONLY else TEXTS[1].name
                key = ("tiny-llama", source, seed, passage, layer.index, name, gauge if name in GRAPH else "", "")
                if key in table.index and (name in GRAPH or gauge == "mean"):
                    assert table[key] == pytest.approx(cwlib.measure(layer, [name], gauge)[name], rel=1e-5)


def test_the_gaussian_null_keeps_the_attention_and_nothing_else(smoke: Smoke) -> None:
    table = smoke.table.set_index(KEYS)["value"]
    dense, attention = [], []
    for layer in cwlib.layers(tiny_checkpoint("llama"), TEXTS[0].text):
        null = gaussian_transports(layer.walk.transports, seed=layer.index)
        assert null.value.shape == layer.walk.value.shape
        value = null.value.repeat_interleave(2, 0).numpy()  # two query heads share a value head
        dense.append(np.einsum("hda,hae->hde", null.output.numpy(), value))
        attention.append(layer.walk.attention.double().numpy())

    def operator(layer: int) -> np.ndarray:
        """K as the n^2 x d^2 matrix whose rows are the vectorised blocks."""
        return attention[layer].reshape(HEADS, -1).T @ dense[layer].reshape(HEADS, -1)

    def found(layer: int, metric: str, gauge: str = "", passage: str = TEXTS[0].name) -> float:
        return table["tiny-llama", "gaussian", 0, passage, layer, metric, gauge, ""]

    for layer in range(LAYERS):
        k = operator(layer)
        squares = svds(k, HEADS, return_singular_vectors=False) ** 2
        assert found(layer, "schmidt_participation") == pytest.approx(squares.sum() ** 2 / (squares**2).sum(), rel=1e-5)
        total = dense[layer].sum(0)
        alignment = np.trace(total) / (np.sqrt(len(total)) * np.linalg.norm(total))
        assert found(layer, "identity_alignment", passage="-") == pytest.approx(alignment, rel=1e-5)
        if layer:
            before = operator(layer - 1)
            cosine = (before * k).sum() / (np.linalg.norm(before) * np.linalg.norm(k))
            assert found(layer, "operator_cosine") == pytest.approx(cosine, rel=1e-5)
            flows = []
            for n in (layer - 1, layer):
                flow = np.linalg.norm(operator(n), axis=1).reshape(attention[n].shape[1:])
                flows.append(flow / flow.sum(1, keepdims=True))
            step = np.abs(flows[1] - flows[0]).sum(1).mean() / 2
            assert found(layer, "depth_step", "norm") == pytest.approx(step, rel=1e-5)


def test_the_columns_say_where_each_cell_came_from(smoke: Smoke) -> None:
    origin = pd.read_csv(smoke.folder / "cells.csv", keep_default_na=False)
    identity = ["checkpoint", "source", "seed", "passage"]
    assert set(origin[identity].itertuples(index=False, name=None)) == {row[:4] for row in expected_rows()}
    assert origin["key"].is_unique and not origin.duplicated(identity).any()
    assert set(origin["kind"]) == {"encoder", "decoder"}
    assert set(origin["dtype"]) == {"float32"}
    stored = dict(zip(origin["source"], origin["stored_as"], strict=True))
    assert stored.pop("q4_1") == "Q4_1" and stored.pop("q5_0") == "Q5_0"
    assert set(stored.values()) == {"float32"}
    sha = {name: tiny_checkpoint(name.removeprefix("tiny-")).sha256 for name in NAMES}
    assert dict(zip(origin["checkpoint"], origin["sha256"], strict=True)) == sha
    assert set(origin["torch"]) == {torch.__version__.split("+")[0]}


def test_the_glossary_explains_every_metric_and_column(smoke: Smoke) -> None:
    glossary = pd.read_csv(smoke.folder / "glossary.csv", keep_default_na=False)
    assert glossary["name"].is_unique
    assert set(METRICS) <= set(glossary["name"])
    assert set(smoke.table.columns) <= set(glossary["name"])
    assert (glossary["meaning"].str.len() > 20).all()


def test_load_adds_kind_precision_and_depth(smoke: Smoke) -> None:
    table, folder = smoke.table, smoke.folder
    loaded = study.load(folder)
    assert list(loaded.columns) == [*table.columns, "kind", "stored_as", "depth"]
    assert_close(loaded, table)
    kinds = dict(zip(loaded["checkpoint"], loaded["kind"], strict=True))
    assert kinds == {"tiny-bert": "encoder", "tiny-llama": "decoder"}
    assert (loaded["depth"] == loaded["layer"] / 2).all()


@pytest.mark.parametrize("last", [False, True])
def test_load_gives_the_precision_of_the_trained_weights_not_of_a_rounded_copy(
    smoke: Smoke, tmp_path: Path, last: bool
) -> None:
    folder = shutil.copytree(smoke.folder, tmp_path / "data")
    origin = pd.read_csv(folder / "cells.csv", keep_default_na=False)
    # whichever way the lines lie, the rounded copies all before or all behind the others
    order = origin["source"].isin(SCHEMES).sort_values(ascending=last, kind="stable").index
    origin.loc[order].to_csv(folder / "cells.csv", index=False)
    loaded = study.load(folder)
    assert set(SCHEMES) <= set(loaded["source"]) and set(loaded["stored_as"]) == {"float32"}


def test_the_parquet_file_is_the_table_with_each_row_s_origin(smoke: Smoke) -> None:
    rows = pd.read_csv(smoke.folder / "study.csv", keep_default_na=False, dtype={"at": str})
    origin = pd.read_csv(smoke.folder / "cells.csv", keep_default_na=False)
    beside = origin.set_index(["checkpoint", "source", "seed", "passage"])
    joined = rows.join(beside, on=beside.index.names)
    pd.testing.assert_frame_equal(pd.read_parquet(smoke.folder / "study.parquet"), joined, check_dtype=False)
    assert len(joined) == len(smoke.table) and joined["key"].notna().all()


def test_load_of_a_folder_without_a_study_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder: expected study\.csv and cells\.csv in .*run cwlib\.study\.run"):
        study.load(tmp_path)


# --- which cells there are ------------------------------------------------------------------------------------------

MANY = tuple(Passage(f"text {n}", "", f"Some words, {n} of them.") for n in range(9))
SPREAD = [MANY[n].name for n in (0, 3, 5, 8)]  # four passages, as evenly as whole numbers allow


def planned(control: tuple[str, ...]) -> dict[tuple[str, str, int], dict[str, set[str]]]:
    """Metrics by passage, for every set of weights."""
    found: dict[tuple[str, str, int], dict[str, set[str]]] = {}
    listed = cells.plan(NAMES, MANY, control)
    for cell in listed:
        found.setdefault((cell.checkpoint, cell.source, cell.seed), {})[cell.passage_name] = set(cell.metrics)
    assert sum(map(len, found.values())) == len(listed) == len({cell.key for cell in listed})
    return found


def test_the_plan_has_all_passages_for_trained_and_rounded_weights_and_four_for_nulls() -> None:
    found = planned((CONTROL,))
    names = [text.name for text in MANY]
    nulls = {("gaussian", 0): ["-", *SPREAD], ("shuffled", 0): SPREAD}
    nulls |= {("init", seed): ["-", *SPREAD] for seed in range(3)}
    both = {("trained", 0): ["-", *names]} | nulls
    expected = {(name, *source): passages for name in NAMES for source, passages in both.items()}
    expected |= {(CONTROL, scheme, 0): ["-", *names] for scheme in SCHEMES}
    expected["tiny-llama", "sinkless", 0] = SPREAD
    assert {weights: sorted(passages) for weights, passages in found.items()} == {
        weights: sorted(passages) for weights, passages in expected.items()
    }


def test_without_a_control_nothing_is_rounded() -> None:
    assert {source for _, source, _ in planned(())}.isdisjoint(SCHEMES)
    assert {name for name, source, _ in planned(("tiny-gpt2",)) if source in SCHEMES} == set()


def test_the_plan_measures_what_takes_seconds_on_the_first_passage_of_few_sources() -> None:
    everywhere = GRAPH | ON_TEXT | {"schmidt_spectrum"}
    for (_, source, _), passages in planned((CONTROL,)).items():
        for name, metrics in passages.items():
            if name == "-":
                assert metrics == WEIGHTS_ONLY | {"singular_spectrum"}
                continue
            extra = {"t2_residual"} if source == "trained" else set()
            if name == SPREAD[0] and source in ("trained", "gaussian"):
                extra |= ONCE
            elif name == SPREAD[0] and source == "sinkless":
                extra |= {"layer_cosines"}
            lost = {"norm_cv", "angle_correlation"} if source == "shuffled" else set()
            assert metrics == (everywhere | extra) - lost, (source, name)


def test_rounded_weights_measure_near_the_trained_ones_and_the_nearer_the_more_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    mine = str(saved(tmp_path / "mine", hidden_size=64, head_dim=16))  # rows of whole blocks: all maps are rounded
    monkeypatch.setitem(study.PROFILES, "smoke", ((mine,), (mine,)))
    table = run(None, texts=TEXTS[:1])
    by_place = ["passage", "layer", "metric", "gauge", "at"]
    values = {source: rows.set_index(by_place)["value"] for source, rows in table.groupby("source") if source != "init"}
    trained = values["trained"]
    trained = trained[~trained.index.isin(ONCE | {"t2_residual"}, level="metric")]
    distance = {}
    for scheme in SCHEMES:
        assert set(values[scheme].index) == set(trained.index)
        change = (values[scheme] - trained).abs()
        assert (change.groupby("metric").max() > 0).all()
        assert (change.groupby(["passage", "layer"]).max() > 0).all()
        distance[scheme] = (change / (values["gaussian"] - trained).abs()).median()
    assert distance["q5_0"] < distance["q4_1"] < 0.5  # of the distance to maps drawn at random


# --- nothing is computed twice ------------------------------------------------------------------------------------


def test_a_second_run_computes_nothing_and_leaves_the_files_alone(tmp_path: Path, computed: list) -> None:
    first = small(tmp_path)
    before = content(tmp_path)
    assert len(computed) == SMALL_CELLS
    small(tmp_path)
    assert content(tmp_path) == before
    assert_equal(small(None), first)  # from the cache
    assert len(computed) == SMALL_CELLS


def test_committed_rows_are_reused_without_the_cache(smoke: Smoke, tmp_path: Path, cache: Path, computed: list) -> None:
    folder = shutil.copytree(smoke.folder, tmp_path / "data")
    assert not cache.exists()
    table = run(folder)
    assert computed == []
    assert content(folder) == content(smoke.folder)
    assert_close(table, smoke.table)  # the file keeps six digits


@pytest.mark.parametrize("stop", [3, SMALL_CELLS - 1])
def test_an_interrupted_run_resumes_with_the_missing_cells_only(
    stop: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Path, computed: list
) -> None:
    right = small(tmp_path / "uninterrupted")
    assert computed == []
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "another cache"))
    counting = workers.evaluate

    def dying(cell: Cell, *rest: object) -> pd.DataFrame:
        if len(computed) == stop:
            raise KeyboardInterrupt
        return counting(cell, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "evaluate", dying)
        with pytest.raises(KeyboardInterrupt):
            small(tmp_path / "interrupted")
    assert len(computed) == stop
    assert_equal(small(tmp_path / "interrupted"), right)
    assert len(computed) == len({cell.key for cell in computed}) == SMALL_CELLS
    assert content(tmp_path / "interrupted") == content(tmp_path / "uninterrupted")


def test_fresh_computes_every_cell_again_to_the_last_bit(tmp_path: Path, warm: Path, computed: list) -> None:
    first = small(tmp_path)
    before = content(tmp_path)
    assert computed == []
    assert_equal(small(tmp_path, fresh=True), first)
    assert len(computed) == SMALL_CELLS
    assert content(tmp_path) == before


@pytest.mark.parametrize(("metric", "count"), [("symmetry", 5), ("entropy_rate", 6), ("t2_residual", 1)])
def test_a_new_version_of_a_metric_computes_its_cells_again(
    metric: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Path, computed: list
) -> None:
    before = small(tmp_path)
    changed = replace(METRICS[metric], version=2, compute=lambda _layer, _gauge: 0.25)
    monkeypatch.setitem(METRICS, metric, changed)
    after = small(tmp_path)
    assert len(computed) == count
    assert all(metric in cell.metrics for cell in computed)
    mine = after["metric"] == metric
    assert mine.any() and (after.loc[mine, "value"] == 0.25).all()
    assert_close(after[~mine], before[before["metric"] != metric])


def test_a_changed_text_is_measured_again(tmp_path: Path, warm: Path, computed: list) -> None:
    small(tmp_path)
    edited = replace(TEXTS[0], text=TEXTS[0].text + " More.")
    table = small(tmp_path, texts=(edited,))
    assert [cell.passage for cell in computed] == [edited] * 6
    assert not table.duplicated(KEYS).any()
    layer = next(iter(cwlib.layers(tiny_checkpoint("bert"), edited.text)))
    key = "tiny-bert", "trained", 0, edited.name, 0, "entropy_rate", "mean", ""
    assert table.set_index(KEYS)["value"][key] == pytest.approx(
        cwlib.measure(layer, ["entropy_rate"])["entropy_rate"], rel=1e-5
    )


@pytest.mark.parametrize("kept", ["cache", "folder"])
def test_names_follow_the_corpus_though_rows_are_kept_by_content(
    kept: str, tmp_path: Path, warm: Path, computed: list
) -> None:
    folder = tmp_path / "data" if kept == "folder" else None
    small(folder)
    table = small(folder, texts=(replace(TEXTS[0], name="renamed"),))
    assert set(table["passage"]) == {"-", "renamed"}
    assert computed == []


def test_one_text_under_two_names_is_measured_under_both(warm: Path) -> None:
    twice = (TEXTS[0], replace(TEXTS[0], name="copy"))
    table = small(None, texts=twice)
    assert not table.duplicated(KEYS).any()
    table = table[~table["metric"].isin(ONCE)]  # of the first only
    a, b = (table.loc[table["passage"] == text.name, "value"].tolist() for text in twice)
    assert a == b and len(a) > 0


def test_a_checkpoint_named_twice_is_measured_once(warm: Path) -> None:
    assert_equal(small(None, profile=("tiny-bert", "tiny-bert")), small(None))


# --- damage -------------------------------------------------------------------------------------------------------


def test_rows_of_other_checkpoints_in_the_folder_stay(tmp_path: Path, warm: Path) -> None:
    first = run(tmp_path, ("tiny-bert",))
    second = run(tmp_path, ("tiny-llama",))
    assert set(second["checkpoint"]) == {"tiny-llama"}
    both = study.load(tmp_path)
    assert len(both) == len(first) + len(second) and set(both["checkpoint"]) == {"tiny-bert", "tiny-llama"}
    run(tmp_path, ("tiny-llama",), fresh=True)
    assert len(study.load(tmp_path)) == len(both)


def test_half_written_files_do_not_matter(tmp_path: Path, warm: Path, smoke: Smoke, computed: list) -> None:
    finished = sorted(warm.glob("*.parquet"))
    for path in (*finished, *warm.glob("*.json")):
        (warm / f".{path.name}.4711").write_bytes(b"half")
    finished[0].unlink()
    for file in FILES:
        (tmp_path / f".{file}.4711").write_bytes(b"half")
    assert_equal(run(tmp_path), smoke.table)
    assert content(tmp_path) == content(smoke.folder)
    assert [cell.key for cell in computed] == [finished[0].stem]


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 7])


def drop_rows(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-20]))


def garble(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00garbled" * 40)


def other_text(path: Path) -> None:
    path.write_text("hello,\nworld,\n")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def assert_repaired_or_explained(attempt: Callable[[], pd.DataFrame], right: pd.DataFrame, path: Path) -> None:
    """Damage may be repaired, or refused by an error that names the file; it may not pass unnoticed."""
    try:
        table = attempt()
    except (ValueError, RuntimeError) as error:
        assert path.name in str(error)
    else:
        assert_close(table, right)


@pytest.mark.parametrize("damage", [truncate, drop_rows, garble, other_text, empty, remove])
@pytest.mark.parametrize("file", ["study.csv", "cells.csv"])
def test_damaged_tables_are_repaired_or_named(
    file: str, damage: Callable, smoke: Smoke, warm: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(smoke.folder, tmp_path / "data")
    damage(folder / file)
    assert_repaired_or_explained(lambda: run(folder), smoke.table, folder / file)


@pytest.mark.parametrize("damage", [truncate, garble, empty, remove])
@pytest.mark.parametrize("suffix", [".parquet", ".json"])
def test_damaged_cells_of_the_cache_are_computed_again_or_named(
    suffix: str, damage: Callable, smoke: Smoke, warm: Path
) -> None:
    victim = min(warm.glob(f"*{suffix}"))
    damage(victim)
    assert_repaired_or_explained(lambda: run(None), smoke.table, victim)


def test_a_failed_write_leaves_the_earlier_tables_whole(
    tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path)
    before = content(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        small(tmp_path)
    assert content(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(FILES)


# --- what can be asked for ----------------------------------------------------------------------------------------


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"profile: expected one of smoke, wheels, hub.* got 'nope'"):
        study.run("nope")


def test_a_string_for_one_checkpoint_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"for one checkpoint write \['minilm-l6'\]"):
        study.run("minilm-l6")


def test_an_unknown_checkpoint_is_refused_before_anything_is_computed(computed: list) -> None:
    with pytest.raises(ValueError, match="unknown name 'nope'"):
        small(None, profile=("tiny-bert", "nope"))
    assert computed == []


def test_a_hub_organisation_called_tiny_is_no_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def outlined(name: str) -> cwlib.Checkpoint:
        asked.append(name)
        return tiny_checkpoint("bert")

    monkeypatch.setattr(cells, "outline", outlined)
    cells.plan(("tiny-random/bert",), texts=TEXTS)
    assert asked == ["tiny-random/bert"]


def test_the_smoke_profile_takes_the_built_in_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def accept(cell: Cell, checkpoint: cwlib.Checkpoint, *_: object) -> pd.DataFrame:
        if cell.passage is not None:
            cwlib.layers(checkpoint, cell.passage.text)  # raises if the text does not fit
        return pd.DataFrame([(cell.checkpoint, cell.source, cell.seed, cell.passage_name, 0, "metric", "", "", 0.0)])

    monkeypatch.setattr(workers, "evaluate", lambda *given: accept(*given).set_axis([*KEYS, "value"], axis=1))
    table = study.run("smoke", progress=False)
    assert len(set(table["passage"]) - {"-"}) >= 2


def saved(folder: Path, **overrides: int) -> Path:
    """A checkpoint of the user's own, in the hub's layout, with a tokenizer of words."""
    tiny_checkpoint("llama", seed=5, **overrides).model.save_pretrained(folder)
    words = sorted({word for text in TEXTS for word in text.text.split()})
    vocabulary = {"[UNK]": 0} | {word: n for n, word in enumerate(words, 3)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return saved(tmp_path / "mine")


def test_a_local_folder_is_a_checkpoint(local: Path, tmp_path: Path, computed: list) -> None:
    table = small(tmp_path / "data", profile=(str(local),))
    assert set(table["checkpoint"]) == {str(local)}
    assert set(table["source"]) == {"trained", "gaussian", "init", "shuffled", "sinkless"}
    assert table.loc[table["metric"] == "t2_residual", "value"].max() <= 1e-5
    assert set(study.load(tmp_path / "data")["kind"]) == {"decoder"}
    moved = local.rename(local.with_name("moved"))
    again = small(None, profile=(str(moved),))
    assert len(computed) == SMALL_CELLS + 1  # a decoder; the same weights, under another name, are not measured again
    assert set(again["checkpoint"]) == {str(moved)}


def test_another_configuration_of_the_same_weights_is_measured_anew(local: Path, tmp_path: Path) -> None:
    before = {cell.key for cell in cells.plan((str(local),), texts=TEXTS[:1])}
    config = json.loads((local / "config.json").read_text())
    key = next(k for k in ("layer_norm_eps", "rms_norm_eps") if k in config)
    (local / "config.json").write_text(json.dumps(config | {key: 0.5}))
    assert before.isdisjoint(cell.key for cell in cells.plan((str(local),), texts=TEXTS[:1]))


def test_rows_of_another_run_under_the_same_name_are_not_taken_for_these(tmp_path: Path, warm: Path) -> None:
    """study.csv written, cells.csv not: the run was stopped between the two."""
    small(tmp_path)
    lines = (tmp_path / "cells.csv").read_bytes()
    small(tmp_path, texts=(replace(TEXTS[0], text="Quite another text."),))
    (tmp_path / "cells.csv").write_bytes(lines)
    assert_close(small(tmp_path), small(None))


@pytest.mark.parametrize(
    ("texts", "words"),
    [(("hello",), "read_passages"), ((TEXTS[0], replace(TEXTS[1], name=TEXTS[0].name)), "different names")],
)
def test_texts_that_cannot_be_told_apart_are_refused(texts: tuple, words: str, unchecked: None, cache: Path) -> None:
    with pytest.raises(ValueError, match=words):
        study.run("smoke", texts=texts)


# --- tables and cells of other versions, and damage that still reads ------------------------------------------------


def test_a_table_without_the_column_at_is_computed_anew(tmp_path: Path, warm: Path, smoke: Smoke) -> None:
    """As an earlier version wrote it."""
    for file in FILES:
        shutil.copy(smoke.folder / file, tmp_path)
    old = pd.read_csv(tmp_path / "study.csv", keep_default_na=False, dtype={"at": str})
    old[old["at"] == ""].drop(columns="at").to_csv(tmp_path / "study.csv", index=False)
    run(tmp_path)
    assert content(tmp_path) == content(smoke.folder)


@pytest.mark.parametrize(
    "damage", ["rows left out", "of another cell", "column gone", "text for numbers", "empty origin"]
)
def test_cells_of_the_cache_that_read_but_are_wrong_are_computed_again(
    damage: str, tmp_path: Path, cache: Path, unchecked: None
) -> None:
    before = small(tmp_path)
    shutil.rmtree(tmp_path / "data", ignore_errors=True)
    for file in FILES:
        (tmp_path / file).unlink()
    first, second = sorted(cache.glob("*.parquet"))[:2]
    rows = pd.read_parquet(first)
    changed = {
        "rows left out": rows.iloc[:3],
        "of another cell": pd.read_parquet(second),
        "column gone": rows.drop(columns="at"),
        "text for numbers": rows.assign(value="x"),
        "empty origin": rows,
    }[damage]
    changed.to_parquet(first, index=False)
    if damage == "empty origin":
        first.with_suffix(".json").write_text("{}")
    assert_equal(small(tmp_path), before)


def test_a_layer_without_transport_does_not_stop_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pruned layer: what is not defined there is left out, the rest is measured."""
    opened = cells.open_weights

    def pruned(*given: object) -> cwlib.Checkpoint:
        checkpoint = opened(*given)
        torch.nn.init.zeros_(checkpoint.model.get_submodule("layers.1.self_attn.o_proj").weight)
        return checkpoint

    monkeypatch.setattr(workers, "open_weights", pruned)
    table = run(None, ("tiny-llama",), TEXTS[:1])
    rows = table[(table["source"] == "trained") & (table["layer"] == 1)]
    assert {"entropy_rate", "sink_mass"} <= set(rows.loc[rows["gauge"] == "mean", "metric"])
    assert not set(rows.loc[rows["gauge"] == "norm", "metric"]) and "spectral_density" not in set(rows["metric"])
    assert np.isfinite(table["value"]).all()


def test_two_studies_into_one_folder_keep_each_others_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    compute = study._compute

    def meanwhile(*arguments: object) -> None:
        compute(*arguments)
        monkeypatch.setattr(study, "_compute", compute)
        study.run(["tiny-bert"], tmp_path, TEXTS[:1], progress=False)

    monkeypatch.setattr(study, "_compute", meanwhile)
    study.run(["tiny-gpt2"], tmp_path, TEXTS[:1], progress=False)
    assert set(study.load(tmp_path)["checkpoint"]) == {"tiny-bert", "tiny-gpt2"}


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"folder: expected one that can be written, got .*file is not; name another"):
        study.run(["tiny-gpt2"], tmp_path / name, TEXTS[:1], progress=False)
    assert not (tmp_path / "cache").exists()


def test_cells_of_other_types_are_refused_before_anything_is_written(tmp_path: Path, unchecked: None) -> None:
    study.run(["tiny-gpt2"], tmp_path, TEXTS[:1], progress=False)
    cells = pd.read_csv(tmp_path / "cells.csv", dtype={"threads": str}, keep_default_na=False)
    cells.loc[0, "threads"] = "many"
    cells.to_csv(tmp_path / "cells.csv", index=False)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}
    with pytest.raises(ValueError, match=r"folder: expected in .*cells\.csv what a study wrote"):
        study.run(["tiny-bert"], tmp_path, TEXTS[:1], progress=False)
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*.*")}


def test_one_checkpoint_that_cannot_be_read_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture, unchecked: None
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    (broken / "model.safetensors").write_text("")
    with pytest.raises(study.Incomplete) as caught:
        study.run([str(broken), "tiny-gpt2"], None, TEXTS[:1], device="cpu")
    assert set(caught.value.table["checkpoint"]) == {"tiny-gpt2"} and list(caught.value.failed) == [str(broken)]
    assert f"{broken}: " in study.preview([str(broken), "tiny-gpt2"], TEXTS[:1], "cpu")
    assert "cannot be read" in capsys.readouterr().err


def test_one_folder_in_two_spellings_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    names, _, _ = profiles.asked_for(["model", f"{tmp_path}/model/", "tiny-gpt2", "model"], TEXTS[:1])
    assert names == ("model", "tiny-gpt2")


def test_a_changed_vocabulary_is_seen_without_a_fast_tokenizer() -> None:
    def tokenizer(*words: str) -> SimpleNamespace:
        return SimpleNamespace(get_vocab=lambda: {word: n for n, word in enumerate(words)}, init_kwargs={"case": True})

    assert cells._content(tokenizer("a", "b")) == cells._content(tokenizer("a", "b"))
    assert cells._content(tokenizer("a", "b")) != cells._content(tokenizer("b", "a"))


def test_the_only_checkpoints_error_says_which_it_was(monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    monkeypatch.setattr("cwlib.workers.evaluate", lambda *_: (_ for _ in ()).throw(RuntimeError("odd model")))
    with pytest.raises(cwlib.CheckpointError, match=r"^tiny-gpt2: RuntimeError: odd model"):
        study.run(["tiny-gpt2"], None, TEXTS[:1], progress=False, fresh=True)
