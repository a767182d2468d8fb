"""Run a model on text and hand over one attention layer at a time.

The model's own forward pass runs once, in its eager attention path, on a worker thread that stops after every attention
layer until the consumer asks for the next: each layer's attention can be dropped before the next one is computed, and
no second pass is needed.
"""

import atexit
import inspect
import os
import queue
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cwlib import background
from cwlib._types import Field, Section
from cwlib.architectures import AttentionLayer, attention_layers
from cwlib.checkpoints import Checkpoint
from cwlib.checks import relative_residual
from cwlib.families import family_of, skipped_layers
from cwlib.inputs import kept_tokens, model_inputs
from cwlib.kernels import row_sums
from cwlib.loading import eager_attention
from cwlib.walk import ConnectionWalk


@dataclass(frozen=True, eq=False)
class LayerWalk:
    """One attention layer of a model on one text, as a connection walk.

    Attributes
    ----------
    index : int
        Layer number in its stack, from 0.
    walk : ConnectionWalk
        Attention as the model computed it, value and output maps, and the constant section of the biases.
    field : Float[Tensor, "src d_model"]
        The token vectors that the attention saw (after the norm in pre-norm models), in the model's dtype; under
        cross-attention those it attends to, the encoder's output.
    output : Float[Tensor, "dst d_model"]
        The module's own attention output after its output projection, before residual and post-norm.
    path : str
        Name of the attention module in the model.
    kind : {"self", "cross"}
        Whether the attention is to the same sequence, or to another (a bipartite walk).
    """

    index: int
    walk: ConnectionWalk
    field: Field = dataclass_field(repr=False)
    output: Section = dataclass_field(repr=False)
    path: str
    kind: Literal["self", "cross"]
    _previous: "weakref.ref[LayerWalk] | None" = dataclass_field(default=None, repr=False)

    @property
    def previous(self) -> "LayerWalk | None":
        """The layer before in the same stack and of the same kind, while it lives: until the next is asked for."""
        return None if self._previous is None else self._previous()

    def residual(self) -> float:
        r"""Relative distance between :math:`P X` plus the constant section and the module's own output (T2)."""
        return relative_residual(self.walk.apply(self.field), self.output)


class _Cancelled(BaseException):
    """Ends the model's forward pass when the consumer has stopped asking."""


_WARNED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
_LIVE: "weakref.WeakSet[_Capture]" = weakref.WeakSet()


class _Capture:
    """Hooks that assemble one LayerWalk per call of an attention layer and pass it to the consumer."""

    def __init__(self, layers: Sequence[AttentionLayer], keep_cores: bool, inputs: Mapping[str, Tensor]) -> None:
        self.keep_cores, self.inputs = keep_cores, inputs
        self.deliver: queue.Queue = queue.Queue()
        self.resume = threading.Semaphore(0)
        self.stopped = False
        self.thread: threading.Thread | None = None
        self.done: threading.Event | None = None
        self.layers = layers
        self.changes = ExitStack()  # what undoes what is changed in the model
        self.process = os.getpid()
        self.calls: Counter[str] = Counter()
        self.seen: dict[str, dict[str, Any]] = {layer.path: {} for layer in layers}

    def _hook(self, layer: AttentionLayer, seen: dict[str, Any]) -> None:
        signature = inspect.signature(layer.module.forward)

        def mine() -> bool:
            # Two captures of one model may interleave; each sees only its own forward pass.
            return threading.current_thread() is self.thread

        # torch calls a hook that another thread removes meanwhile without its keyword arguments.
        def before(_module: nn.Module, *call: Any) -> tuple[tuple, dict] | None:
            if not (mine() and "output_attentions" in signature.parameters):
                return None
            args, kwargs = call
            bound = signature.bind(*args, **kwargs)
            bound.arguments["output_attentions"] = True
            return bound.args, bound.kwargs

        def attended(_module: nn.Module, *call: Any) -> None:
            if mine():
                args, kwargs, result = call
                attention = result[-1] if isinstance(result, tuple) else None
                if not isinstance(attention, Tensor) or attention.ndim != 4:
                    raise ValueError(f"model: {layer.path}: the eager attention path returned no weights")
                given = signature.bind(*args, **kwargs).arguments
                others = (given.get(name) for name in ("key_value_states", "encoder_hidden_states"))
                other = next((states for states in others if states is not None), None)
                seen["kind"] = "self" if other is None else "cross"
                seen["field"] = next(iter(given.values())) if other is None else other
                seen["attention"] = attention
                finish()

        def projected(_module: nn.Module, _args: tuple, result: Tensor) -> None:
            if mine():
                seen["output"] = result
                finish()

        def finish() -> None:
            # The projection runs inside the attention module in most families, after it in BERT.
            if len(seen) == 4:
                kind = seen.pop("kind")
                field, attention, output = (seen.pop(k)[0].detach() for k in ("field", "attention", "output"))
                decoder = "decoder_input_ids" in self.inputs and layer.path.startswith("decoder.")
                dst, src = kept_tokens(self.inputs, decoder, kind == "cross")
                if dst is not None:
                    attention, output = attention[:, dst], output[dst]
                if src is not None:
                    attention, field = attention[:, :, src], field[src]
                maps = layer.maps if self.keep_cores else layer.read()
                absorbed = (1 - row_sums(attention)).clamp_min(0) if layer.sinks else None
                walk = ConnectionWalk.from_transports(attention, maps.transports, maps.constant(attention), absorbed)
                index = self.calls[layer.stack]  # not the module's: layers may share one
                self.calls[layer.stack] += 1
                self.hand_over((layer.stack, (index, walk, field, output, layer.path, kind)))

        self.changes.callback(layer.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self.changes.callback(layer.module.register_forward_hook(attended, with_kwargs=True).remove)
        self.changes.callback(layer.projection.register_forward_hook(projected).remove)

    def hand_over(self, item: object) -> None:
        self.deliver.put(item)
        del item  # the consumer alone decides how long the layer lives
        self.resume.acquire()
        if self.stopped:
            raise _Cancelled

    def run(self, model: nn.Module) -> None:
        """The forward pass; what ends it is handed over too.

        The model is changed, and changed back, on this thread: Ctrl-C interrupts the main thread alone.
        """
        self.thread = threading.current_thread()
        ending: BaseException | None = None
        try:
            self.resume.acquire()
            with self.changes:
                self.changes.enter_context(eager_attention(model))
                for layer in self.layers:
                    self._hook(layer, self.seen[layer.path])
                if not self.stopped:
                    with torch.inference_mode(False), torch.no_grad():
                        names = inspect.signature(model.forward).parameters
                        model(**self.inputs, **({"use_cache": False} if "use_cache" in names else {}))
                    if unfinished := [path for path, seen in self.seen.items() if seen]:
                        raise ValueError(f"model: {unfinished[0]}: its output projection was not called")
        except _Cancelled:
            pass
        except BaseException as error:  # handed to the consumer, which raises it
            ending = error
        finally:
            self.thread = None  # it will serve other captures, also of this model
            self.deliver.put(ending)
            del ending

    def end(self) -> None:
        """Have the forward pass end, and wait until the model is as it was."""
        if self.stopped:  # at the end of the process
            return
        self.stopped = True
        if os.getpid() != self.process:  # after a fork: the thread stayed behind
            self.changes.close()
            return
        self.resume.release()
        if self.done is not None:
            self.done.wait()


@atexit.register
def _end_all() -> None:
    # later, an iterator that is half done would wait for a thread that is frozen
    for capture in list(_LIVE):
        capture.end()


def layers(
    checkpoint: Checkpoint,
    text: str | Sequence[int] | Tensor | Mapping[str, Any],
    attention: Sequence[AttentionLayer] | None = None,
) -> Iterator[LayerWalk]:
    r"""Stream the attention layers of a model on one text as connection walks.

    Parameters
    ----------
    checkpoint : Checkpoint
        From `cwlib.open_checkpoint`.
    text : str, sequence of int, integer Tensor, or mapping of str to these
        One text, or the token ids of one sequence without padding; or the model's inputs for one example by name, as
        ``{"pixel_values": ...}``, or ``{"input_ids": ..., "decoder_input_ids": ...}`` for an encoder-decoder. Tokens
        that an ``attention_mask`` there marks as padding are left out of walk, field and output.
    attention : sequence of AttentionLayer, optional
        From `cwlib.architectures.attention_layers`, to compute the cores of the weights once for many texts, as long as
        the weights do not change. By default they are read from the model at every call.

    Yields
    ------
    LayerWalk
        In the order of the forward pass. The next layer is computed only when asked for.

    Raises
    ------
    TypeError
        If the checkpoint or the layers are other things; this and what follows before iteration starts.
    ValueError
        If the input is empty, of several examples, too long or not of this vocabulary; if the model is in training mode
        (dropout would be part of the walk); or if its attention is of an unsupported type.

    Warns
    -----
    UserWarning
        Once per model, if it has layers that are no connection walks (`cwlib.families.skipped_layers`).
    """
    if not isinstance(checkpoint, Checkpoint):
        raise TypeError(
            f"checkpoint: expected one of cwlib.open_checkpoint, got {type(checkpoint).__name__}; names, folders and "
            "loaded models are opened by cwlib.open_checkpoint(...)"
        )
    model = checkpoint.model
    if model.training:
        raise ValueError("checkpoint: expected a model in evaluation mode, got training mode; call model.eval()")
    found = attention_layers(model) if attention is None else attention
    own = [(path, module) for path, module in model.named_modules() if family_of(module) is not None]
    if not all(isinstance(entry, AttentionLayer) for entry in found):
        raise TypeError("attention: expected the layers of attention_layers(checkpoint.model), got other things")
    if [entry.path for entry in found] != [path for path, _ in own] or not found:
        raise ValueError("attention: expected all layers of attention_layers(checkpoint.model) in order, got others")
    if any(entry.module is not module for entry, (_, module) in zip(found, own, strict=True)):
        raise ValueError("attention: expected the layers of this model, got another's; pass attention_layers(model)")
    if model not in _WARNED and (skipped := skipped_layers(model)):
        path, reason = skipped[0]
        warnings.warn(
            f"{checkpoint.name}: {len(skipped)} layers are left out, first {path}: {reason} "
            "(cwlib.families.skipped_layers lists them)",
            stacklevel=2,
        )
    _WARNED.add(model)
    return _stream(model, found, attention is not None, model_inputs(checkpoint, text))


def _stream(
    model: nn.Module, found: Sequence[AttentionLayer], keep_cores: bool, inputs: Mapping[str, Tensor]
) -> Iterator[LayerWalk]:
    capture = _Capture(found, keep_cores, inputs)
    latest: dict[str, LayerWalk] = {}  # of every stack
    _LIVE.add(capture)
    try:
        capture.done = background.worker().start(partial(capture.run, model))
        while True:
            if os.getpid() != capture.process:
                raise RuntimeError("layers: this iterator began before the process forked; call cwlib.layers here anew")
            capture.resume.release()
            item = capture.deliver.get()
            if item is None:
                break
            if isinstance(item, BaseException):
                raise item
            stack, content = item
            current = LayerWalk(*content, weakref.ref(latest[stack]) if stack in latest else None)
            del item, content
            yield current
            latest[stack] = current
    finally:
        capture.end()
