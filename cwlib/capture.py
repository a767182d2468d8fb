"""Run a model on text and hand over one attention layer at a time.

The model's own forward pass runs once, in its eager attention path, on a worker thread that stops after every attention
layer until the consumer asks for the next: each layer's attention can be dropped before the next one is computed, and
no second pass is needed.
"""

import inspect
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

import torch
from torch import Tensor, nn

from cwlib._types import Field, Section
from cwlib.architectures import AttentionLayer, attention_layers
from cwlib.checkpoints import Checkpoint
from cwlib.checks import relative_residual
from cwlib.walk import ConnectionWalk


@dataclass(frozen=True, eq=False)
class LayerWalk:
    """One attention layer of a model on one text, as a connection walk.

    Attributes
    ----------
    index : int
        Layer number, from 0.
    walk : ConnectionWalk
        Attention as the model computed it, value and output maps, and the constant section of the biases.
    field : Float[Tensor, "src d_model"]
        The token vectors that the attention saw (after the norm in pre-norm models), in the model's dtype.
    output : Float[Tensor, "dst d_model"]
        The module's own attention output after its output projection, before residual and post-norm.
    """

    index: int
    walk: ConnectionWalk
    field: Field = dataclass_field(repr=False)
    output: Section = dataclass_field(repr=False)
    _previous: "weakref.ref[LayerWalk] | None" = dataclass_field(default=None, repr=False)

    @property
    def previous(self) -> "LayerWalk | None":
        """The layer before, as long as it is alive: while streaming, until the next layer is asked for."""
        return None if self._previous is None else self._previous()

    def residual(self) -> float:
        r"""Relative distance between :math:`P X` plus the constant section and the module's own output (T2)."""
        return relative_residual(self.walk.apply(self.field), self.output)


class _Cancelled(BaseException):
    """Ends the model's forward pass when the consumer has stopped asking."""


_EAGER_USERS: "weakref.WeakKeyDictionary[nn.Module, tuple[int, str]]" = weakref.WeakKeyDictionary()
_EAGER_LOCK = threading.Lock()


@contextmanager
def _eager_attention(model: nn.Module) -> Iterator[None]:
    """Switch a model to its eager attention path, the one that returns attention, for the outermost user only."""
    with _EAGER_LOCK:
        users, found = _EAGER_USERS.get(model, (0, model.config._attn_implementation))
        _EAGER_USERS[model] = (users + 1, found)
        if users == 0 and found != "eager":
            model.set_attn_implementation("eager")
    try:
        yield
    finally:
        with _EAGER_LOCK:
            users, found = _EAGER_USERS.pop(model)
            if users > 1:
                _EAGER_USERS[model] = (users - 1, found)
            elif found != "eager":
                model.set_attn_implementation(found)


def token_ids(checkpoint: Checkpoint, text: str | Sequence[int] | Tensor) -> Tensor:
    """Token ids of one text as a (1, n) tensor on the checkpoint's device.

    Parameters
    ----------
    checkpoint : Checkpoint
        Supplies the tokenizer and the limits.
    text : str, sequence of int, or integer Tensor
        A text, encoded with the tokenizer's special tokens; or the ids of one unpadded sequence, shape (n,) or (1, n).

    Raises
    ------
    ValueError
        If the text is empty, ids are out of the vocabulary or not of one sequence, a padded batch is given, or the
        sequence is longer than the model's context.
    """
    if isinstance(text, str):
        ids = torch.tensor(checkpoint.encode(text))
    else:
        if hasattr(text, "keys"):
            raise ValueError(
                "text: expected a string or the ids of one unpadded sequence, got a mapping; pass "
                "batch['input_ids'][0][batch['attention_mask'][0].bool()], which drops the padding"
            )
        try:
            ids = torch.as_tensor(text)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"text: expected a string or a sequence of token ids, got {type(text).__name__}"
            ) from error
    if ids.ndim == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise ValueError(
            f"text: expected one sequence of shape (n,) or (1, n), got {tuple(ids.shape)}; call layers once per "
            "sequence, without padding"
        )
    if len(ids) == 0:
        raise ValueError("text: expected at least one token, got none; pass a non-empty text")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"text: expected integer token ids, got {ids.dtype}")
    ids = ids.to(torch.long)
    vocabulary = checkpoint.model.get_input_embeddings().num_embeddings
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise ValueError(
            f"text: expected token ids in 0..{vocabulary - 1}, got {int(ids.min())}..{int(ids.max())}; "
            "were they made by another tokenizer?"
        )
    limit = checkpoint.context_length
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"text: expected at most {limit} tokens, the context of {checkpoint.name}, got {len(ids)}; shorten the text"
        )
    return ids[None].to(checkpoint.device)


class _Capture:
    """Hooks that assemble one LayerWalk per attention layer and pass it to the consumer."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        keep_cores: bool,
        deliver: "queue.Queue",
        resume: threading.Semaphore,
    ) -> None:
        self.keep_cores, self.deliver, self.resume = keep_cores, deliver, resume
        self.stopped = False
        self.thread: threading.Thread | None = None
        self.handles: list = []
        for layer in layers:
            seen: dict[str, Tensor] = {}
            self._hook(layer, seen)

    def _hook(self, layer: AttentionLayer, seen: dict[str, Tensor]) -> None:
        wants_flag = "output_attentions" in inspect.signature(layer.module.forward).parameters

        def mine() -> bool:
            # Two captures of one model may interleave; each sees only its own forward pass.
            return threading.current_thread() is self.thread

        # torch calls a hook that another thread removes meanwhile without its keyword arguments.
        def before(_module: nn.Module, *call: Any) -> tuple[tuple, dict] | None:
            if not (mine() and wants_flag):
                return None
            args, kwargs = call
            return args, kwargs | {"output_attentions": True}

        def attended(_module: nn.Module, *call: Any) -> None:
            if mine():
                args, kwargs, result = call
                if len(result) < 2 or result[1] is None:
                    raise RuntimeError(f"{layer.path}: the eager attention path returned no attention weights")
                seen["field"] = args[0] if args else kwargs["hidden_states"]
                seen["attention"] = result[1]
                finish()

        def projected(_module: nn.Module, _args: tuple, result: Tensor) -> None:
            if mine():
                seen["output"] = result
                finish()

        def finish() -> None:
            # The projection runs inside the attention module in most families, after it in BERT.
            if len(seen) == 3:
                field, attention, output = (seen.pop(k)[0].detach() for k in ("field", "attention", "output"))
                maps = layer.maps if self.keep_cores else layer.read()
                walk = ConnectionWalk.from_transports(attention, maps.transports, maps.constant(attention))
                self.hand_over((layer.index, walk, field, output))

        self.handles.append(layer.module.register_forward_pre_hook(before, with_kwargs=True))
        self.handles.append(layer.module.register_forward_hook(attended, with_kwargs=True))
        self.handles.append(layer.projection.register_forward_hook(projected))

    def hand_over(self, item: object) -> None:
        self.deliver.put(item)
        del item  # the consumer alone decides how long the layer lives
        self.resume.acquire()
        if self.stopped:
            raise _Cancelled


def layers(
    checkpoint: Checkpoint, text: str | Sequence[int] | Tensor, attention: Sequence[AttentionLayer] | None = None
) -> Iterator[LayerWalk]:
    r"""Stream the attention layers of a model on one text as connection walks.

    Parameters
    ----------
    checkpoint : Checkpoint
        From `cwlib.open_checkpoint`.
    text : str, sequence of int, or integer Tensor
        One text, or the token ids of one unpadded sequence.
    attention : sequence of AttentionLayer, optional
        From `cwlib.architectures.attention_layers`, to compute the cores of the weights once for many texts, as long as
        the weights do not change. By default they are read from the model at every call.

    Yields
    ------
    LayerWalk
        In the order of the forward pass. The next layer is computed only when asked for.

    Raises
    ------
    ValueError
        If the input is empty, padded, too long or not of this vocabulary; if the model is in training mode (dropout
        would be part of the walk); or if its attention is of an unsupported type.

    Notes
    -----
    The inputs are checked when the function is called, before iteration starts.
    """
    model = checkpoint.model
    if model.training:
        raise ValueError("checkpoint: expected a model in evaluation mode, got training mode; call model.eval()")
    found = attention_layers(model) if attention is None else attention
    modules = dict(model.named_modules())
    if [entry.index for entry in found] != list(range(len(found))) or not found:
        raise ValueError("attention: expected all layers of attention_layers(checkpoint.model) in order, got others")
    if any(modules.get(entry.path) is not entry.module for entry in found):
        raise ValueError("attention: expected the layers of this model, got another's; pass attention_layers(model)")
    return _stream(model, found, attention is not None, token_ids(checkpoint, text))


def _stream(model: nn.Module, found: Sequence[AttentionLayer], keep_cores: bool, ids: Tensor) -> Iterator[LayerWalk]:
    deliver: queue.Queue = queue.Queue()
    resume = threading.Semaphore(0)
    capture = _Capture(found, keep_cores, deliver, resume)

    def forward() -> None:
        try:
            resume.acquire()
            if not capture.stopped:
                with torch.inference_mode(False), torch.no_grad():
                    extra = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
                    model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra)
            deliver.put(None)
        except _Cancelled:
            deliver.put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            deliver.put(error)

    thread = capture.thread = threading.Thread(target=forward, name="cwlib-forward", daemon=True)
    previous: LayerWalk | None = None
    try:
        with _eager_attention(model):
            try:
                thread.start()
                while True:
                    resume.release()
                    item = deliver.get()
                    if item is None:
                        break
                    if isinstance(item, BaseException):
                        raise item
                    link = None if previous is None else weakref.ref(previous)
                    current = LayerWalk(*item, link)
                    del item
                    yield current
                    previous = current
            finally:
                capture.stopped = True
                resume.release()
                thread.join()
    finally:
        for handle in capture.handles:
            handle.remove()
