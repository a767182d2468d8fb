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
from cwlib.claims import evidence_table
from cwlib.corpus import Passage
from cwlib.metrics import METRICS
from cwlib.verify import Verification, verify

TEXTS = (Passage("first", "", "A short text, of two lines. It is here."), Passage("second", "", "Another one: 1, 2!!"))


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Type checks take most of the time of a run, and have been passed in the tests of the study."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(study.PROFILES, "smoke", (("tiny-bert",), ("tiny-gpt2",)))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed study: tables in data/, a figure with its manifest beside."""
    figures = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CWLIB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patch.setitem(study.PROFILES, "smoke", (("tiny-bert",), ("tiny-gpt2",)))
        study.run("smoke", figures / "data", TEXTS, progress=False)
    evidence_table(study.load(figures / "data")).round(6).to_csv(figures / "data" / "evidence.csv", index=False)
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


@pytest.mark.parametrize("full", [False, True])
def test_an_untouched_study_is_reproduced(figures: Path, full: bool) -> None:
    found = check(figures, full=full)
    assert found.reproduced and found.damaged.empty
    assert dict(found.parts.to_numpy()) == dict.fromkeys(("C2", "one", "numbers"), "reproduced")
    cells = found.rows[["checkpoint", "source", "seed", "passage"]].drop_duplicates()
    assert len(cells) == (found.cells if full else 2)
    if full:
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
    assert not found.reproduced and len(found.damaged) == 5 and "make study" in found.report()


@pytest.mark.parametrize("what", ["figure", "evidence"])
def test_figures_and_claims_that_do_not_follow_from_the_table_differ(figures: Path, what: str) -> None:
    if what == "figure":
        (figures / "one.png").write_bytes(b"another figure")
    else:
        evidence = pd.read_csv(figures / "data" / "evidence.csv")
        evidence.loc[0, "rho"] += 0.01
        evidence.to_csv(figures / "data" / "evidence.csv", index=False)
    verdicts = dict(check(figures).parts.to_numpy())
    expected = {"C2": what == "figure", "one": what == "evidence", "numbers": True}
    assert verdicts == {name: "reproduced" if same else "differs" for name, same in expected.items()}


def test_no_study_and_unknown_profiles_are_refused(figures: Path, tmp_path: Path) -> None:
    for folder, profile in ((tmp_path / "nothing", "smoke"), (figures / "data", "whels")):
        with pytest.raises(ValueError, match="folder, profile: expected a study and one of smoke, wheels"):
            verify(folder, profile, texts=TEXTS)


def test_the_command_exits_with_one_if_something_differs(figures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cwlib.verify.passages", lambda: TEXTS)
    arguments = ["verify", "--profile", "smoke", "--folder", str(figures / "data")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    row = change(figures, "entropy_rate", 1.01)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1 and row["passage"] in result.output and "entropy_rate" in result.output
