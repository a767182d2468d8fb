"""Tiny models of every family, and where their weights are by name: an oracle that shares nothing with cwlib.

What goes into a value map and what comes out of an output map is seen by plain hooks on these two linear layers.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from tempfile import TemporaryDirectory

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

import cwlib
from cwlib.capture import LayerWalk
from cwlib.checkpoints import Checkpoint, tiny_checkpoint

HEADS, HIDDEN = 4, 48
IDS = [7, 40, 3, 99, 120, 40, 8, 250, 61, 17, 5, 201, 33]
OTHER_IDS = [1, 88, 14, 240, 9, 31, 77]

Mask = Callable[[int, Tensor, Tensor], Tensor]  # of a layer: which (dst, src) attend


def full(_layer: int, i: Tensor, j: Tensor) -> Tensor:
    return torch.ones_like(i, dtype=torch.bool)


def causal(_layer: int, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def window(*layers: int) -> Mask:
    """Causal, and in these layers no further back than seven tokens."""
    return lambda layer, i, j: (j <= i) & ((i - j < 8) | (layer not in layers))


def around(*layers: int) -> Mask:
    """In these layers at most four tokens to either side."""
    return lambda layer, i, j: ((i - j).abs() <= 4) | (layer not in layers)


@dataclass(frozen=True)
class Stack:
    """The attention layers of one stack; '{}' in a path stands for the layer, '~' for the attention module."""

    path: str
    value: str
    output: str
    mask: Mask
    layers: int = 3
    layout: str = "rows"  # or "columns" (in, out), "tail": value heads last, "interleaved": last in every value head
    attentions: str = "attentions"  # where the model's own result has them
    kind: str = "self"

    def name(self, projection: str, layer: int) -> str:
        return projection.replace("~", self.path).format(layer)


BERT = ("encoder.layer.{}.attention.self", "~.value", "encoder.layer.{}.attention.output.dense", full)
LLAMA = ("layers.{}.self_attn", "~.v_proj", "~.o_proj")
CLIP = ("encoder.layers.{}.self_attn", "~.v_proj", "~.out_proj")
GROUPED = ("~.query_key_value", "~.dense", causal)

STACKS: dict[str, tuple[Stack, ...]] = {
    "bert": (Stack(*BERT),),
    "roberta": (Stack(*BERT),),
    "xlm-roberta": (Stack(*BERT),),
    "electra": (Stack(*BERT),),
    "distilbert": (Stack("transformer.layer.{}.attention", "~.v_lin", "~.out_lin", full),),
    "albert": (Stack("encoder.albert_layer_groups.0.albert_layers.0.attention", "~.value", "~.dense", full),),
    "mpnet": (Stack("encoder.layer.{}.attention.attn", "~.v", "~.o", full),),
    "modernbert": (Stack("layers.{}.attn", "~.Wqkv", "~.Wo", around(1), layout="tail"),),
    "deberta-v2": (Stack("encoder.layer.{}.attention", "~.self.value_proj", "~.output.dense", full),),
    "vit": (Stack("layers.{}.attention", "~.v_proj", "~.o_proj", full),),
    "clip-text": (Stack(*CLIP, causal),),
    "clip-vision": (Stack(*CLIP, full),),
    "clip": (
        Stack("vision_model.encoder.layers.{}.self_attn", *CLIP[1:], full, attentions="vision_model_output.attentions"),
        Stack("text_model.encoder.layers.{}.self_attn", *CLIP[1:], causal, attentions="text_model_output.attentions"),
    ),
    "gpt2": (Stack("h.{}.attn", "~.c_attn", "~.c_proj", causal, layout="columns"),),
    "gpt_neo": (Stack("h.{}.attn.attention", "~.v_proj", "~.out_proj", window(1, 3), layers=4),),
    "gpt_neox": (Stack("layers.{}.attention", *GROUPED, layout="interleaved"),),
    "gptj": (Stack("h.{}.attn", "~.v_proj", "~.out_proj", causal),),
    "opt": (Stack("decoder.layers.{}.self_attn", "~.v_proj", "~.out_proj", causal),),
    "bloom": (Stack("h.{}.self_attention", *GROUPED, layout="interleaved"),),
    "falcon": (Stack("h.{}.self_attention", *GROUPED, layout="tail"),),
    "falcon-new": (Stack("h.{}.self_attention", *GROUPED, layout="interleaved"),),
    "falcon-alibi": (Stack("h.{}.self_attention", *GROUPED, layout="interleaved"),),
    "llama": (Stack(*LLAMA, causal),),
    "mistral": (Stack(*LLAMA, window(0, 1, 2)),),
    "qwen2": (Stack(*LLAMA, causal),),
    "qwen3": (Stack(*LLAMA, causal),),
    "gemma2": (Stack(*LLAMA, window(0, 2)),),
    "gemma3": (Stack(*LLAMA, window(0, 2), layers=4),),
    "phi": (Stack("layers.{}.self_attn", "~.v_proj", "~.dense", causal),),
    "phi3": (Stack("layers.{}.self_attn", "~.qkv_proj", "~.o_proj", window(0, 1, 2), layout="tail"),),
    "olmo2": (Stack(*LLAMA, causal),),
    "stablelm": (Stack(*LLAMA, causal),),
    "granite": (Stack(*LLAMA, causal),),
    "mixtral": (Stack(*LLAMA, causal),),
    "qwen2_moe": (Stack(*LLAMA, causal),),
    "qwen3_moe": (Stack(*LLAMA, causal),),
    "gpt_oss": (Stack(*LLAMA, window(0, 2)),),
    "t5": (
        Stack("encoder.block.{}.layer.0.SelfAttention", "~.v", "~.o", full, 2, attentions="encoder_attentions"),
        Stack("decoder.block.{}.layer.0.SelfAttention", "~.v", "~.o", causal, attentions="decoder_attentions"),
        Stack(
            "decoder.block.{}.layer.1.EncDecAttention",
            *("~.v", "~.o", full),
            attentions="cross_attentions",
            kind="cross",
        ),
    ),
    "jamba": (Stack(*LLAMA, causal, layers=1),),
    "bamba": (Stack(*LLAMA, causal, layers=1),),
    "granitemoehybrid": (Stack(*LLAMA, causal, layers=1),),
}
STACKS["bart"] = STACKS["whisper"] = (
    Stack("encoder.layers.{}.self_attn", *CLIP[1:], full, 2, attentions="encoder_attentions"),
    Stack("decoder.layers.{}.self_attn", *CLIP[1:], causal, attentions="decoder_attentions"),
    Stack("decoder.layers.{}.encoder_attn", *CLIP[1:], full, attentions="cross_attentions", kind="cross"),
)
HYBRIDS = {"jamba": 1, "bamba": 1, "granitemoehybrid": 1, "lfm2": 1}  # the layer that has attention
FULL = tuple(STACKS)  # what every test looks at; relatives, whose modules are alike, are in a few
TEXT_FAMILIES = tuple(f for f in FULL if f not in ("vit", "clip-vision", "clip", "t5", "bart", "whisper"))

RELATIVES: dict[str, tuple[Stack, ...]] = {
    **dict.fromkeys(("camembert", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl"), (Stack(*BERT),)),
    **dict.fromkeys(("ernie", "esm", "megatron-bert", "rembert", "roformer", "big_bird"), (Stack(*BERT),)),
    **dict.fromkeys(("nomic_bert", "eurobert", "jina_embeddings_v3"), (Stack(*LLAMA, full),)),
    **dict.fromkeys(("gemma", "cohere", "olmo", "olmoe", "smollm3", "glm", "glm4", "granitemoe"), STACKS["llama"]),
    **dict.fromkeys(("phimoe", "nemotron", "ernie4_5", "seed_oss", "apertus", "ministral3"), STACKS["llama"]),
    **dict.fromkeys(("cohere2", "olmo3", "exaone4"), STACKS["gemma2"]),
    "llama4_text": STACKS["llama"],
    "starcoder2": STACKS["mistral"],
    "biogpt": (Stack("layers.{}.self_attn", *CLIP[1:], causal),),
    "gpt_bigcode": (Stack("h.{}.attn", "~.c_attn", "~.c_proj", causal, layout="tail"),),
    "persimmon": (Stack("layers.{}.self_attn", *GROUPED, layout="interleaved"),),
    "modernbert-decoder": (Stack("layers.{}.attn", "~.v_proj", "~.Wo", window(0, 2)),),
    "lfm2": (Stack("layers.{}.self_attn", "~.v_proj", "~.out_proj", causal, layers=1),),
    "deit": STACKS["vit"],
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), (Stack("encoder.layer.{}.attention", *LLAMA[1:], full),)),
    "dinov3_vit": (Stack("model.layer.{}.attention", *LLAMA[1:], full),),
    **dict.fromkeys(("wav2vec2", "hubert"), (Stack("encoder.layers.{}.attention", *CLIP[1:], full),)),
    **dict.fromkeys(("mbart", "pegasus", "marian", "m2m_100"), STACKS["bart"]),
    **dict.fromkeys(("blenderbot", "blenderbot-small", "plbart"), STACKS["bart"]),
    **dict.fromkeys(("mt5", "umt5", "switch_transformers"), STACKS["t5"]),
    "t5gemma": (
        Stack("encoder.layers.{}.self_attn", *LLAMA[1:], full, 2, attentions="encoder_attentions"),
        Stack("decoder.layers.{}.self_attn", *LLAMA[1:], causal, attentions="decoder_attentions"),
        Stack("decoder.layers.{}.cross_attn", *LLAMA[1:], full, attentions="cross_attentions", kind="cross"),
    ),
}
STACKS |= RELATIVES
OLDER = Version(transformers.__version__) < Version("5.18")  # DINOv2 was laid out otherwise, and is refused
if OLDER:
    del STACKS["dinov2"], STACKS["dinov2_with_registers"], RELATIVES["dinov2"], RELATIVES["dinov2_with_registers"]

# every way in which heads, widths, biases and norms can be laid out
VARIANTS: tuple[tuple[str, dict], ...] = (
    *((family, {}) for family in FULL),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 20}),
    ("llama", {"num_key_value_heads": 1, "head_dim": 6, "attention_bias": True}),
    ("gemma3", {"attention_bias": True, "num_key_value_heads": 2}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    ("modernbert", {"attention_bias": True}),
    ("vit", {"qkv_bias": False}),
    ("gpt_neox", {"attention_bias": False}),
    ("opt", {"enable_bias": False}),
    ("falcon-new", {"num_kv_heads": 1, "bias": True}),
    ("phi3", {"num_key_value_heads": 4}),
    ("olmo2", {"attention_bias": True}),
    ("deberta-v2", {"relative_attention": False}),
    ("bert", {"is_decoder": True}),
)
EVERY = (*VARIANTS, *((family, {}) for family in RELATIVES))


def variant_id(value: object) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{key}={item}" for key, item in value.items()) or "plain"
    return None


def example(family: str) -> list[int] | dict[str, object]:
    """One input of the family: token ids, or a mapping where it takes something else."""
    draw = torch.Generator().manual_seed(0)
    image, sound = torch.randn(1, 3, 16, 16, generator=draw), torch.randn(1, 200, generator=draw)
    mapped = {
        "vit clip-vision deit dinov2 dinov2_with_registers dinov3_vit": {"pixel_values": image},
        "clip": {"pixel_values": image, "input_ids": IDS},
        "wav2vec2 hubert": {"input_values": sound},
        "whisper": {"input_features": sound[:, :192].view(1, 8, 24), "decoder_input_ids": OTHER_IDS},
    }
    if "cross" in {stack.kind for stack in STACKS[family]} and family != "whisper":
        return {"input_ids": IDS, "decoder_input_ids": OTHER_IDS}
    return next((given for families, given in mapped.items() if family in families.split()), IDS)


def plain_inputs(given: list[int] | dict[str, object], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same as transformers takes it."""
    found = {"input_ids": given} if isinstance(given, list) else given
    return {k: torch.tensor([v]) if isinstance(v, list) else v.to(dtype) for k, v in found.items()}


def raw_maps(model: PreTrainedModel, stack: Stack, layer: int) -> tuple[list, list, list, np.ndarray]:
    """V_h, O_h and b_V^h of every query head, and b_O, float64, cut out of the state dict."""
    state = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    value, output = (stack.name(projection, layer) for projection in (stack.value, stack.output))
    v, o = state[f"{value}.weight"], state[f"{output}.weight"]
    if stack.layout == "columns":  # (in, out) layout
        v, o = v.T, o.T
    v_bias = state.get(f"{value}.bias", np.zeros(len(v)))
    o_bias = state.get(f"{output}.bias", np.zeros(HIDDEN))
    width = o.shape[1] // HEADS
    blocks = np.split(np.arange(len(v)), len(v) // width)  # rows by heads of any role
    if stack.layout == "rows":
        chosen = blocks
    elif stack.layout == "interleaved":  # q q .. k v | q q .. k v | ...
        per_value_head = HEADS // ((len(blocks) - HEADS) // 2) + 2
        chosen = blocks[per_value_head - 1 :: per_value_head]
    else:  # q q q q .. | k .. | v ..
        chosen = blocks[HEADS + (len(blocks) - HEADS) // 2 :]
    sharing = HEADS // len(chosen)  # query heads per value head: 0, 0, 1, 1 for two value heads
    values = [v[chosen[head // sharing]] for head in range(HEADS)]
    biases = [v_bias[chosen[head // sharing]] for head in range(HEADS)]
    return values, [o[:, h * width : (h + 1) * width] for h in range(HEADS)], biases, o_bias


def reference(checkpoint: Checkpoint, family: str, given: list[int] | dict[str, object]) -> list[tuple]:
    """(stack, layer, attention, field, output) of a plain run of a copy of the model, with plain hooks."""
    model = copy.deepcopy(checkpoint.model)
    fields: dict[str, list] = {}
    outputs: dict[str, list] = {}
    for stack in STACKS[family]:
        for n in dict.fromkeys(stack.name(stack.path, n) for n in numbers(family, stack)):
            layer = next(k for k in numbers(family, stack) if stack.name(stack.path, k) == n)
            value, output = (model.get_submodule(stack.name(p, layer)) for p in (stack.value, stack.output))
            seen, made = fields.setdefault(stack.path, []), outputs.setdefault(stack.path, [])
            value.register_forward_hook(lambda _m, args, _r, seen=seen: seen.append(args[0][0]))
            output.register_forward_hook(lambda _m, _a, result, made=made: made.append(result[0]))
    with torch.no_grad():
        result = model(**plain_inputs(given, model.dtype), output_attentions=True)
    found = []
    for stack in STACKS[family]:
        attentions = [a for a in attrgetter(stack.attentions)(result) if a is not None]
        rows = zip(numbers(family, stack), attentions, fields[stack.path], outputs[stack.path], strict=True)
        found += [(stack, layer, attention[0], field, output) for layer, attention, field, output in rows]
    return found


def numbers(family: str, stack: Stack) -> list[int]:
    """The numbers in the paths of a stack's attention layers."""
    return [HYBRIDS[family]] if family in HYBRIDS else list(range(stack.layers))


def stack_of(family: str, path: str) -> Stack:
    """The stack that an attention module belongs to."""
    (found,) = (s for s in STACKS[family] if path in {s.name(s.path, n) for n in numbers(family, s)})
    return found


def mask_word(layer: LayerWalk) -> str:
    """What one layer's tokens attend to, from its support."""
    support = layer.walk.support
    lower = support.tril()
    if layer.kind == "cross":
        return "cross"
    if support.all():
        return "all"
    if torch.equal(support, lower):
        return "causal" if torch.equal(support, torch.ones_like(support).tril()) else "causal window"
    return "window"


def bound(residuals: list[float]) -> str:
    """A power of ten above the worst, not so near that another processor would give another; at least 1e-14."""
    return f"< 1e{math.ceil(math.log10(1.5 * max(*residuals, 2e-15))):03d}"


def same_attention(checkpoint: Checkpoint, family: str, layers: list[LayerWalk]) -> bool:
    """Whether captured attention is, bit for bit, that of a plain run of the model."""
    captured = {(layer.path, layer.index): layer.walk.attention for layer in layers}
    plain = reference(checkpoint, family, example(family))
    places = (
        (stack.name(stack.path, number), number if len(plain) > 1 else place)
        for place, (stack, number, *_) in enumerate(plain)
    )
    pairs = zip(places, (attention for _, _, attention, *_ in plain), strict=True)
    return len(plain) == len(layers) and all(torch.equal(captured[place], attention) for place, attention in pairs)


def families_table() -> str:
    """The README's table of families: what attends to what, and how exact tiny random models are measured.

    They are opened from folders. Attention is compared with that of a plain run of the model; T2 is the worst relative
    residual of a layer.
    """
    dtypes = ("float64", "float32", "float16", "bfloat16")
    rows: dict[str, list[str]] = {}
    for family in STACKS:
        words: dict[str, None] = {}
        found = []
        with TemporaryDirectory() as folder:
            tiny_checkpoint(family).model.save_pretrained(folder)
            opened = {dtype: cwlib.open_checkpoint(folder, device="cpu", dtype=dtype) for dtype in dtypes}
        for dtype, checkpoint in opened.items():
            layers = list(cwlib.layers(checkpoint, example(family)))
            words |= dict.fromkeys(mask_word(layer) for layer in layers)
            if dtype == "float64":
                found.append("identical" if same_attention(checkpoint, family, layers) else "**differs**")
            found.append(bound([layer.residual() for layer in layers]))
        rows.setdefault(" | ".join([", ".join(words), *found]), []).append(family)
    head = ["families", "attend to", "attention", *(f"T2, {dtype}" for dtype in dtypes)]
    lines = [head, ["---"] * len(head), *([", ".join(families), found] for found, families in rows.items())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
