"""Write a checkpoint of any size with random weights, a shard at a time, to measure what large models take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from cwlib.loading import quiet

SHARD = 2**29  #: bytes per file, unless one parameter is larger


LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}  #: a Llama of 8 billion parameters: 32 query heads of width 128 share 8 value heads


def configuration(model_type: str, **fields: int) -> PreTrainedConfig:
    """The configuration of a model of a shape."""
    with quiet():
        return AutoConfig.for_model(model_type, **fields)


def write_random_checkpoint(config: PreTrainedConfig, folder: Path, seed: int = 0) -> int:
    """Write a folder in the hub's layout with bfloat16 weights N(0, 1 / fan_in), norms one and biases zero.

    Parameters
    ----------
    config : PreTrainedConfig
        Of the model; its base model is written.
    folder : Path
        Made if it is missing. ``config.json`` is written last, so that an interrupted run leaves no model.
    seed : int
        Of the weights.

    Returns
    -------
    int
        Number of parameters.

    Raises
    ------
    ValueError
        If the folder holds something already.
    OSError
        If the disk is full.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder: expected an empty or new folder, got {folder} with files in it; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    shards = {f"model-{number:05d}.safetensors": shard for number, shard in enumerate(_shards(model), 1)}

    def write(number: int, name: str) -> None:
        generator = torch.Generator().manual_seed(1000 * seed + number)
        save_file({key: _drawn(key, shape, generator) for key, shape in shards[name]}, folder / name, {"format": "pt"})

    with ThreadPoolExecutor(2) as pool:  # drawing normal numbers takes longer than writing them
        list(pool.map(write, range(len(shards)), shards))
    index = {key: name for name, shard in shards.items() for key, _ in shard}
    total = sum(shape.numel() for shard in shards.values() for _, shape in shard)
    meta = {"metadata": {"total_size": 2 * total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(meta), "utf-8")
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    return total


def _shards(model: nn.Module) -> Iterator[list[tuple[str, torch.Size]]]:
    shard: list[tuple[str, torch.Size]] = []
    size = 0
    for key, parameter in model.named_parameters():
        if shard and size + 2 * parameter.numel() > SHARD:
            yield shard
            shard, size = [], 0
        shard.append((key, parameter.shape))
        size += 2 * parameter.numel()
    yield shard


def _drawn(key: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    if len(shape) < 2:
        return torch.full(shape, float(key.endswith("weight")), dtype=torch.bfloat16)
    result = torch.empty(shape, dtype=torch.bfloat16)
    for rows in result.split(max(1, 2**22 // shape[1])):  # normal numbers are drawn in float32
        rows.copy_(torch.randn(rows.shape, generator=generator).mul_(shape[-1] ** -0.5))
    return result
