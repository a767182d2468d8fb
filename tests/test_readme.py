"""README quotes numbers: each must be the one in the committed tables. Its code runs."""

import json
import re
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
import torch
from models import OLDER, families_table

import cwlib
from cwlib import cost, estimate, study, verdicts
from cwlib.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
DATA = ROOT / "figures" / "data"


def test_verdicts_are_those_of_the_committed_study() -> None:
    """README, the derived tables, and what the rules make of study.csv now are one and the same."""
    derived = verdicts.derived_tables(DATA)
    for name, frame in derived.items():
        again = pd.read_csv(StringIO(frame.to_csv(index=False)))
        pd.testing.assert_frame_equal(again, pd.read_csv(DATA / f"{name}.csv"), rtol=2e-6, atol=2e-6)
    evidence = derived["evidence"]
    assert verdicts.markdown(derived["verdicts"].set_index("claim")) in README
    assert verdicts.supported_lines(evidence) in README
    assert f"overturn {evidence['fragile'].sum()} of the {len(evidence)} verdicts by metric" in " ".join(README.split())


def test_residual_is_that_of_the_committed_study() -> None:
    """Every layer of all six checkpoints is there, below the bound, and README quotes the worst."""
    table = study.load(DATA)
    residuals = table[(table["metric"] == "t2_residual") & (table["source"] == "trained")]
    layers = residuals.groupby("checkpoint")["layer"].nunique()
    assert layers.to_dict() == {name: item.layers for name, item in CATALOGUE.items()}
    assert residuals["value"].max() <= 2e-5
    assert f"{residuals['value'].max():.1e}" in README


def test_costs_are_those_of_the_committed_benchmark() -> None:
    """README's table of costs is made of bench.csv, and names the machine of bench.json."""
    machine = json.loads((DATA / "bench.json").read_text())
    assert cost.markdown(pd.read_csv(DATA / "bench.csv")) in README
    assert cost.machine_line(machine) in " ".join(README.split())


def test_download_size() -> None:
    """README's sizes of downloads, rounded, are those of the catalogue."""
    live = sum(CATALOGUE[name].download_bytes for name in ("minilm-l6", "smollm2-135m"))
    assert f"({round(live / 1e6, -1):.0f} MB)" in README
    assert f"{sum(item.download_bytes for item in CATALOGUE.values()) / 1e9:.1f} GB to download" in README


@pytest.mark.skipif(OLDER, reason="README's table is of the versions that are pinned")
@pytest.mark.filterwarnings("ignore:.*layers are left out:UserWarning")
def test_families_are_those_that_work() -> None:
    """Every family's masks and residuals, measured now, are those of README's table."""
    table = README.split("<!-- families -->")[1].strip()
    assert table == families_table()


def test_the_range_of_the_paper_is_the_list_of_the_hub() -> None:
    """README's table of what each model is and takes is computed from the list and the formulas now."""
    assert README.split("<!-- hub -->")[1].strip() == estimate.markdown()


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
