"""One measurement of memory in a process of its own, for `cwlib.bench`: nothing else has used memory before it.

``python -m cwlib.footprint '{"way": "cwlib", ...}'`` prints a JSON object with the bytes over those of the model.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cwlib import rivals
from cwlib.big import configuration
from cwlib.capture import layers
from cwlib.checkpoints import Checkpoint, open_checkpoint
from cwlib.loading import quiet
from cwlib.metrics import METRICS, measure
from cwlib.timing import peak_bytes
from cwlib.tiny import random_model
from cwlib.weights import weight_layers

VOCABULARY = 1000  #: of the models that are measured: embeddings take no part in attention


def gpt2(n_layer: int, n_embd: int, n_head: int, device: str = "cpu") -> nn.Module:
    """A GPT-2 of a shape with random weights, in eager attention."""
    config = configuration("gpt2", n_layer=n_layer, n_embd=n_embd, n_head=n_head, vocab_size=VOCABULARY)
    with quiet():  # its special tokens are not in so small a vocabulary
        return random_model(config, 0, rescale=False).eval().to(device)


def token_ids(tokens: int, device: str = "cpu") -> torch.Tensor:
    """Random ids of one text."""
    return torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)


def run_through(checkpoint: Checkpoint, ids: torch.Tensor) -> None:
    """Capture every layer and let go of it."""
    for _ in layers(checkpoint, ids):
        pass


WAYS = ("cwlib", "plain forward", "output_attentions", "TransformerLens")


def capture_way(way: str, model: nn.Module, ids: torch.Tensor) -> Callable[[], object]:
    """One of `WAYS` to take a model's attention, field and output from a forward pass (the plain one takes none)."""
    if way == "cwlib":
        checkpoint = open_checkpoint(model, device=str(model.device))
        return lambda: run_through(checkpoint, ids)
    if way == "TransformerLens":
        lens = rivals.lens_model(model)
        return lambda: rivals.lens_run_with_cache(lens, ids)
    run = rivals.plain_forward if way == "plain forward" else rivals.forward_with_attentions
    return lambda: run(model, ids)


def measure_weights(folder: str) -> int:
    """Compute all metrics of weights on every layer of a folder; the number of layers."""
    names = [metric.name for metric in METRICS.values() if metric.weights_only]
    return sum(bool(measure(layer.transports, names)) for layer in weight_layers(folder))


def main(request: Mapping[str, Any]) -> dict[str, float | int]:
    """Measure what a request says: a folder's weights, or one way of capturing a GPT-2."""
    device = request["device"]
    if "folder" in request:
        work: Callable[[], object] = lambda: measure_weights(request["folder"])  # noqa: E731
    else:
        model = gpt2(*request["shape"], device)
        capture_way(request["way"], model, token_ids(8, device))()  # so that what is loaded once does not count
        work = capture_way(request["way"], model, token_ids(request["tokens"], device))
    start = time.perf_counter()
    return {"bytes": peak_bytes(work, device), "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
