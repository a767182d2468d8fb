"""Weights go where there is room, layers are the same wherever they are, and what does not fit is not refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from hub_folder import TEXTS, put
from safetensors.torch import load_file
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import cwlib
from cwlib import checkpoints, cores, loading, placement, study, tiny, workers
from cwlib.architectures import attention_layers
from cwlib.blocks import attention_gram
from cwlib.catalogue import CATALOGUE, CheckpointError, cache_dir
from cwlib.cells import Cell, plan
from cwlib.checkpoints import Checkpoint, initialise, open_checkpoint, tiny_checkpoint
from cwlib.cores import HeadTransports
from cwlib.hub import HUB
from cwlib.loading import quiet
from cwlib.metrics import METRICS
from cwlib.metrics_graph import depth_step
from cwlib.placement import Placement, Shape, place_model
from cwlib.workers import results

IDS = [7, 40, 3, 99, 120, 40, 8, 250, 61, 17, 5, 201, 33]
GB = 10**9
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MISTRAL = Shape.of(HUB["mistralai/Mistral-7B-v0.1"])
BESIDE, ROOM = MISTRAL.kept(512), MISTRAL.passing(512)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that so much is free: in memory, and on each GPU."""

    def pretend(memory: int, *gpus: int) -> None:
        def free(place: torch.device) -> dict[int | str, int]:
            if place.type != "cuda":
                return {"cpu": memory}
            return {i: room for i, room in enumerate(gpus) if place.index in (None, i)}

        monkeypatch.setattr(placement, "free_memory", free)
        monkeypatch.setattr(checkpoints, "free_memory", free)

    return pretend


# --- what fits ------------------------------------------------------------------------------------------------------


def test_on_the_cpu_a_model_is_in_memory_or_in_its_files(machine: Callable) -> None:
    needed = MISTRAL.weights() + BESIDE + ROOM
    machine(needed)
    assert place_model(MISTRAL, CPU) == Placement("memory")
    assert place_model(MISTRAL, CPU, tokens=600).kind == "files", "longer texts need more room"
    assert place_model(MISTRAL, CPU, offload=True).kind == "files"
    machine(needed - 1)
    assert place_model(MISTRAL, CPU) == place_model(MISTRAL, CPU, tokens=20) == Placement("files")
    assert place_model(MISTRAL, CPU, dtype="bfloat16").kind == "memory"
    assert str(place_model(MISTRAL, CPU)) == "offloaded to its files"


def test_on_gpus_a_model_is_on_one_or_dealt_out_or_offloaded_as_far_as_needed(machine: Callable) -> None:
    machine(20 * GB, 80 * GB, 80 * GB)
    assert place_model(MISTRAL, CUDA) == Placement("memory"), "one will do"
    machine(20 * GB, 24 * GB, 24 * GB, 24 * GB)
    dealt = place_model(MISTRAL, CUDA)
    assert dealt.kind == "devices" and set(dealt.max_memory) == {0, 1, 2} and str(dealt) == "on 3 GPUs"
    share = MISTRAL.weights() / (MISTRAL.weights() + BESIDE)
    assert dealt.max_memory[1] == int((24 * GB - ROOM) * share), "room for what is kept there, and for what passes"
    assert sum(dealt.max_memory.values()) > MISTRAL.weights()
    one = place_model(MISTRAL, torch.device("cuda:1"))
    assert one.kind == "files" and set(one.max_memory) == {1, "cpu"}, "a device that is named is taken alone"
    assert one.max_memory["cpu"] == 16 * GB and str(one) == "offloaded as far as needed"
    machine(20 * GB, 1 * GB)
    assert place_model(MISTRAL, CUDA).max_memory == {0: 0, "cpu": 16 * GB}
    machine(20 * GB, 80 * GB, 80 * GB)
    assert place_model(MISTRAL, CUDA, offload=True).kind == "files"


def test_every_model_of_the_range_fits_on_one_large_gpu(machine: Callable) -> None:
    machine(100 * GB, 80 * GB)
    assert {place_model(Shape.of(item), CUDA).kind for item in HUB.values()} == {"memory"}


@pytest.mark.parametrize(
    ("family", "kv_heads", "d_head"),
    [("llama", 2, 12), ("gpt2", 4, 12), ("bert", 4, 12), ("gemma3", 1, 16), ("qwen3", 2, 16)],
)
def test_shape_of_a_model(family: str, kv_heads: int, d_head: int) -> None:
    model = tiny_checkpoint(family).model
    shape = Shape.of_model(model)
    assert (shape.heads, shape.d_model, shape.vocabulary) == (4, 48, 300)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert (shape.kv_heads, shape.d_head, shape.layers) == (kv_heads, d_head, len(attention_layers(model)))
    assert Shape.of(CATALOGUE["minilm-l6"]).parameters == CATALOGUE["minilm-l6"].parameters


def test_processes_divide_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_cgroup_room", list)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * GB))
    monkeypatch.setitem(placement._sharing, "processes", 1)
    alone = placement.free_memory(CPU)["cpu"]
    placement.share(4)
    assert placement.free_memory(CPU)["cpu"] == alone // 4 and 9 * GB < alone < 10 * GB


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_scheduler_are_kept(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    job = (root if version == 2 else root / "memory") / "slurm" / "job_7" / "step_0"
    job.mkdir(parents=True)
    own.write_text("0::/slurm/job_7/step_0\n" if version == 2 else "5:cpu:/x\n4:memory:/slurm/job_7/step_0\n0::/\n")
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, (limit, used) in ((job, ("max", 3 * GB)), (job.parent, (8 * GB, 5 * GB))):
        for name, value in zip((*names, "memory.stat"), (limit, used, f"anon 1\ninactive_file {2 * GB}"), strict=True):
            (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(placement, "_CGROUPS", (own, root))
    assert placement._cgroup_room() == [5 * GB]
    monkeypatch.setattr(placement, "_CGROUPS", (tmp_path / "none", root))
    assert placement._cgroup_room() == []


# --- opening --------------------------------------------------------------------------------------------------------


def saved(folder: Path, family: str = "llama", dtype: str = "float32") -> Path:
    with quiet():
        tiny_checkpoint(family, dtype=dtype).model.save_pretrained(folder, max_shard_size="60KB")
    return folder


def devices(checkpoint: Checkpoint) -> set[str]:
    return {parameter.device.type for parameter in checkpoint.model.parameters()}


def assert_same_layers(mine: Checkpoint, theirs: Checkpoint) -> None:
    """Every layer, to the last bit."""
    count = 0
    for one, other in zip(cwlib.layers(mine, IDS), cwlib.layers(theirs, IDS), strict=True):
        for name in ("attention", "value", "output"):
            assert torch.equal(getattr(one.walk, name), getattr(other.walk, name))
        assert torch.equal(one.field, other.field) and torch.equal(one.output, other.output)
        count += 1
    assert count == 3


def test_auto_offloads_what_does_not_fit_and_nothing_else(machine: Callable, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    machine(50 * GB)
    whole = open_checkpoint(folder, device="cpu", offload="auto")
    assert devices(whole) == {"cpu"}
    machine(0)
    offloaded = open_checkpoint(folder, device="cpu", offload="auto")
    assert devices(offloaded) == {"meta"} and devices(open_checkpoint(folder, device="cpu")) == {"cpu"}
    assert_same_layers(offloaded, whole)
    live = tiny_checkpoint("llama").model
    assert open_checkpoint(live, offload="auto").model is live


def test_offload_is_checked(unchecked: None) -> None:
    with pytest.raises(ValueError, match="offload: expected True, False or 'auto', got 'yes'"):
        open_checkpoint("minilm-l6", offload="yes")


def test_what_cannot_stay_in_its_file_is_tried_in_memory(machine: Callable, tmp_path: Path) -> None:
    machine(0)
    folder = saved(tmp_path / "model")
    weights = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert devices(open_checkpoint(folder, device="cpu", offload="auto")) == {"cpu"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "bert", "modernbert"])
def test_a_model_of_which_a_part_is_in_memory(family: str, tmp_path: Path) -> None:
    """What accelerate makes of a map of devices, without a GPU: layers by hand, some on the disk."""
    folder = saved(tmp_path / "model", family)
    whole = open_checkpoint(folder, device="cpu")
    blocks = next(name for name, part in whole.model.named_modules() if isinstance(part, nn.ModuleList))
    device_map = {name: "cpu" for name, _ in whole.model.named_children() if not blocks.startswith(name)}
    if "." in blocks:  # bert
        device_map |= {f"{blocks}.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    else:
        device_map |= {f"{blocks}.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    model = loading.load_model(folder, torch.float32, True, device_map)
    split = Checkpoint("split", model, None, "", "float32", "cpu", "float32")
    assert devices(split) == {"cpu", "meta"}
    assert_same_layers(split, whole)
    sized = loading.load_model(folder, torch.float32, True, "auto", {"cpu": 10**5})
    assert_same_layers(Checkpoint("sized", sized, None, "", "float32", "cpu", "float32"), whole)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_random_weights_in_files_are_those_in_memory(
    family: str, machine: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "LARGE", 1000)
    folder = saved(tmp_path / "model", family)
    machine(50 * GB)
    whole = initialise(folder, 3, device="cpu", offload="auto")
    assert mapped() == 0
    machine(0)
    in_files = initialise(folder, 3, device="cpu", offload="auto")
    assert mapped() > 10 and not list(cache_dir().iterdir()), "in files that are gone when the weights are"
    assert in_files.sha256 == whole.sha256 == initialise(folder, 3, device="cpu").sha256
    for name, weight in in_files.model.state_dict().items():
        assert torch.equal(weight, whole.model.state_dict()[name]), name
    assert_same_layers(in_files, whole)
    del in_files, weight
    assert mapped() == 0


def mapped() -> int:
    """Files of weights that this process holds."""
    return sum(line.endswith(".weights (deleted)") for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_disk_without_room_for_random_weights_is_told(
    machine: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(0)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"random weights take .* CWLIB_CACHE at a larger disk"):
        initialise(saved(tmp_path / "model"), 0, device="cpu", offload="auto")


def test_dealing_out_a_model_in_memory(tmp_path: Path) -> None:
    """Hooks of accelerate on every layer, though all are on the CPU."""
    folder = saved(tmp_path / "model")
    whole, model = open_checkpoint(folder, device="cpu"), open_checkpoint(folder, device="cpu").model
    spread = loading.spread(model, {})
    assert set(spread.hf_device_map.values()) == {"cpu"} and hasattr(spread.layers[0], "_hf_hook")
    assert_same_layers(Checkpoint("spread", spread, None, "", "float32", "cpu", "float32"), whole)


def test_without_a_number_cuda_means_all_devices(
    machine: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    """What transformers is asked for on a machine with two GPUs that are too small for the model, each alone."""
    folder = saved(tmp_path / "model")
    shape = Shape.of_model(tiny_checkpoint("llama").model)
    needed = shape.weights() + shape.kept(512) + shape.passing(512)
    asked: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    loaded = SimpleNamespace(to=asked.append)
    monkeypatch.setattr(checkpoints, "load_model", lambda *given: asked.append(given[2:]) or loaded)

    def load(place: str, offload: bool | str = False) -> list:
        asked.clear()
        found = checkpoints.locate(folder)
        checkpoints._load(found, placement.require_device(place), torch.float32, offload, 512)
        return asked

    machine(50 * GB, needed, needed)
    assert load("auto") == [(True,), CUDA]
    machine(50 * GB, needed - 1, needed - 1)
    [(_, device_map, room)] = load("auto")
    assert device_map == "auto" and set(room) == {0, 1}
    assert load("cuda:1") == [(True,), torch.device("cuda:1")]
    [(_, device_map, room)] = load("cuda:1", "auto")
    assert device_map == "auto" and set(room) == {1, "cpu"}
    machine(1, needed, needed)
    assert load("cuda:0") == [(True, {"": "cuda:0"})], "straight to the device, past a memory that is too small"


# --- layers on several devices --------------------------------------------------------------------------------------


def test_steps_between_layers_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that there are not, of a kind that torch knows everywhere: it follows what would happen on them."""
    monkeypatch.setattr(cores, "require_finite", lambda *_: None)
    with FakeTensorMode():
        near, far = (
            {
                "attention": torch.empty(4, 6, 6, device=device),
                "maps": HeadTransports(torch.empty(2, 3, 12, device=device), torch.empty(4, 12, 3, device=device), 2),
                "walk": torch.empty(6, 6, device=device, dtype=torch.float64),
            }
            for device in ("lazy:0", "lazy:1")
        )
        with pytest.raises(Exception, match="same device"):
            near["walk"] - far["walk"]
        assert attention_gram(near["attention"], far["attention"]).device == near["walk"].device
        assert near["maps"].gram(far["maps"]).device == near["walk"].device
        with pytest.raises(DataDependentOutputException):  # a number, of which there is none here
            depth_step(far["walk"], near["walk"])


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


def measured(checkpoint: Checkpoint) -> list[dict[str, float]]:
    """All metrics of all layers, steps included."""
    names = [name for name, metric in METRICS.items() if not metric.at and metric.about != "spectrum"]
    return [cwlib.measure(layer, names) for layer in cwlib.layers(checkpoint, IDS)]


def assert_close(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one.pop("t2_residual") <= 1e-5 and other.pop("t2_residual") <= 1e-5
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("family", [pytest.param(family, marks=gpu) for family in ("llama", "gpt2", "gpt_neox")])
def test_a_model_half_on_the_cpu_and_half_on_a_gpu(family: str, tmp_path: Path) -> None:
    """One GPU is enough to have layers on two devices: hooks as accelerate sets them between GPUs."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    folder = saved(tmp_path / "model", family)
    whole, split = (open_checkpoint(folder, device="cpu") for _ in range(2))
    blocks = next(part for part in split.model.modules() if isinstance(part, nn.ModuleList))
    for block in blocks[1:]:
        block.to("cuda")
        add_hook_to_module(block, AlignDevicesHook(execution_device="cuda"))
    last = list(split.model.children())[-1]
    add_hook_to_module(last, AlignDevicesHook(execution_device="cpu"))
    for name, part in split.model.named_children():
        if "norm" in name or name == "ln_f":
            add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    kinds = [layer.walk.attention.device.type for layer in cwlib.layers(split, IDS)]
    assert kinds == ["cpu", "cuda", "cuda"]
    for layer in cwlib.layers(split, IDS):
        tensors = (layer.walk.attention, layer.walk.value, layer.walk.output, layer.field, layer.output)
        assert len({tensor.device for tensor in tensors}) == 1
    assert_close(measured(split), measured(whole))


@pytest.mark.parametrize("offload", [pytest.param(offload, marks=gpu) for offload in (False, "auto", True)])
def test_opening_on_a_gpu_that_is_too_small(
    offload: bool | str, machine: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "model")
    whole = measured(open_checkpoint(folder, device="cpu"))
    shape = Shape.of_model(tiny_checkpoint("llama").model)
    machine(0 if offload is False else 50 * GB, shape.passing(512) + shape.kept(512) + shape.weights() // 2)
    there = open_checkpoint(folder, device="cuda", offload=offload)
    assert devices(there) == ({"cuda"} if offload is False else {"cuda", "meta"}) or offload == "auto"
    assert_close(measured(there), whole)
    monkeypatch.setattr(tiny, "LARGE", 1000)
    null, expected = (initialise(folder, 1, device=d, offload=o) for d, o in (("cuda", offload), ("cpu", False)))
    assert_close(measured(null), measured(expected))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds fewer than two CUDA devices")
def test_a_model_dealt_out_to_two_gpus(machine: Callable, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    whole = measured(open_checkpoint(folder, device="cpu"))
    shape = Shape.of_model(tiny_checkpoint("llama").model)
    machine(50 * GB, *2 * [shape.passing(512) + shape.kept(512) + int(0.9 * shape.weights())])
    dealt = open_checkpoint(folder)
    assert {p.device.index for p in dealt.model.parameters()} == {0, 1}
    assert_close(measured(dealt), whole)
    assert_close(measured(initialise(folder, 1, offload="auto")), measured(initialise(folder, 1, device="cpu")))


# --- out of memory --------------------------------------------------------------------------------------------------


def failing(times: int, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> list[tuple[str, set[str]]]:
    """Let the first cells run out of memory; returns what was tried, and where the weights were."""
    seen: list[tuple[str, set[str]]] = []
    evaluate = workers.evaluate

    def limited(cell: Cell, checkpoint: Checkpoint, *rest: object) -> object:
        seen.append((cell.key, devices(checkpoint)))
        if len(seen) <= times:
            raise kind("out of memory: can't allocate memory")
        return evaluate(cell, checkpoint, *rest)

    monkeypatch.setattr(workers, "evaluate", limited)
    return seen


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_a_model_that_turns_out_not_to_fit_is_offloaded(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    folder = str(put(tmp_path, "org/model", "llama"))
    cells = [cell for cell in plan((folder,), TEXTS[:1]) if cell.source != "init"]
    expected = {cell.key: rows for cell, rows, _ in results(cells, "cpu", ())}
    seen = failing(1, monkeypatch, kind)
    found = {cell.key: rows for cell, rows, _ in results(cells, "cpu", ())}
    assert [place for _, place in seen] == [{"cpu"}] + len(cells) * [{"meta"}]
    assert seen[0][0] == seen[1][0] and found.keys() == expected.keys(), "the cell that failed is tried again"
    for key, rows in found.items():
        columns = ["layer", "metric", "gauge", "at"]
        assert rows[columns].equals(expected[key][columns])
        np.testing.assert_allclose(rows["value"], expected[key]["value"], rtol=1e-5, atol=1e-7)


def test_a_model_that_does_not_fit_at_all_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    folder = str(put(tmp_path, "org/model", "llama"))
    failing(10**6, monkeypatch, torch.OutOfMemoryError)
    with pytest.raises(CheckpointError, match=r"out of memory, even with its weights in their files .*shorter texts"):
        study.run([folder], None, TEXTS[:1], device="cpu", progress=False)


def test_gaussian_maps_go_when_their_turn_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    """They take as much as the attention's own weights."""
    kept: dict[str, int] = {}
    evaluate = workers.evaluate

    def looking(cell: Cell, checkpoint: Checkpoint, gaussians: dict, found: object) -> object:
        rows = evaluate(cell, checkpoint, gaussians, found)
        [opened] = workers._OPENED.values()
        kept[cell.source] = sum(map(len, opened.gaussians.values()))
        return rows

    monkeypatch.setattr(workers, "evaluate", looking)
    cells = plan(("tiny-llama",), TEXTS[:1])
    assert len(list(results(cells, "cpu", ()))) == len(cells)
    assert kept["gaussian"] == 3 and {kept[source] for source in kept if source != "gaussian"} == {0}
