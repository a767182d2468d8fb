"""Transformers as connection walks: operator-level measurements on attention layers.

See the README for a tour. The public names are those below; everything else is reached through its module.
"""

from cwlib.capture import LayerWalk, layers
from cwlib.catalogue import CheckpointError
from cwlib.checkpoints import Checkpoint, open_checkpoint
from cwlib.cores import HeadTransports
from cwlib.metrics import METRICS, measure
from cwlib.walk import ConnectionWalk

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
]
