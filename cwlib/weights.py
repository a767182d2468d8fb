"""Read a checkpoint's value and output maps from its files, one layer at a time, without building the model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from cwlib.architectures import attention_layers
from cwlib.catalogue import CheckpointError
from cwlib.cores import HeadTransports
from cwlib.loading import empty_model
from cwlib.sources import locate


@dataclass(frozen=True, eq=False)
class WeightLayer:
    """The transports of one attention layer.

    Attributes
    ----------
    index : int
        Layer number, from 0.
    path : str
        Name of the attention module in the model.
    transports : HeadTransports
        V_h and O_h, in the dtype that they are stored in.
    """

    index: int
    path: str
    transports: HeadTransports = field(repr=False)


class StoredWeights(Mapping[str, Tensor]):
    """The parameters of a base model by name, each read from its safetensors file when it is asked for.

    Parameters
    ----------
    files : sequence of Path
        All files of the checkpoint.
    model : PreTrainedModel
        Laid out without weights. Names in files may differ from its own, by what a model with a head on top puts before
        them or as in older releases (ViT): transformers' rules for loading tell which is which.
    """

    def __init__(self, files: tuple[Path, ...], model: PreTrainedModel) -> None:
        self._files: dict[str, tuple[Path, str]] = {}
        rules, own = get_model_conversion_mapping(model), model.state_dict()
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        for path in files:
            with safe_open(path, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - not a mapping
                    name, rearranged = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
                    if rearranged is None:
                        self._files[name] = path, key

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            folder = next(iter(self._files.values()))[0].parent
            raise CheckpointError(
                f"the weights in {folder} lack {name}: check that config.json and the weights belong together; where "
                "transformers rearranges weights while it loads (Nomic BERT), cwlib.open_checkpoint finds them"
            )
        path, key = self._files[name]
        try:
            # opened anew and copied, so that no page of the file stays mapped
            with safe_open(path, framework="pt") as tensors:
                return tensors.get_tensor(key).clone()
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged ({error}): copy or download it again") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def weight_layers(source: str | os.PathLike) -> Iterator[WeightLayer]:
    """Stream the transports of a checkpoint's attention layers from its safetensors files.

    Only the value and output maps are read, and only those of one layer are in memory, so that metrics of the weights
    need about a gigabyte for a model of 8 billion parameters: ``cwlib.measure(layer.transports)``.

    Parameters
    ----------
    source
        A catalogue name, folder, .gguf file or hub id, as for `cwlib.open_checkpoint`.

    Yields
    ------
    WeightLayer
        In the order of the layers.

    Raises
    ------
    ValueError
        If the model is of an unsupported type, its attention is quantised, or the weights are not in safetensors files.
    CheckpointError
        If the checkpoint cannot be had, is damaged, or lacks a map.
    """
    found = locate(source)
    if not found.safetensors:
        raise ValueError(
            f"source: expected safetensors files, got {found.weights[0]}; cwlib.open_checkpoint reads this kind"
        )
    model = empty_model(found.folder)
    stored = StoredWeights(found.weights, model)
    layers = attention_layers(model, stored)
    paths = {layer.path for layer in layers}
    like = re.compile("|".join({re.sub(r"\d+", r"\\d+", re.escape(path)) for path in paths}))
    own = model.state_dict().keys()
    foreign = [name for name in stored if like.match(name) and name not in own]
    if foreign and getattr(model.config, "quantization_config", None):  # it may be the experts alone that are quantised
        raise ValueError(
            f"source: expected plain weights, got quantised attention (first: {foreign[0]}); take the checkpoint "
            "that was quantised, or a .gguf file of it"
        )
    beyond = {hit[0] for name in stored if (hit := like.match(name)) and hit[0] not in paths}
    if beyond:
        raise CheckpointError(
            f"the weights in {found.folder} hold {len(beyond)} attention layers that config.json does not have (first: "
            f"{min(beyond)}): check that config.json and the weights belong together"
        )
    return (WeightLayer(layer.index, layer.path, layer.transports) for layer in layers)
