"""The public names work as the design writes them, and importing them is cheap."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cwlib
from cwlib.checkpoints import tiny_checkpoint
from cwlib.corpus import Passage

ROOT = Path(__file__).resolve().parents[1]

# what a user gets by `import cwlib` alone, in a process without this one's imports
FRESH = """
import json, sys
import cwlib
heavy = [name for name in ("matplotlib", "seaborn", "papermill", "dask", "IPython") if name in sys.modules]
walk = cwlib.ConnectionWalk
models = "transformers" in sys.modules
names = {name: type(getattr(cwlib, name)).__name__ for name in cwlib.__all__}
print(json.dumps({
    "heavy": heavy,
    "models_for_a_walk": models,
    "names": names,
    "study": callable(cwlib.study.run),
    "metrics": list(cwlib.METRICS),
    "plotting_after_all": "matplotlib" in sys.modules,
}))
"""


@pytest.fixture(scope="module")
def fresh() -> dict:
    """What a fresh interpreter says."""
    done = subprocess.run([sys.executable, "-c", FRESH], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_the_package_loads_no_plotting_and_no_notebooks(fresh: dict) -> None:
    assert fresh["heavy"] == []
    assert not fresh["plotting_after_all"]


def test_a_walk_of_ones_own_does_not_wait_for_transformers(fresh: dict) -> None:
    assert not fresh["models_for_a_walk"]


def test_every_public_name_is_there_after_a_bare_import(fresh: dict) -> None:
    expected = {"METRICS", "Checkpoint", "CheckpointError", "ConnectionWalk", "HeadTransports", "LayerWalk"}
    assert set(fresh["names"]) == expected | {"layers", "measure", "open_checkpoint", "weight_layers"}
    assert fresh["study"]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        cwlib.nonsense  # noqa: B018


def test_metrics_are_those_of_the_theory(fresh: dict) -> None:
    graph = {"depth_step", "operator_cosine", "spectral_step", "reversibility_defect", "spectral_gap", "entropy_rate"}
    graph |= {"sink_mass", "schmidt_participation", "single_walk_error", "schmidt_spectrum", "layer_cosines"}
    transport = {"head_isometry", "sum_isometry", "edge_isometry", "norm_cv", "angle_correlation", "symmetry"}
    transport |= {"identity_alignment", "holonomy_defect", "singular_spectrum"}
    operator = {"laplacian_defect", "metric_defect", "inverse_defect", "metric_balance_defect", "mass"}
    operator |= {"dirichlet_energy", "parallel_defect"}
    operator |= {"spectral_density", "spectral_density_error", "spectrum_lowest", "spectrum_highest"}
    assert set(cwlib.METRICS) == set(fresh["metrics"]) == graph | transport | operator | {"t2_residual"}
    assert all(metric.name == name for name, metric in cwlib.METRICS.items())


def test_a_checkpoint_is_opened_and_its_layers_are_walks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))
    tiny_checkpoint("llama").model.save_pretrained(tmp_path / "mine")
    checkpoint = cwlib.open_checkpoint(str(tmp_path / "mine"), device="auto", dtype="float32")
    assert isinstance(checkpoint, cwlib.Checkpoint)
    found = []
    for layer in cwlib.layers(checkpoint, [5, 9, 200, 17]):
        assert isinstance(layer, cwlib.LayerWalk)
        assert isinstance(layer.walk, cwlib.ConnectionWalk)
        assert isinstance(layer.walk.transports, cwlib.HeadTransports)
        assert layer.field.shape == layer.output.shape == (4, 48)
        assert layer.residual() <= 1e-5
        found.append((layer.index, cwlib.measure(layer, ["depth_step", "head_isometry"])))
    assert [index for index, _ in found] == [0, 1, 2]
    assert [list(values) for _, values in found] == [["depth_step", "head_isometry"]] * 3
    assert np.isnan(found[0][1]["depth_step"]) and 0 < found[1][1]["depth_step"] < 1
    assert all(cwlib.measure(layer)["t2_residual"] <= 1e-5 for layer in cwlib.layers(checkpoint, [5, 9]))


def test_a_checkpoint_opens_with_the_defaults_of_the_design() -> None:
    defaults = {name: p.default for name, p in inspect.signature(cwlib.open_checkpoint).parameters.items()}
    assert (defaults["device"], defaults["dtype"]) == ("auto", "float32")
    with pytest.raises(ValueError, match="minilm-l6"):  # the catalogue is named, and nothing is fetched
        cwlib.open_checkpoint("no-such-checkpoint")


@pytest.mark.claim("T2")
def test_a_walk_is_made_of_ones_own_tensors() -> None:
    rng = torch.Generator().manual_seed(0)
    attention = torch.rand(2, 3, 3, generator=rng).softmax(-1)
    value, output = torch.randn(2, 4, 6, generator=rng), torch.randn(2, 6, 4, generator=rng)
    constant, field = torch.randn(6, generator=rng), torch.randn(3, 6, generator=rng)
    walk = cwlib.ConnectionWalk(attention, value, output, constant=constant)
    a, v, o, x = (tensor.double().numpy() for tensor in (attention, value, output, field))
    linear = sum(a[h] @ x @ v[h].T @ o[h].T for h in range(2))
    np.testing.assert_allclose(walk.apply(field), linear + constant.double().numpy(), atol=1e-12)
    np.testing.assert_allclose(walk.to_dense().numpy() @ x.ravel(), linear.ravel(), atol=1e-12)
    np.testing.assert_allclose(walk.effective_walk("mean"), a.mean(0), atol=1e-15)
    np.testing.assert_allclose(walk.effective_walk("sum"), a.sum(0), atol=1e-15)
    gates = walk.gates().numpy()
    np.testing.assert_allclose(gates, a / a.sum(0), atol=1e-15)
    for gauge in ("mean", "sum", "norm"):
        weight, transport = walk.effective_walk(gauge)[1, 2], walk.transport(1, 2, gauge)
        np.testing.assert_allclose(
            (weight * transport).numpy(), sum(a[h, 1, 2] * o[h] @ v[h] for h in range(2)), atol=1e-12
        )
    assert torch.linalg.matrix_norm(walk.transport(0, 1, "norm")) == pytest.approx(6**0.5)
    assert walk.schmidt_values().shape == (2,)
    assert walk.head_singular_values().shape == (2, 4)
    assert walk.edge_isometry().shape == (3, 3)
    assert set(cwlib.measure(walk)) < set(cwlib.METRICS)


def test_a_study_is_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path))
    monkeypatch.setitem(cwlib.study.PROFILES, "smoke", (("tiny-llama",), ()))
    table = cwlib.study.run("smoke", texts=[Passage("one", "", "a few words")], progress=False)
    assert list(table.columns) == ["checkpoint", "source", "seed", "passage", "layer", "metric", "gauge", "at", "value"]
    exact = table[table["metric"] == "t2_residual"]
    assert len(exact) == 3 and exact["value"].max() <= 1e-5


def test_a_checkpoint_that_cannot_be_had_is_an_error_of_its_own() -> None:
    assert issubclass(cwlib.CheckpointError, RuntimeError)
    assert not issubclass(cwlib.CheckpointError, ValueError)
