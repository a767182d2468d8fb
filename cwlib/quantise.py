"""A control for measurements on quantised checkpoints: the same rounding, applied to weights that are known exactly.

The decoders of the catalogue come as .gguf files: linear maps in four to eight bits, word embeddings in five or eight,
norms and biases in full. How much of what is measured is rounding cannot be told from them alone. So the checkpoints
that come in float32 are rounded in the same formats and measured again. The gguf library writes Q4_1 (all linear maps
of smollm2-135m) and Q5_0 (most attention maps of the other decoders), but not the K formats of their remaining maps.
"""

import copy
from dataclasses import replace

import gguf
import torch
from gguf.quants import dequantize, quantize
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from cwlib.checkpoints import Checkpoint

SCHEMES = ("q4_1", "q5_0")  #: of linear maps
EMBEDDING_SCHEME = "q8_0"  #: of word embeddings
BLOCK = 32  #: consecutive entries of a row that share a scale


def quantised(checkpoint: Checkpoint, scheme: str) -> Checkpoint:
    """A copy of a checkpoint with its weights rounded to a format of gguf and expanded again.

    Linear maps are rounded in ``scheme`` and word embeddings in `EMBEDDING_SCHEME`, row by row in blocks of 32; norms,
    biases, positions, and maps whose rows are no whole number of blocks stay as they are, as converters leave them.

    Parameters
    ----------
    checkpoint : Checkpoint
        Opened in float32; it is not changed.
    scheme : {"q4_1", "q5_0"}
        Format of linear maps.

    Raises
    ------
    ValueError
        If the scheme is unknown, the model is not in float32, or no row is a whole number of blocks.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, got {scheme!r}")
    if checkpoint.model.dtype != torch.float32:
        raise ValueError(f"checkpoint: expected a model in float32, got {checkpoint.model.dtype}; open it in float32")
    model = copy.deepcopy(checkpoint.model)
    words, changed = model.get_input_embeddings(), 0
    with torch.no_grad():
        for module in model.modules():
            if module is words or isinstance(module, nn.Linear | Conv1D):
                # Conv1D holds its matrix the other way round
                rows = module.weight.T if isinstance(module, Conv1D) else module.weight
                if rows.shape[1] % BLOCK == 0:
                    rows.copy_(_rounded(rows, EMBEDDING_SCHEME if module is words else scheme))
                    changed += 1
    if not changed:
        raise ValueError(f"checkpoint: no linear map of {checkpoint.name} has rows of a multiple of {BLOCK} entries")
    return replace(checkpoint, name=f"{checkpoint.name}@{scheme}", model=model, precision=scheme.upper())


def _rounded(rows: Tensor, scheme: str) -> Tensor:
    kind = gguf.GGMLQuantizationType[scheme.upper()]
    return torch.from_numpy(dequantize(quantize(rows.detach().cpu().numpy(), kind), kind)).to(rows)
