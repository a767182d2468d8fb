r"""The other ways to the numbers that cwlib reads off small cores (T9), to be timed beside it and compared with it.

Each is what a competent user would write without cores: dense d_model x d_model transports, LAPACK on the dense
operator, TransformerLens, and forward passes of a model. Everywhere a ``dtype`` is float32 or float64, the precision of
the whole computation; ``edges`` are pairs (dst, src); ``ids`` are the token ids of one text, and a model runs in
evaluation mode, without gradients or a cache of keys. Anything else is a ValueError.
"""

import copy
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from cwlib.cores import HeadTransports
from cwlib.measures import Measure
from cwlib.walk import ConnectionWalk

Edges = Int[Tensor, "edge 2"]
PerEdge = Float[Tensor, " edge"]
Ids = Int[Tensor, "1 token"]
Singular = Float[Tensor, "head rank"]  #: the min(d_head, d_model) largest singular values of every head, descending

# what TransformerLens caches of a layer that `cwlib.layers` hands over too: attention, field and output
_CACHED = (".attn.hook_pattern", ".attn.hook_in", ".hook_attn_out")
_MISSING = "transformer_lens: expected TransformerLens 4 to be installed, got none; pip install 'cwlib[bench]'"


def dense_singular_values(
    transports: HeadTransports, heads: Sequence[int], dtype: torch.dtype = torch.float64
) -> Singular:
    r"""Singular values of :math:`T_h = O_hV_h` of given query heads, each formed as a d_model x d_model matrix (T9).

    Raises
    ------
    ValueError
        If there are no heads, one is out of range, or the dtype is another.
    """
    if not len(heads) or not all(0 <= head < transports.heads for head in heads):
        raise ValueError(f"heads: expected at least one query head in 0..{transports.heads - 1}, got {list(heads)}")
    return torch.linalg.svdvals(_dense_transports(transports, heads, dtype))[:, : transports.d_head]


def lens_installed() -> bool:
    """Whether TransformerLens can be timed at all."""
    return importlib.util.find_spec("transformer_lens") is not None


def lens_factors(transports: HeadTransports, dtype: torch.dtype = torch.float32) -> Any:
    r"""The layer's :math:`T_h^T = W_V^hW_O^h` as one ``FactoredMatrix`` of TransformerLens, batched over query heads.

    Returns
    -------
    transformer_lens.FactoredMatrix
        Factors W_V (head, d_model, d_head), repeated for query heads that share a value head, and W_O (head, d_head,
        d_model), both contiguous, as in a loaded model. Its ``S`` are the singular values; they are kept on the object,
        so that every run that is timed needs a new one.

    Raises
    ------
    ImportError
        If TransformerLens is not installed.
    ValueError
        If the dtype is another.
    """
    try:
        from transformer_lens import FactoredMatrix
    except ImportError as error:
        raise ImportError(_MISSING) from error
    _require_precision(dtype)
    value = transports.value.detach().to(dtype).mT.repeat_interleave(transports.groups, 0)
    return FactoredMatrix(value, transports.output.detach().to(dtype).mT.contiguous())


def lens_stacked(layers: Sequence[HeadTransports], dtype: torch.dtype = torch.float32) -> Any:
    """The same for all layers of a model in one ``FactoredMatrix``, batched over layers and heads, as ``model.OV``."""
    factors = [lens_factors(layer, dtype) for layer in layers]
    return type(factors[0])(torch.stack([f.A for f in factors]), torch.stack([f.B for f in factors]))


def edge_isometry_by_svd(walk: ConnectionWalk, edges: Edges) -> PerEdge:
    r"""Isometry :math:`(\sum s^2)^2/(r\sum s^4)` of each edge from the singular values s of its dense transport (T7).

    One decomposition of a d_model x d_model matrix per edge, in float64 and the sum gauge (the scale does not matter).

    Returns
    -------
    Float[Tensor, "edge"]
        In (0, 1]; NaN where the edge carries no weight.

    Raises
    ------
    ValueError
        If edges are not pairs of integers, there are none, or one is out of range.
    """
    gates, ranks = _gates_and_ranks(walk, edges)
    maps = _dense_transports(walk.transports, range(walk.heads), torch.float64)
    result = torch.empty_like(ranks)
    for edge, (mixture, rank) in enumerate(zip(gates, ranks, strict=True)):
        squares = torch.linalg.svdvals(torch.tensordot(mixture, maps, 1)) ** 2
        result[edge] = squares.sum() ** 2 / (rank * (squares**2).sum())
    return result


def edge_isometry_by_einsum(
    walk: ConnectionWalk, edges: Edges, chunk: int, dtype: torch.dtype = torch.float64
) -> PerEdge:
    r"""Isometry :math:`|\Omega|_F^4/(r|\Omega^T\Omega|_F^2)` of each edge, batched, from dense transports (T7).

    No decomposition: a chunk's transports are one product of gates (edge, head) with the heads' dense maps (head,
    d_model^2), and their Gram matrices one batched product; two d_model x d_model matrices are held for each edge of a
    chunk. Result and errors as in `edge_isometry_by_svd`, and a ValueError if the chunk is not positive or the dtype is
    another.
    """
    if chunk < 1:
        raise ValueError(f"chunk: expected at least one edge at a time, got {chunk}")
    gates, ranks = (numbers.to(dtype) for numbers in _gates_and_ranks(walk, edges))
    maps = _dense_transports(walk.transports, range(walk.heads), dtype)
    result = torch.empty_like(ranks)
    for some in torch.arange(len(edges), device=ranks.device).split(chunk):
        omega = (gates[some] @ maps.flatten(1)).unflatten(1, maps.shape[1:])
        gram = omega.mT @ omega
        squares = gram.diagonal(dim1=1, dim2=2).sum(1)
        result[some] = (squares / torch.linalg.vector_norm(gram, dim=(1, 2))) ** 2 / ranks[some]
    return result


def dense_laplacian_defect(walk: ConnectionWalk, measure: Measure) -> float:
    r"""Distance of the dense operator from its self-adjoint part, :math:`\frac12|K - K^*|_M/|K|_M` in [0, 1] (T5).

    With :math:`M = blockdiag(\pi_iI)` for positive weights :math:`\pi`, the adjoint is :math:`K^* = M^{-1}K^TM`. In the
    coordinates :math:`M^{1/2}x` it is the transpose, and :math:`|\cdot|_M` the Frobenius norm.

    Raises
    ------
    ValueError
        If there are not as many destinations as sources, the dense operator would take more than 1 GiB, or the measure
        is not one positive weight per token.
    """
    if walk.n_dst != walk.n_src:
        raise ValueError(f"walk: expected as many destinations as sources, got {walk.n_dst} and {walk.n_src}")
    if tuple(measure.shape) != (walk.n_dst,) or not ((measure > 0) & measure.isfinite()).all():
        raise ValueError(f"measure: expected {walk.n_dst} positive weights, one per token, got {measure.tolist()}")
    roots = measure.to(torch.float64).sqrt().repeat_interleave(walk.d_model)
    operator = roots[:, None] * walk.to_dense() / roots
    return float(torch.linalg.norm(operator - operator.T) / (2 * torch.linalg.norm(operator)))


def dense_schmidt_values(walk: ConnectionWalk) -> Float[Tensor, " head"]:
    r"""Operator Schmidt values: singular values of the realigned dense operator, float64 (T3).

    Returns
    -------
    Float[Tensor, "head"]
        The first H of the (dst src) x d_model^2 matrix with rows vec(K_ij), padded with zeros if it has fewer.

    Raises
    ------
    ValueError
        If the dense operator would take more than 1 GiB.
    """
    blocks = walk.to_dense().view(walk.n_dst, walk.d_model, walk.n_src, walk.d_model).transpose(1, 2)
    values = torch.linalg.svdvals(blocks.reshape(walk.n_dst * walk.n_src, -1))
    return nn.functional.pad(values, (0, walk.heads - len(values)))  # a negative width cuts


def plain_forward(model: nn.Module, ids: Ids) -> Tensor:
    """One forward pass of a transformers model, as its attention is set: what every way of capturing pays at least.

    Returns the last hidden state, or the logits of a model with a head.

    Raises
    ------
    ValueError
        If the model is in training mode, or ids are not those of one text.
    """
    _require_text(model, ids)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False)[0]


def forward_with_attentions(model: nn.Module, ids: Ids) -> Any:
    """One forward pass of a transformers model that returns what it went through, of all layers together at its end.

    Returns
    -------
    transformers.utils.ModelOutput
        ``attentions``: (1, head, dst, src) per layer; ``hidden_states``: (1, token, d_model), one more than layers.

    Raises
    ------
    ValueError
        As in `plain_forward`, and if attention is not eager: no other returns its weights.
    """
    _require_text(model, ids)
    if model.config._attn_implementation != "eager":
        raise ValueError(
            f"model: expected eager attention, got {model.config._attn_implementation!r}, which returns no weights; "
            "call model.set_attn_implementation('eager')"
        )
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, output_attentions=True, output_hidden_states=True)


class _OneLogit(nn.Module):
    """A GPT2Model under a head of one logit: a bridge needs a head, and one of a whole vocabulary would cost time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.config, self.transformer = model.config, model
        self.lm_head = nn.Linear(model.config.n_embd, 1, bias=False, device=model.device, dtype=model.dtype)

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        return self.lm_head(self.transformer(input_ids, **options)[0])


def lens_model(model: nn.Module) -> Any:
    """A bridge of TransformerLens to a GPT2Model or GPT2LMHeadModel in memory, for `lens_run_with_cache`.

    It holds the raw weights, of any size: nothing is folded, nothing downloaded (``boot_transformers`` would ask the
    hub for a tokenizer). The model is copied, for a bridge replaces the modules of the one that it is given.

    Raises
    ------
    ImportError
        If TransformerLens is not installed.
    ValueError
        If the model is not a GPT-2, or in training mode.
    """
    try:
        from transformer_lens.model_bridge.sources import build_bridge_from_module
    except ImportError as error:
        raise ImportError(_MISSING) from error
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family != "gpt2":
        raise ValueError(f"model: expected a GPT2Model or GPT2LMHeadModel of transformers, got {family}")
    _require_evaluation(model)
    own = copy.deepcopy(model)
    # the bridge asks the outermost module whether to drop attention out, and a new module is in training mode
    whole = own if hasattr(own, "lm_head") else _OneLogit(own).eval()
    return build_bridge_from_module(whole, "GPT2LMHeadModel", hf_config=own.config)


def lens_run_with_cache(lens: Any, ids: Ids) -> Any:
    """One forward pass of a `lens_model` that caches of every layer what `cwlib.layers` hands over, and no more.

    Returns
    -------
    transformer_lens.ActivationCache
        Of layer l ``cache["pattern", l]``, attention (1, head, dst, src); ``cache["blocks.{l}.attn.hook_in"]``, field,
        and ``cache["attn_out", l]``, output, both (1, token, d_model). Errors as in `plain_forward`.
    """
    _require_text(lens, ids)
    with torch.no_grad():
        return lens.run_with_cache(ids, names_filter=lambda name: name.endswith(_CACHED), use_cache=False)[1]


def _dense_transports(
    transports: HeadTransports, heads: Sequence[int], dtype: torch.dtype
) -> Float[Tensor, "head d_model d_model"]:
    _require_precision(dtype)
    shared = [head // transports.groups for head in heads]
    return transports.output.detach()[list(heads)].to(dtype) @ transports.value.detach()[shared].to(dtype)


def _gates_and_ranks(walk: ConnectionWalk, edges: Edges) -> tuple[Float[Tensor, "edge head"], PerEdge]:
    """Gates of the edges, zero where there is no weight (T2), and the widths of the active value heads (T7)."""
    size = (walk.n_dst, walk.n_src)
    pairs = edges.ndim == 2 and edges.shape[1] == 2 and len(edges) > 0 and edges.dtype in (torch.int64, torch.int32)
    if not pairs or (edges < 0).any() or (edges >= edges.new_tensor(size)).any():
        got = f"{edges.dtype} of shape {tuple(edges.shape)}"
        got += f" from {edges.amin(0).tolist()} to {edges.amax(0).tolist()}" if pairs else ""
        raise ValueError(f"edges: expected integers (dst, src) of shape (edge, 2) below {size}, got {got}")
    attention = walk.attention.detach()[:, edges[:, 0], edges[:, 1]].T.to(torch.float64)
    total = attention.sum(1, keepdim=True)
    active = (attention > 0).unflatten(1, (-1, walk.groups)).any(2).sum(1)
    ranks = (active * walk.transports.d_head).clamp_max(walk.d_model)
    return attention / torch.where(total > 0, total, 1.0), ranks.to(torch.float64)


def _require_precision(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: expected torch.float32 or torch.float64, got {dtype}")


def _require_evaluation(model: nn.Module) -> None:
    if model.training:
        raise ValueError("model: expected evaluation mode, got training mode; call model.eval()")


def _require_text(model: nn.Module, ids: Ids) -> None:
    _require_evaluation(model)
    if ids.ndim != 2 or ids.shape[0] != 1 or not ids.numel() or ids.is_floating_point():
        raise ValueError(f"ids: expected integers of shape (1, token), got {ids.dtype} of shape {tuple(ids.shape)}")
