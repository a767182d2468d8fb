"""A committed study is reproduced as it is, and a number that was changed is found and named."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jaxtyping
import pandas as pd
import pytest
from typer.testing import CliRunner

from cwlib import study
from cwlib.__main__ import app
from cwlib.corpus import Passage
from cwlib.metrics import METRICS
from cwlib.verdicts import derived_tables
from cwlib.verify import Verification, verify

TEXTS = (Passage("first", "", "A short text, of two lines. It is here."), Passage("second", "", "Another one: 1, 2!!"))


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unchecked: None) -> None:
    """One checkpoint with its rounded copies, an empty cache."""
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(study.PROFILES, "smoke", (("tiny-bert",), ("tiny-bert",)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed study: tables in data/, a figure with its manifest beside."""
    figures = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CWLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patch.setitem(study.PROFILES, "smoke", (("tiny-bert",), ("tiny-bert",)))
        study.run("smoke", figures / "data", TEXTS, progress=False)
    for name, table in derived_tables(figures / "data").items():
        table.to_csv(figures / "data" / f"{name}.csv", index=False)
    (figures / "one.png").write_bytes(b"a figure")
    sha = hashlib.sha256(b"a figure").hexdigest()
    (figures / "manifest.json").write_text(json.dumps({"one": {"notebook": "00", "sha256": {"one.png": sha}}}))
    return figures


@pytest.fixture
def figures(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "figures")


def check(figures: Path, **options: object) -> Verification:
    return verify(figures / "data", "smoke", texts=TEXTS, **options)


def change(figures: Path, metric: str, factor: float, cover: bool = False) -> pd.Series:
    """Change one number of study.csv, and with ``cover`` the digest that would betray it; return its row."""
    path = figures / "data" / "study.csv"
    table = pd.read_csv(path, keep_default_na=False, dtype={"at": str})
    chosen = (table["metric"] == metric) & (table["source"] == "init") & (table["seed"] == 1)
    index = table.index[chosen][-1]
    table.loc[index, "value"] *= factor
    table.to_csv(path, index=False, float_format="%.6g")
    if cover:
        rows, cells = study.committed(figures / "data")
        broken = cells.index[~cells["whole"]]
        identity = ["checkpoint", "source", "seed", "passage"]
        for line in broken:
            mine = (rows[identity] == cells.loc[line, identity]).all(axis=1)
            cells.loc[line, "digest"] = study._digest(rows[mine])
        cells.drop(columns="whole").to_csv(figures / "data" / "cells.csv", index=False)
    return table.loc[index]


PARTS = {"C2", "effects.csv", "rounding.csv", "scale.csv", "verdicts.csv", "one", "numbers"}


@pytest.mark.parametrize("full", [False, True])
def test_an_untouched_study_is_reproduced(figures: Path, full: bool) -> None:
    found = check(figures, full=full)
    assert found.reproduced and found.damaged.empty
    assert dict(found.parts.to_numpy()) == dict.fromkeys(PARTS, "reproduced")
    cells = found.rows[["checkpoint", "source", "seed", "passage"]].drop_duplicates()
    assert len(cells) == (found.cells if full else 2)  # on a text, and of the weights alone
    assert "-" in set(cells["passage"])
    if full:
        assert {"q4_1", "q5_0"} <= set(cells["source"])
        pd.testing.assert_frame_equal(
            found.rows.sort_values(study.ROW)[study.ROW].reset_index(drop=True), study.load(figures / "data")[study.ROW]
        )
    assert f"of {found.cells} cells recomputed, 0 differ" in found.report()


@pytest.mark.parametrize("metric", ["entropy_rate", "head_isometry", "spectral_step"])
@pytest.mark.parametrize("cover", [False, True], ids=["plain", "digest covered up"])
def test_one_number_changed_by_one_percent_is_named(figures: Path, metric: str, cover: bool) -> None:
    row = change(figures, metric, 1.01, cover)
    found = check(figures, full=cover)
    assert not found.reproduced
    (differing,) = found.rows[~found.rows["agrees"]].itertuples()
    assert differing.committed == pytest.approx(row["value"], rel=1e-5) and differing.committed != differing.recomputed
    assert (differing.metric, differing.layer, differing.passage) == (metric, row["layer"], row["passage"])
    assert all(str(row[name]) in found.report() for name in ("checkpoint", "metric", "source", "passage"))
    assert len(found.damaged) == (0 if cover else 1)


def test_a_row_left_out_is_a_difference(figures: Path) -> None:
    path = figures / "data" / "study.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))
    found = check(figures)
    assert not found.reproduced and found.rows["committed"].isna().sum() == 1


def test_another_version_of_a_metric_is_not_current(figures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS, "symmetry", replace(METRICS["symmetry"], version=99))
    found = check(figures)
    assert not found.reproduced and len(found.damaged) == 7 and "make study" in found.report()


@pytest.mark.parametrize(
    ("what", "column"),
    [("one", ""), ("evidence", "rho"), ("effects", "late_gap"), ("rounding", "change_shift")],
)
def test_figures_and_tables_that_do_not_follow_from_the_rows_differ(figures: Path, what: str, column: str) -> None:
    if what == "one":
        (figures / "one.png").write_bytes(b"another figure")
    else:
        path = figures / "data" / f"{what}.csv"
        table = pd.read_csv(path)
        table.loc[0, column] += 0.01
        table.to_csv(path, index=False)
    part = {"one": "one", "evidence": "C2"}.get(what, f"{what}.csv")
    found = check(figures)
    assert dict(found.parts.to_numpy()) == dict.fromkeys(PARTS, "reproduced") | {part: "differs"}
    assert not found.reproduced


def test_no_study_and_unknown_profiles_are_refused(figures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"folder: expected study.csv and cells.csv in .*nothing, found none"):
        verify(tmp_path / "nothing", "smoke", texts=TEXTS)
    with pytest.raises(ValueError, match="profile: expected one of smoke, wheels, hub, got 'whels'"):
        verify(figures / "data", "whels", texts=TEXTS)


@pytest.mark.parametrize("gone", ["evidence", "effects", "rounding", "scale", "verdicts"])
@pytest.mark.parametrize("how", ["deleted", "emptied", "no rows"])
def test_a_derived_table_that_is_not_there_differs(figures: Path, gone: str, how: str) -> None:
    path = figures / "data" / f"{gone}.csv"
    text = {"emptied": "", "no rows": path.read_text().splitlines()[0] + "\n"}.get(how)
    path.unlink() if text is None else path.write_text(text)
    found = check(figures)
    part = "C2" if gone == "evidence" else f"{gone}.csv"
    assert not found.reproduced and dict(found.parts.to_numpy())[part] == "differs"


def test_a_checkpoint_that_the_profile_does_not_have_is_named(figures: Path) -> None:
    for name in ("study", "cells"):
        path = figures / "data" / f"{name}.csv"
        table = pd.read_csv(path, keep_default_na=False, dtype=str)
        mine = table[table["checkpoint"] == "tiny-bert"].assign(checkpoint="ghost")
        pd.concat([table, mine]).to_csv(path, index=False)
    found = check(figures)
    assert not found.reproduced and dict(found.parts.to_numpy())["checkpoint ghost"] == "differs"


def test_the_command_exits_with_one_if_something_differs(figures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "corpus_of", lambda profile: TEXTS)
    arguments = ["verify", "--profile", "smoke", "--folder", str(figures / "data")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    row = change(figures, "entropy_rate", 1.01)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and row["passage"] in result.output and "entropy_rate" in result.output
