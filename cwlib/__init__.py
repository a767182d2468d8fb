"""Transformers as connection walks: operator-level measurements on attention layers.

See the README for a tour. The public names are those below; everything else is reached through its module.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwlib.capture import LayerWalk, layers
    from cwlib.catalogue import CheckpointError
    from cwlib.checkpoints import Checkpoint, open_checkpoint
    from cwlib.cores import HeadTransports
    from cwlib.metrics import METRICS, measure
    from cwlib.walk import ConnectionWalk
    from cwlib.weights import weight_layers

__version__ = "0.1.0"
__all__ = [
    "METRICS",
    "Checkpoint",
    "CheckpointError",
    "ConnectionWalk",
    "HeadTransports",
    "LayerWalk",
    "layers",
    "measure",
    "open_checkpoint",
    "weight_layers",
]

# Loaded when first used: a walk of one's own tensors does not wait for transformers, nor the catalogue for torch.
_HOME = {
    "METRICS": "metrics",
    "Checkpoint": "checkpoints",
    "CheckpointError": "catalogue",
    "ConnectionWalk": "walk",
    "HeadTransports": "cores",
    "LayerWalk": "capture",
    "layers": "capture",
    "measure": "metrics",
    "open_checkpoint": "checkpoints",
    "weight_layers": "weights",
}
_MODULES = (
    "atlas",
    "capture",
    "checkpoints",
    "checks",
    "claims",
    "corpus",
    "edges",
    "holonomy",
    "laplacian",
    "measures",
    "metrics",
    "spectra",
    "study",
    "synthetic",
    "theorems",
)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"cwlib.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"cwlib.{name}")
    raise AttributeError(f"module 'cwlib' has no attribute {name!r}")
