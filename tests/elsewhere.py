"""A second device for machines that have only one: tensors that say they are elsewhere, computed on the CPU.

It is as strict as CUDA: one operation takes tensors of one device (only numbers of the CPU, and its indices into a
tensor elsewhere, go with any), and numpy takes none from elsewhere. Its name, "lazy", is one that torch knows on every
platform and has nothing behind.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "lazy"
INDEXING = ("aten::index", "aten::index_put_")
COPYING = ("aten::_to_copy", "aten::copy_")
JOINING = ("aten::cat", "aten::stack")


class Away(Tensor):
    """A tensor elsewhere; ``here`` are its numbers."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Away":
        shape = {"strides": here.stride(), "storage_offset": here.storage_offset(), "dtype": here.dtype}
        away = Tensor._make_wrapper_subclass(cls, here.shape, **shape, device=torch.device(DEVICE))
        away.here = here
        return away

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _dispatch(operation, args, kwargs or {})

    def tolist(self) -> Any:
        return self.here.tolist()

    def __repr__(self) -> str:
        return f"{self.here!r} on {DEVICE}"


class _Mode(TorchDispatchMode):
    """Sees what is made elsewhere or moved there, too."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _dispatch(operation, args, kwargs or {})


def _dispatch(operation: Any, args: tuple, kwargs: dict) -> Any:
    name = operation._schema.name
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    away = {id(x.here): x for x in tensors if isinstance(x, Away)}
    if name in COPYING:
        together = []
    elif name in INDEXING and isinstance(args[0], Away):
        together = [x for x in (args[0], *args[2:3]) if isinstance(x, Tensor)]  # but not the indices
    else:
        together = tensors
    if len({isinstance(x, Away) for x in together if isinstance(x, Away) or x.ndim or name in JOINING}) > 1:
        raise RuntimeError(f"{name}: expected all tensors on one device, found cpu and {DEVICE}")
    outside = bool(away) if name != "aten::copy_" else isinstance(args[0], Away)
    if kwargs.get("device") is not None:
        outside = kwargs["device"].type == DEVICE
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map(lambda x: x.here if isinstance(x, Away) else x, (args, kwargs))

    def placed(x: Any) -> Any:
        if not (outside and isinstance(x, Tensor)):
            return x
        return away[id(x)] if id(x) in away else Away(x)  # what was changed in place stays the same tensor

    return tree_map(placed, operation(*args, **kwargs))


@contextmanager
def elsewhere() -> Iterator[None]:
    """While it lasts, tensors can be made on the device and moved there, in this thread."""
    with _Mode():
        yield


def moved(x: Any) -> Any:
    """A tensor, or the tensors of a model, on the device."""
    if isinstance(x, nn.Module):
        for module in x.modules():
            for name, weight in module.named_parameters(recurse=False):
                module._parameters[name] = nn.Parameter(weight.detach().to(DEVICE), requires_grad=False)
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(DEVICE)
        return x
    return x.to(DEVICE)
