"""The cells of a study: one set of weights on one passage, content-addressed, and how one is computed."""

import ctypes
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from cwlib.architectures import AttentionLayer, attention_layers
from cwlib.capture import layers
from cwlib.catalogue import CATALOGUE
from cwlib.checkpoints import Checkpoint, initialise, open_checkpoint, outline, tiny_checkpoint
from cwlib.cores import HeadTransports
from cwlib.corpus import Passage
from cwlib.metric import Layer
from cwlib.metrics import METRICS, RARELY
from cwlib.metrics_transport import TRIANGLES
from cwlib.nulls import KEEP_W, NullLayer, null_layers
from cwlib.placement import TOKENS
from cwlib.quantise import SCHEMES, quantised
from cwlib.statistics import WEIGHTS
from cwlib.walk import ConnectionWalk

INIT_SEEDS = (0, 1, 2)  #: seeds of the random-initialisation null
GAUSSIAN_SEEDS = (0,)
NULL_PASSAGES = 4  #: passages on which nulls are measured, spread evenly over the corpus
BYTES_PER_TOKEN = 3.5  #: of a text, under tokenizers of words and parts of them: about four in English prose
IDENTITY = ["checkpoint", "source", "seed", "passage"]  #: of a cell
ROW = [*IDENTITY, "layer", "metric", "gauge", "at"]


@dataclass(frozen=True)
class Cell:
    """One unit of work: some metrics of every layer, for one set of weights on one passage."""

    checkpoint: str
    sha256: str
    source: str  # "trained", a null of `cwlib.nulls`, or a scheme of `cwlib.quantise`
    seed: int
    passage: Passage | None  # None: weights only
    metrics: tuple[str, ...]
    dtype: str = "float32"
    setup: str = ""  # hash of configuration and tokenizer, where the catalogue does not fix them
    tokens: int = TOKENS  # about those of the longest text of the study: a model must leave room for them

    @property
    def passage_name(self) -> str:
        """The passage column of this cell's rows."""
        return WEIGHTS if self.passage is None else self.passage.name

    @property
    def key(self) -> str:
        """Content address: changes whenever a number in the cell could."""
        content = [
            self.sha256,
            self.source,
            self.seed,
            None if self.passage is None else self.passage.sha256,
            self.dtype,
            [(name, METRICS[name].version) for name in self.metrics],
            TRIANGLES,
        ] + ([self.setup] if self.setup else [])
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def tiny_family(name: str) -> str:
    """The family of a tiny random model, of a name as "tiny-bert"; empty for other names."""
    return name.removeprefix("tiny-") if name.startswith("tiny-") and "/" not in name else ""


def open_weights(
    name: str,
    source: str,
    seed: int,
    device: str,
    dtype: str,
    offload: bool | Literal["auto"] = "auto",
    tokens: int = TOKENS,
) -> Checkpoint:
    """Trained weights, or those of the source ``init`` or of a scheme of `cwlib.quantise`."""
    tiny = tiny_family(name)
    if source == "init":
        # by name, so that the trained weights are not read: two large models need not fit
        start = tiny_checkpoint(tiny, dtype=dtype) if tiny else name
        return initialise(start, seed, dtype, device, offload, tokens)
    if tiny:
        found = tiny_checkpoint(tiny, dtype=dtype)
    else:
        # a copy is rounded, of weights that are in memory
        offload = False if source in SCHEMES else offload
        found = open_checkpoint(name, device=device, dtype=dtype, offload=offload, tokens=tokens)
    return quantised(found, source) if source in SCHEMES else found


def approximate_tokens(text: str) -> int:
    """About as many tokens as a text has under the tokenizers here, rather more than fewer."""
    return round(len(text.encode()) / BYTES_PER_TOKEN)


def _identity(name: str) -> tuple[str, str, str]:
    """The sha256 of a checkpoint's weights, a hash of its configuration and tokenizer, and its kind."""
    # Catalogue entries are addressed without opening them, so that a current table needs no download.
    if name in CATALOGUE:
        return CATALOGUE[name].sha256, "", CATALOGUE[name].kind
    tiny = tiny_family(name)
    opened = tiny_checkpoint(tiny) if tiny else outline(name)
    # What the weights mean depends on the configuration, and which tokens they see on the tokenizer.
    config = opened.model.config.to_dict() | {"dtype": "float32"}  # in which it is loaded
    for incidental in ("_name_or_path", "transformers_version"):
        config.pop(incidental, None)
    content = [json.dumps(config, sort_keys=True, default=str), _content(opened.tokenizer)]
    return opened.sha256, hashlib.sha256(json.dumps(content).encode()).hexdigest(), opened.kind


def _content(tokenizer: Any) -> str:
    """What decides which tokens a tokenizer makes."""
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        return backend.to_str()
    if not hasattr(tokenizer, "get_vocab"):
        return ""
    settings = {k: v for k, v in tokenizer.init_kwargs.items() if k not in ("name_or_path", "vocab_file")}
    own = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items()), settings]
    return json.dumps(own, sort_keys=True, default=str)


def _spread(items: Sequence[Passage], count: int) -> list[Passage]:
    if len(items) <= count:
        return list(items)
    return [items[round(i)] for i in np.linspace(0, len(items) - 1, count)]


def plan(checkpoints: Iterable[str], texts: Sequence[Passage], control: Iterable[str] = ()) -> list[Cell]:
    """The cells of a study.

    Parameters
    ----------
    checkpoints : iterable of str
        Measured by all metrics on all passages, and beside them the nulls of `cwlib.nulls` on `NULL_PASSAGES` of the
        passages; metrics that take seconds on the first of these only, of trained weights and Gaussian maps.
    texts : sequence of Passage
        The corpus.
    control : iterable of str
        Those of the checkpoints that are measured once more after rounding, in each scheme of `cwlib.quantise`.

    Raises
    ------
    ValueError, cwlib.CheckpointError
        If a checkpoint cannot be had, which is found out without its weights being loaded.
    """
    on_weights = tuple(m.name for m in METRICS.values() if m.weights_only)
    on_text = tuple(m.name for m in METRICS.values() if not m.weights_only and m.about not in RARELY)
    rarely = tuple(m.name for m in METRICS.values() if m.about in RARELY)
    pairs = tuple(m.name for m in METRICS.values() if m.about == "pairs")
    nulls = tuple(n for n in on_text if n != "t2_residual")
    on_walk = tuple(n for n in nulls if METRICS[n].about != "transport")  # what dealing out attention anew can change
    null_texts, control = _spread(texts, NULL_PASSAGES), set(control)
    cells = []
    longest = max((approximate_tokens(passage.text) for passage in texts), default=0)
    for name in checkpoints:
        sha, setup, kind = _identity(name)
        variants = [("trained", 0, texts, on_text)]
        variants += [("gaussian", seed, null_texts, nulls) for seed in GAUSSIAN_SEEDS]
        variants += [("init", seed, null_texts, nulls) for seed in INIT_SEEDS]
        variants += [(scheme, 0, texts, nulls) for scheme in (SCHEMES if name in control else ())]
        for source, seed, chosen, names in variants:
            cells.append(Cell(name, sha, source, seed, None, on_weights, setup=setup))
            for passage in chosen:
                once = source in ("trained", "gaussian") and passage == null_texts[0]
                extra = rarely if once else ()
                cells.append(Cell(name, sha, source, seed, passage, names + extra, setup=setup))
        cells += [Cell(name, sha, "shuffled", 0, passage, on_walk, setup=setup) for passage in null_texts]
        if kind == "decoder":
            for passage in null_texts:
                # are layers alike beyond the sink that they share?
                names = (*nulls, *pairs) if passage == null_texts[0] else nulls
                cells.append(Cell(name, sha, "sinkless", 0, passage, names, setup=setup))
    return [replace(cell, tokens=max(longest, TOKENS)) for cell in cells]


def _measured(
    cell: Cell, checkpoint: Checkpoint, gaussians: dict[int, HeadTransports], found: Sequence[AttentionLayer]
) -> Iterator[tuple[int, Layer]]:
    """The layers of a cell as something `METRICS` can be computed on."""
    if cell.passage is None:
        for entry in found:
            # weights only: any attention will do
            transports = entry.transports
            nothing = torch.ones(transports.heads, 1, 1, dtype=torch.float64, device=transports.value.device)
            walk = ConnectionWalk.from_transports(nothing, transports)
            bare = NullLayer(walk, torch.empty(0, transports.d_model), None, entry.index)
            yield from null_layers(cell.source, cell.seed, [bare], gaussians)
        return
    yield from null_layers(cell.source, cell.seed, layers(checkpoint, cell.passage.text, found), gaussians)


def release_memory() -> None:
    """Give back to the system what is free; glibc would keep it, gigabytes after a large model."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def evaluate(
    cell: Cell,
    checkpoint: Checkpoint,
    gaussians: dict[int, HeadTransports] | None = None,
    found: Sequence[AttentionLayer] | None = None,
) -> pd.DataFrame:
    """Compute one cell: a row per layer, metric and gauge; undefined values are left out.

    Parameters
    ----------
    cell : Cell
        What to compute.
    checkpoint : Checkpoint
        The weights, trained or initialised, that ``cell`` names.
    gaussians : dict, optional
        Gaussian transports by layer, kept between cells so that their cores are computed once.
    found : sequence of AttentionLayer, optional
        The checkpoint's attention layers, likewise.
    """
    gaussians = {} if gaussians is None else gaussians
    found = attention_layers(checkpoint.model) if found is None else found
    rows, chain = [], None
    pairs = any(METRICS[name].about == "pairs" for name in cell.metrics)
    for index, layer in _measured(cell, checkpoint, gaussians, found):
        if pairs:
            # all layers at once, so without what the other metrics have computed on each
            walk = layer.walk
            bare = ConnectionWalk.from_transports(walk.attention, walk.transports, None, walk.absorption)
            chain = NullLayer(bare, layer.field, chain, index)
        for name in cell.metrics:
            metric = METRICS[name]
            gauges = ("mean", "norm") if metric.about == "graph" else ("",)
            for gauge in gauges:
                if cell.source in KEEP_W and gauge == "mean":
                    continue  # the null keeps W: the same number as the trained row
                values = np.atleast_1d(metric.compute(chain if metric.about == "pairs" else layer, gauge or "mean"))
                places = [f"{t:g}" for t in metric.at] or [""]
                rows += [(index, name, gauge, t, v) for t, v in zip(places, values, strict=True) if not np.isnan(v)]
        release_memory()
    table = pd.DataFrame(rows, columns=["layer", "metric", "gauge", "at", "value"])
    head = {"checkpoint": cell.checkpoint, "source": cell.source, "seed": cell.seed, "passage": cell.passage_name}
    return table.assign(**head)[[*ROW, "value"]]


def provenance(cell: Cell, checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "checkpoint": cell.checkpoint,
        "kind": checkpoint.kind,
        "source": cell.source,
        "seed": cell.seed,
        "passage": cell.passage_name,
        "key": cell.key,
        "sha256": cell.sha256,
        "parameters": checkpoint.parameters,
        "stored_as": checkpoint.precision,
        "dtype": cell.dtype,
        "device": checkpoint.device,
        "revision": checkpoint.revision,
        "threads": torch.get_num_threads(),
        "torch": version("torch").partition("+")[0],
        "transformers": version("transformers"),
    }
