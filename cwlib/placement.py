"""Where a model's weights go: what measuring it takes, what is free, and what follows.

Formulas in bytes, for H heads and k value heads of width a, dimension d, L layers and n tokens: *kept* as long as a
model is measured are the Gaussian maps of every layer, 8 L (H + k) a d, the forms of T8 and T9 on H^4 entries, trained
and Gaussian, and once the attention of all layers; what *passes* is the most that one layer takes meanwhile: H images
of the field and a few copies of the attention, or the cores of T9.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import psutil
import torch
from torch import nn

from cwlib.catalogue import Entry
from cwlib.hub import HubEntry

TOKENS = 512  #: of a text for which there is room, whatever the texts are
_PYTHON = 2**29  #: of the process itself, on the CPU
_LIBRARIES = 2**26  #: what libraries and the allocator keep, whatever the model
_CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_sharing = {"processes": 1}  # that divide this machine's memory among them


@dataclass(frozen=True)
class Shape:
    """The numbers that memory and time depend on."""

    parameters: int
    layers: int
    heads: int
    kv_heads: int
    d_head: int
    d_model: int
    vocabulary: int

    @classmethod
    def of(cls, facts: Entry | HubEntry) -> Shape:
        """That of an entry of the catalogue, which names no vocabulary, or of the hub's list."""
        return cls(**{field.name: getattr(facts, field.name, 0) for field in fields(cls)})

    @classmethod
    def of_model(cls, model: nn.Module) -> Shape:
        """That of a model of transformers, weights or not; what its configuration does not name counts as one."""
        text, parameters = model.config.get_text_config(), sum(p.numel() for p in model.parameters())

        def number(*names: str) -> int:
            found = (getattr(text, name, None) for name in names)
            return next((n for n in found if isinstance(n, int) and n > 0), 1)

        heads, d_model = number("num_attention_heads", "n_heads"), number("hidden_size", "d_model")
        kv_heads = min(number("num_key_value_heads", "num_kv_heads", "num_attention_heads"), heads)
        d_head = getattr(text, "head_dim", None) or max(1, d_model // heads)
        layers = number("num_hidden_layers", "num_layers", "n_layers")
        return cls(parameters, layers, heads, kv_heads, d_head, d_model, number("vocab_size"))

    def weights(self, dtype: str = "float32") -> int:
        """Bytes of the weights."""
        return self.parameters * getattr(torch, dtype).itemsize

    def embedding(self, dtype: str = "float32") -> int:
        """Bytes of the largest matrix, which is brought in whole when weights stay in their files."""
        return self.vocabulary * self.d_model * getattr(torch, dtype).itemsize

    def kept(self, tokens: int) -> int:
        """Bytes that stay with a model, beside its weights, as long as it is measured."""
        maps = 8 * (self.heads + self.kv_heads) * self.d_head * self.d_model  # in double precision
        forms = 4 * 8 * self.heads**4
        return _LIBRARIES + self.layers * (maps + forms + 8 * self.heads * tokens**2)

    def passing(self, tokens: int) -> int:
        """The most bytes that one layer takes for a time."""
        width = self.heads * self.d_head
        edges = 32 * self.heads * tokens * self.d_model + 44 * self.heads * tokens**2
        cores = 40 * width**2 + 24 * (self.heads + self.kv_heads) * self.d_head * self.d_model
        return max(edges, cores)


@dataclass(frozen=True)
class Placement:
    """Where weights go.

    Attributes
    ----------
    kind
        "memory": all of them on one device; "devices": on several GPUs; "files": they stay on the disk as far as they
        do not fit, and come in for the time of their module's forward pass.
    max_memory
        Bytes of weights per GPU, and in memory beside them, as accelerate takes it; none on the CPU.
    """

    kind: Literal["memory", "devices", "files"]
    max_memory: dict[int | str, int] | None = None

    def __str__(self) -> str:
        gpus = [device for device in self.max_memory or () if device != "cpu"]
        if self.kind == "files":
            return "offloaded to its files" if not gpus else "offloaded as far as needed"
        return f"on {len(gpus)} GPUs" if self.kind == "devices" else "in memory"


def require_device(device: str) -> torch.device:
    """The device of a name; ValueError if torch does not know it, or there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device: expected 'auto' or a torch device, got {device!r}") from error
    if place.type == "meta":
        raise ValueError("device: expected one that holds numbers, got 'meta'")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device!r} was asked for, but torch finds no CUDA device; use 'auto' or 'cpu'")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device: {device!r} was asked for, but there are only {torch.cuda.device_count()} of them")
    if place.type not in ("cpu", "cuda"):
        try:
            torch.empty(1, device=place)
        except Exception as error:  # each kind of device has errors of its own
            why = str(error).splitlines()[0][:100]
            raise ValueError(f"device: torch cannot use {device!r} here ({why}); take 'cpu'") from error
    return place


def share(processes: int) -> None:
    """Tell this process that so many measure at the same time, each with a model of its own."""
    _sharing["processes"] = processes


def free_memory(place: torch.device) -> dict[int | str, int]:
    """Bytes that are free for this process: on the CPU by "cpu", on each GPU that the name allows by its number."""
    if place.type != "cuda":
        free = min([psutil.virtual_memory().available, *_cgroup_room()])
        return {"cpu": max(0, free - _PYTHON) // _sharing["processes"]}
    found = {}
    for index in range(torch.cuda.device_count()) if place.index is None else (place.index,):
        unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        found[index] = (torch.cuda.mem_get_info(index)[0] + unused) // _sharing["processes"]
    return found


def _cgroup_room() -> list[int]:
    """Bytes left under the limits that a scheduler or container sets this process, if it does (Linux)."""
    own, root = _CGROUPS
    room = []
    for line in own.read_text().splitlines() if own.exists() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":  # version 2
            top, limit, used = root, "memory.max", "memory.current"
        elif controllers == "memory":
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            # "max", or no such file: no limit here
            with suppress(OSError, ValueError):
                stat = dict(fact.split() for fact in (folder / "memory.stat").read_text().splitlines())
                files = int(stat.get("inactive_file", 0))  # read before, and given back when it is wanted
                room.append(int((folder / limit).read_text()) - int((folder / used).read_text()) + files)
    return room


def place_model(
    shape: Shape, place: torch.device, tokens: int = TOKENS, dtype: str = "float32", offload: bool = False
) -> Placement:
    """Where the weights of a model go so that it can be measured on texts of so many tokens.

    Parameters
    ----------
    shape : Shape
        Of the model.
    place : torch.device
        CPU, CUDA (any of the devices there are), or one CUDA device by its number.
    tokens : int
        Of the longest text; there is always room for `TOKENS`.
    dtype : str
        In which the model is loaded.
    offload : bool
        "files" in any case.
    """
    tokens = max(tokens, TOKENS)
    weights, kept, passing = shape.weights(dtype), shape.kept(tokens), shape.passing(tokens)
    free = free_memory(place)
    if weights + kept + passing <= next(iter(free.values())) and not offload:
        return Placement("memory")
    if place.type != "cuda":
        return Placement("files")
    # what is kept lies where its layer does
    for_weights = {index: int(max(0, room - passing) * weights / (weights + kept)) for index, room in free.items()}
    # layers are not split: each device but the last may be left with room for almost one
    if not offload and len(free) > 1 and weights * (1 + len(free) / shape.layers) <= sum(for_weights.values()):
        return Placement("devices", for_weights)
    return Placement("files", for_weights | {"cpu": free_memory(torch.device("cpu"))["cpu"] * 4 // 5})
