"""Sizes of a benchmark, and the random layers of these sizes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cwlib.big import LLAMA_8B
from cwlib.cores import HeadTransports
from cwlib.synthetic import generator


@dataclass(frozen=True)
class Shape:
    """Layers of a model: d_model, query heads, value heads, width of a head, and how many layers it has."""

    name: str
    d_model: int
    heads: int
    kv_heads: int
    d_head: int
    layers: int
    timed: int  #: layers that are timed


@dataclass(frozen=True)
class Profile:
    """Sizes of a run.

    Attributes
    ----------
    shapes
        Models whose heads' singular values are computed.
    edges_of
        Layers whose edges' isometry is computed, and the tokens of the text.
    sample
        Heads, and edges, on which dense ways are timed.
    operator
        Tokens, heads, d_head of the layer whose dense operator is formed.
    models
        Layers, d_model, heads of the GPT-2 that are captured, and the lengths of texts.
    growth
        Values of each variable.
    big
        Shape of the folder whose metrics of weights are computed.
    repeats
        Runs of each way.
    """

    shapes: tuple[Shape, ...]
    edges_of: tuple[Shape, ...]
    tokens: int
    sample: tuple[int, int]
    operator: tuple[int, int, int]
    models: Mapping[str, tuple[int, int, int]]
    lengths: tuple[int, ...]
    growth: Mapping[str, tuple[int, ...]]
    big: Mapping[str, int]
    repeats: int


SMALL = Shape("GPT-2 small", 768, 12, 12, 64, 12, 12)
LLAMA = Shape("Llama 8B", 4096, 32, 8, 128, 32, 1)
PROFILES = {
    "full": Profile(
        shapes=(SMALL, Shape("GPT-2 medium", 1024, 16, 16, 64, 24, 24), LLAMA),
        edges_of=(SMALL,),
        tokens=128,
        sample=(4, 4),
        operator=(32, 4, 64),
        models={"GPT-2 small": (12, 768, 12), "GPT-2 medium": (24, 1024, 16)},
        lengths=(128, 512, 1024),
        growth={
            "tokens": (128, 256, 512, 1024),
            "d_model": (512, 1024, 2048, 4096),
            "heads": (4, 8, 16, 32),
            "layers": (3, 6, 12, 24),
        },
        big=LLAMA_8B,
        repeats=7,
    ),
    "smoke": Profile(
        shapes=(Shape("tiny", 32, 4, 4, 8, 2, 2), Shape("tiny grouped", 32, 4, 2, 8, 2, 1)),
        edges_of=(Shape("tiny", 32, 4, 4, 8, 2, 2),),
        tokens=12,
        sample=(2, 3),
        operator=(4, 2, 4),
        models={"tiny": (2, 32, 4)},
        lengths=(16,),
        growth={"tokens": (8, 16), "d_model": (16, 32), "heads": (2, 4), "layers": (1, 2)},
        big={
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "vocab_size": 100,
        },
        repeats=2,
    ),
}


def transports_of(shape: Shape, device: str) -> list[HeadTransports]:
    """Gaussian maps in the layout of a model's weights: V of a (kv_head d_head, d_model) and O of its transpose."""
    result = []
    for layer in range(shape.timed):
        draw = generator(layer)
        value = torch.randn(shape.kv_heads * shape.d_head, shape.d_model, generator=draw) * 0.02
        output = torch.randn(shape.d_model, shape.heads * shape.d_head, generator=draw) * 0.02
        value = value.to(device).unflatten(0, (shape.kv_heads, shape.d_head))
        output = output.to(device).unflatten(1, (shape.heads, shape.d_head)).permute(1, 0, 2)
        result.append(HeadTransports(value, output, shape.heads // shape.kv_heads))
    return result


def causal_attention(heads: int, tokens: int, device: str) -> Tensor:
    """Softmax of normal scores under a causal mask, float32."""
    scores = torch.randn(heads, tokens, tokens, generator=generator(tokens))
    return scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf).softmax(-1).to(device)


def fresh(transports: HeadTransports) -> HeadTransports:
    """The same maps without cores that were computed before."""
    return HeadTransports(transports.value, transports.output, transports.groups)
