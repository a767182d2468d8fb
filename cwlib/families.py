"""The families of models whose attention is read, one entry each, and the kinds of layers that are no connection walk.

An entry names the attention module's class and the projections in it; everything else (head counts, biases, transposed
weights) follows from the modules themselves.
"""

import re
from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Family:
    """Where one family keeps its value and output maps.

    Attributes
    ----------
    model_types : str
        The ``model_type`` names of its configurations, separated by spaces.
    classes : str
        Class names of its attention modules, which take the field first and return the attention last; likewise.
    value, output : str
        Paths of the projections from the attention module ('/' steps down, '..' up).
    fused : {"", "last", "grouped"}
        How query, key and value are stacked along the output features of ``value``: not at all; one block each, the
        value heads last; or one block per value head, which holds its query heads, its key and last its value.
    sinks : bool
        Whether the softmax includes a learned logit per head that belongs to no token, and absorbs its share.
    """

    model_types: str
    classes: str
    value: str
    output: str
    fused: Literal["", "last", "grouped"] = ""
    sinks: bool = False


FAMILIES: tuple[Family, ...] = (
    # encoders
    Family("bert", "BertSelfAttention BertCrossAttention", "value", "../output/dense"),
    Family("roberta", "RobertaSelfAttention RobertaCrossAttention", "value", "../output/dense"),
    Family("xlm-roberta", "XLMRobertaSelfAttention XLMRobertaCrossAttention", "value", "../output/dense"),
    Family("electra", "ElectraSelfAttention ElectraCrossAttention", "value", "../output/dense"),
    Family("distilbert", "DistilBertSelfAttention", "v_lin", "out_lin"),
    Family("albert", "AlbertAttention", "value", "dense"),
    Family("mpnet", "MPNetSelfAttention", "v", "o"),
    Family("modernbert", "ModernBertAttention", "Wqkv", "Wo", "last"),
    Family("deberta-v2", "DebertaV2Attention", "self/value_proj", "output/dense"),
    Family("vit", "ViTAttention", "v_proj", "o_proj"),
    Family("clip clip_text_model clip_vision_model", "CLIPAttention", "v_proj", "out_proj"),
    # decoders
    Family("gpt2", "GPT2Attention", "c_attn", "c_proj", "last"),
    Family("gpt_neo", "GPTNeoSelfAttention", "v_proj", "out_proj"),
    Family("gpt_neox", "GPTNeoXAttention", "query_key_value", "dense", "grouped"),
    Family("gptj", "GPTJAttention", "v_proj", "out_proj"),
    Family("opt", "OPTAttention", "v_proj", "out_proj"),
    Family("bloom", "BloomAttention", "query_key_value", "dense", "grouped"),
    Family("falcon", "FalconAttention", "query_key_value", "dense", "grouped"),
    Family("llama", "LlamaAttention", "v_proj", "o_proj"),
    Family("mistral", "MistralAttention", "v_proj", "o_proj"),
    Family("qwen2", "Qwen2Attention", "v_proj", "o_proj"),
    Family("qwen3", "Qwen3Attention", "v_proj", "o_proj"),
    Family("gemma2", "Gemma2Attention", "v_proj", "o_proj"),
    Family("gemma3_text gemma3", "Gemma3Attention", "v_proj", "o_proj"),
    Family("phi", "PhiAttention", "v_proj", "dense"),
    Family("phi3", "Phi3Attention", "qkv_proj", "o_proj", "last"),
    Family("olmo2", "Olmo2Attention", "v_proj", "o_proj"),
    Family("stablelm", "StableLmAttention", "v_proj", "o_proj"),
    Family("granite", "GraniteAttention", "v_proj", "o_proj"),
    # mixtures of experts: the experts come after the attention
    Family("mixtral", "MixtralAttention", "v_proj", "o_proj"),
    Family("qwen2_moe", "Qwen2MoeAttention", "v_proj", "o_proj"),
    Family("qwen3_moe", "Qwen3MoeAttention", "v_proj", "o_proj"),
    Family("gpt_oss", "GptOssAttention", "v_proj", "o_proj", sinks=True),
    # encoder-decoders
    Family("t5", "T5Attention", "v", "o"),
    Family("bart", "BartAttention", "v_proj", "out_proj"),
    Family("whisper", "WhisperAttention", "v_proj", "out_proj"),
    # their relatives, whose attention is laid out alike
    Family(
        "camembert data2vec-text ernie esm megatron-bert rembert roberta-prelayernorm roformer xlm-roberta-xl big_bird",
        "CamembertSelfAttention CamembertCrossAttention Data2VecTextSelfAttention Data2VecTextCrossAttention "
        "ErnieSelfAttention ErnieCrossAttention EsmSelfAttention MegatronBertSelfAttention RemBertSelfAttention "
        "RobertaPreLayerNormSelfAttention RobertaPreLayerNormCrossAttention RoFormerSelfAttention "
        "XLMRobertaXLSelfAttention XLMRobertaXLCrossAttention BigBirdSelfAttention",
        *("value", "../output/dense"),
    ),
    Family(
        "nomic_bert eurobert jina_embeddings_v3 deit dinov2 dinov2_with_registers dinov3_vit gemma cohere cohere2 "
        "olmo olmo3 olmoe starcoder2 smollm3 glm glm4 granitemoe phimoe nemotron exaone4 ernie4_5 seed_oss apertus "
        "ministral3 llama4_text t5gemma",
        "NomicBertAttention EuroBertAttention JinaEmbeddingsV3Attention DeiTAttention Dinov2Attention "
        "Dinov2WithRegistersAttention DINOv3ViTAttention GemmaAttention CohereAttention Cohere2Attention OlmoAttention "
        "Olmo3Attention OlmoeAttention Starcoder2Attention SmolLM3Attention GlmAttention Glm4Attention "
        "GraniteMoeAttention PhimoeAttention NemotronAttention Exaone4Attention Ernie4_5Attention SeedOssAttention "
        "ApertusAttention Ministral3Attention Llama4TextAttention T5GemmaSelfAttention T5GemmaCrossAttention",
        *("v_proj", "o_proj"),
    ),
    Family(
        "biogpt wav2vec2 hubert mbart pegasus marian m2m_100 blenderbot blenderbot-small plbart",
        "BioGptAttention Wav2Vec2Attention HubertAttention MBartAttention PegasusAttention MarianAttention "
        "M2M100Attention BlenderbotAttention BlenderbotSmallAttention PLBartAttention",
        *("v_proj", "out_proj"),
    ),
    Family("mt5 umt5 switch_transformers", "MT5Attention UMT5Attention SwitchTransformersAttention", "v", "o"),
    Family("gpt_bigcode", "GPTBigCodeAttention", "c_attn", "c_proj", "grouped"),
    Family("persimmon", "PersimmonAttention", "query_key_value", "dense", "grouped"),
    Family("modernbert-decoder", "ModernBertDecoderAttention", "v_proj", "Wo"),
    # attention layers of hybrids
    Family("lfm2", "Lfm2Attention", "v_proj", "out_proj"),
    Family("jamba", "JambaAttention", "v_proj", "o_proj"),
    Family("bamba", "BambaAttention", "v_proj", "o_proj"),
    Family("granitemoehybrid", "GraniteMoeHybridAttention", "v_proj", "o_proj"),
)

#: linear layers with a forward of their own that is the plain linear map all the same
LINEAR = {"FalconLinear"}

#: settings that some members of a family have, and why their attention is then no walk of constant maps
NOT_LINEAR: dict[str, str] = {
    "clip_qkv": "values are clipped after their projection, so that no linear map takes tokens to values",
    "rotary_value": "values are rotated by their position, so that one head's maps differ from edge to edge",
}

_STATE_SPACE = "a state-space layer: its weights between tokens are no softmax, and differ from channel to channel"
_LINEAR_ATTENTION = "linear attention: its weights between tokens are signed and no softmax"
_LATENT = "latent attention: values pass a norm after their compression, so that no linear map takes tokens to values"
_GATED = "gated attention: a gate of the receiving token scales every channel before the output map"
_CONVOLUTION = "a gated convolution: it has no attention"

#: class name -> why such a layer is no connection walk
NOT_WALKS: dict[str, str] = {
    **dict.fromkeys(("MambaMixer", "Mamba2Mixer", "FalconMambaMixer", "FalconH1Mixer", "BambaMixer"), _STATE_SPACE),
    **dict.fromkeys(("JambaMambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), _STATE_SPACE),
    **dict.fromkeys(("ZambaMambaMixer", "Zamba2MambaMixer"), _STATE_SPACE),
    "RecurrentGemmaRecurrentBlock": "a recurrence: it has no attention",
    **dict.fromkeys(("RwkvSelfAttention", "MiniMaxLightningAttention", "OlmoHybridGatedDeltaNet"), _LINEAR_ATTENTION),
    **dict.fromkeys(("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"), _LINEAR_ATTENTION),
    **dict.fromkeys(("Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention", "AfmoeAttention"), _GATED),
    **dict.fromkeys(("DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention"), _LATENT),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv"), _CONVOLUTION),
    "DebertaAttention": "the first DeBERTa, whose value bias is a parameter of its own and whose heads may be mixed "
    "after the softmax; DeBERTa-v2 and v3 are read",
}

_BY_CLASS = {name: family for family in FAMILIES for name in family.classes.split()}


def family_of(module: nn.Module) -> Family | None:
    """The family of an attention module by its class or a base class, or None.

    Never by shapes: a square matrix does not tell its role.
    """
    return next((_BY_CLASS[c.__name__] for c in type(module).__mro__ if c.__name__ in _BY_CLASS), None)


def supported_types() -> tuple[str, ...]:
    """The ``model_type`` names of the families whose attention is known."""
    return tuple(name for family in FAMILIES for name in family.model_types.split())


def skipped_layers(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The layers that mix tokens but are not read, as (path, reason): in a hybrid, those beside its attention layers.

    A layer of an unknown class counts if it is called attention or mixer and nothing in or around it is known.
    """
    found: list[tuple[str, str]] = []
    settled: list[str] = []  # paths whose surroundings are accounted for
    suspects: list[tuple[str, str]] = []
    for path, module in model.named_modules():
        names = [c.__name__ for c in type(module).__mro__]
        reason = next((NOT_WALKS[name] for name in names if name in NOT_WALKS), None)
        if reason is not None:
            found.append((path, reason))
        if reason is not None or family_of(module) is not None:
            settled.append(path)
        elif re.search(r"(Attention|Mixer)\w*$", names[0]) and any(module.children()):
            suspects.append((path, f"{names[0]}, a class that this release does not know"))
    for path, reason in suspects:
        around = [other for other, _ in suspects if other.startswith(f"{path}.")]  # the innermost is named
        if not around and not any(f"{a}.".startswith(f"{b}.") for s in settled for a, b in ((path, s), (s, path))):
            found.append((path, reason))
    return tuple(found)
