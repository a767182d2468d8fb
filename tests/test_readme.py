"""README quotes numbers: each must be the one in the committed tables. Its code runs."""

import re
from pathlib import Path

import pandas as pd
import torch

import cwlib
from cwlib import claims, study
from cwlib.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DATA = ROOT / "figures" / "data"


def test_verdicts_are_those_of_the_committed_study() -> None:
    """The table in README, verdicts.csv, evidence.csv and what the rules make of study.csv now are one and the same."""
    table = study.load(DATA)
    evidence = claims.evidence_table(table)
    parameters = pd.read_csv(DATA / "cells.csv").groupby("checkpoint")["parameters"].first().to_dict()
    verdicts = claims.verdict_table(evidence, claims.scale_table(evidence, parameters))
    pd.testing.assert_frame_equal(verdicts, pd.read_csv(DATA / "verdicts.csv", index_col="claim"))
    pd.testing.assert_frame_equal(evidence.round(6), pd.read_csv(DATA / "evidence.csv"), atol=2e-6)
    assert claims.markdown(verdicts) in README
    (supported,) = evidence[evidence["verdict"] == claims.SUPPORTED].itertuples()
    assert f"{supported.deep:.3f} against {supported.null_deep:.3f} in the better null" in " ".join(README.split())


def test_residual_is_that_of_the_committed_study() -> None:
    """Every layer of all six checkpoints is there, below the bound, and README quotes the worst."""
    table = study.load(DATA)
    residuals = table[(table["metric"] == "t2_residual") & (table["source"] == "trained")]
    layers = residuals.groupby("checkpoint")["layer"].nunique()
    assert layers.to_dict() == {name: item.layers for name, item in CATALOGUE.items()}
    assert residuals["value"].max() <= 2e-5
    assert f"{residuals['value'].max():.1e}" in README


def test_download_size() -> None:
    """README's sizes of downloads, rounded, are those of the catalogue."""
    live = sum(CATALOGUE[name].download_bytes for name in ("minilm-l6", "smollm2-135m"))
    assert f"({round(live / 1e6, -1):.0f} MB)" in README
    assert f"{sum(item.download_bytes for item in CATALOGUE.values()) / 1e9:.1f} GB to download" in README


def test_code_on_tensors_of_ones_own_runs() -> None:
    """All snippets but the first, which opens a checkpoint (notebook 00 does that), one after the other."""
    first, *rest = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert "open_checkpoint" in first and len(rest) >= 3
    attention = torch.softmax(torch.randn(4, 6, 6, generator=torch.Generator().manual_seed(0)), -1)
    value, output = torch.randn(4, 2, 8), torch.randn(4, 8, 2)
    names = {"cwlib": cwlib, "attention": attention, "value": value, "output": output, "field": torch.randn(6, 8)}
    for code in rest:
        exec(compile(code, "README.md", "exec"), names)
    assert names["walk"].heads == 4 and names["edges"].tokens == 2
