"""What is captured is what the model computed; and the model is left as it was, however the capture ends."""

import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from models import (
    EVERY,
    FULL,
    HEADS,
    IDS,
    OTHER_IDS,
    STACKS,
    TEXT_FAMILIES,
    example,
    raw_maps,
    reference,
    variant_id,
)
from test_architectures import TEXT
from torch import nn
from transformers import AutoConfig, AutoModel, BatchEncoding

import cwlib
from cwlib.architectures import attention_layers
from cwlib.background import Worker
from cwlib.capture import LayerWalk, layers
from cwlib.checkpoints import Checkpoint, open_checkpoint, tiny_checkpoint
from cwlib.nulls import null_layers
from cwlib.tiny import tiny_config

FAMILIES = ("bert", "mpnet", "gpt2", "llama", "qwen2", "gemma3")  # enough for what does not depend on the family

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
pytestmark = pytest.mark.filterwarnings("ignore:.*layers are left out:UserWarning")


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def workers() -> list[threading.Thread]:
    """Threads of captures that have not ended; the others wait for the next."""
    waiting = {worker.thread for worker in Worker.idle}
    return [thread for thread in threading.enumerate() if thread.name == "cwlib-forward" and thread not in waiting]


def assert_left_clean(checkpoint: Checkpoint, implementation: str = "eager") -> None:
    assert hooks(checkpoint.model) == 0
    assert workers() == []
    assert checkpoint.model.config._attn_implementation == implementation


def assert_same(left: list[LayerWalk], right: list[LayerWalk]) -> None:
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert a.index == b.index
        assert torch.equal(a.walk.attention, b.walk.attention)
        assert torch.equal(a.field, b.field)
        assert torch.equal(a.output, b.output)
        assert torch.equal(a.walk.apply(a.field), b.walk.apply(b.field))


def sdpa_checkpoint(family: str = "llama", **overrides: object) -> Checkpoint:
    checkpoint = tiny_checkpoint(family, **overrides)
    checkpoint.model.set_attn_implementation("sdpa")
    return checkpoint


# --- an independent oracle ----------------------------------------------------------------------------------------


@pytest.mark.claim("T2")
@pytest.mark.parametrize(("family", "overrides"), EVERY, ids=variant_id)
def test_layers_agree_with_a_plain_run_and_the_state_dict(family: str, overrides: dict) -> None:
    checkpoint, given = tiny_checkpoint(family, seed=3, **overrides), example(family)
    expected = reference(checkpoint, family, given)
    captured = {(layer.path, layer.index): layer for layer in cwlib.layers(checkpoint, given)}
    assert len(captured) == len(expected)
    for place, (stack, number, attention, field, output) in enumerate(expected):
        index = number if len(expected) > 1 else place
        layer = captured[stack.name(stack.path, number), index]
        assert torch.equal(layer.walk.attention, attention)
        assert torch.equal(layer.field, field)
        assert torch.equal(layer.output, output)
        values, maps, biases, o_bias = raw_maps(checkpoint.model, stack, number)
        x = field.double().numpy()
        by_hand = np.tile(o_bias, (len(output), 1))
        for head in range(HEADS):
            message = (x @ values[head].T + biases[head]) @ maps[head].T
            by_hand += attention[head].double().numpy() @ message
        scale = np.linalg.norm(by_hand)
        assert np.linalg.norm(layer.walk.apply(layer.field).numpy() - by_hand) <= 1e-12 * scale
        assert np.linalg.norm(output.double().numpy() - by_hand) <= 1e-5 * scale


@pytest.mark.claim("T1")
@pytest.mark.parametrize("family", FAMILIES)
def test_each_head_alone_is_a_constant_transport(family: str) -> None:
    checkpoint = tiny_checkpoint(family, seed=4)
    for layer in cwlib.layers(checkpoint, IDS):
        values, maps, _, _ = raw_maps(checkpoint.model, STACKS[family][0], layer.index)
        x = layer.field.double().numpy()
        for head in range(HEADS):
            transport = maps[head] @ values[head]
            walk = cwlib.ConnectionWalk(
                layer.walk.attention[head : head + 1],
                layer.walk.value[head // layer.walk.groups][None],
                layer.walk.output[head : head + 1],
            )
            expected = layer.walk.attention[head].double().numpy() @ x @ transport.T
            np.testing.assert_allclose((walk @ layer.field).numpy(), expected, rtol=0, atol=1e-12)
            edge = walk.transport(len(IDS) - 1, len(IDS) - 2)
            np.testing.assert_allclose(edge.numpy(), transport, rtol=0, atol=1e-12)


@pytest.mark.claim("T2")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_mean_gauge_walk_is_stochastic_and_causal_in_decoders(family: str) -> None:
    checkpoint = tiny_checkpoint(family)
    for layer in cwlib.layers(checkpoint, IDS):
        walk = layer.walk.effective_walk("mean")
        assert (walk >= 0).all()
        assert (walk.sum(1) - 1).abs().max() <= 1e-6
        assert layer.walk.is_causal == (checkpoint.kind == "decoder")


def test_sliding_window_layers_see_no_further_than_their_window() -> None:
    checkpoint = tiny_checkpoint("gemma3", sliding_window=4)
    kinds = checkpoint.model.config.layer_types
    assert {"sliding_attention", "full_attention"} == set(kinds)
    i, j = torch.meshgrid(torch.arange(len(IDS)), torch.arange(len(IDS)), indexing="ij")
    for layer, kind in zip(cwlib.layers(checkpoint, IDS), kinds, strict=True):
        seen = (j <= i) & (i - j < 4) if kind == "sliding_attention" else j <= i
        assert not layer.walk.attention[:, ~seen].any()
        assert (layer.walk.attention[:, seen] > 0).all()


def test_norms_of_queries_and_keys_change_the_attention_only() -> None:
    checkpoint = tiny_checkpoint("gemma3")
    before = next(iter(cwlib.layers(checkpoint, IDS)))
    with torch.no_grad():
        checkpoint.model.layers[0].self_attn.q_norm.weight.fill_(2.0)
    after = next(iter(cwlib.layers(checkpoint, IDS)))
    assert (after.walk.attention - before.walk.attention).abs().max() > 0.05
    assert torch.equal(after.walk.value, before.walk.value)
    assert torch.equal(after.field, before.field)
    assert after.residual() <= 1e-5


def test_walks_share_the_storage_of_the_model() -> None:
    checkpoint = tiny_checkpoint("llama")
    for layer in cwlib.layers(checkpoint, IDS):
        attention = checkpoint.model.layers[layer.index].self_attn
        assert layer.walk.value.data_ptr() == attention.v_proj.weight.data_ptr()
        assert layer.walk.output.data_ptr() == attention.o_proj.weight.data_ptr()
        assert tuple(layer.walk.value.shape) == (2, 12, 48)
        assert not layer.walk.value.requires_grad


# --- inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        torch.tensor,
        lambda ids: torch.tensor([ids]),
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        np.array,
        lambda ids: list(np.array(ids)),
        lambda ids: np.array(ids, dtype=np.uint16),
        lambda ids: {"input_ids": ids},
        lambda ids: BatchEncoding({"input_ids": [ids], "attention_mask": [[1] * len(ids)]}),
    ],
    ids=["tuple", "1-D", "(1, n)", "int32", "numpy", "numpy items", "uint16", "mapping", "tokenizer's result"],
)
def test_every_form_of_ids_gives_the_same_walks(convert: Callable) -> None:
    checkpoint = tiny_checkpoint("gpt2")
    assert_same(list(layers(checkpoint, convert(IDS))), list(layers(checkpoint, IDS)))


def test_a_text_is_its_ids() -> None:
    checkpoint = tiny_checkpoint("bert")
    ids = checkpoint.tokenizer(TEXT)["input_ids"]
    assert_same(list(layers(checkpoint, TEXT)), list(layers(checkpoint, ids)))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_and_a_full_context_are_fine(family: str) -> None:
    room = 18 if family == "mpnet" else 16  # MPNet keeps two positions for padding
    checkpoint = tiny_checkpoint(family, max_position_embeddings=room)
    for ids in ([5], list(range(5, 21))):
        assert max(layer.residual() for layer in layers(checkpoint, ids)) <= 1e-5
    with pytest.raises(ValueError, match="at most 16"):
        layers(checkpoint, list(range(5, 22)))
    with pytest.raises(ValueError, match="at most 16"):
        layers(checkpoint, "seventeen letters")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text: expected some words"),
        (" \n\t ", "text: expected some words"),
        ([], "text: expected at least one token"),
        (torch.empty(0, dtype=torch.long), "text: expected at least one token"),
        ([1.0, 2.0], "text: expected integer token ids, got torch.float32"),
        (torch.tensor([True]), "text: expected integer token ids, got torch.bool"),
        (torch.tensor([1j]), "text: expected integer token ids, got torch.complex64"),
        (torch.tensor([IDS, IDS]), r"text: expected one sequence of shape \(n,\) or \(1, n\), got \(2, 13\)"),
        (torch.tensor(3), r"text: expected one sequence of shape \(n,\) or \(1, n\), got \(\)"),
        ({}, r"text: expected inputs in the mapping, got \[\]"),
        ({"pixel_values": torch.ones(1, 3, 16, 16)}, "text: LlamaModel takes no input 'pixel_values'"),
        ({"input_ids": IDS, "past_key_values": ()}, "text: LlamaModel takes no input 'past_key_values'"),
        ({"input_ids": [IDS, IDS]}, r"input_ids: expected one sequence .* got \(2, 13\)"),
        ({"inputs_embeds": torch.ones(2, 3, 48)}, r"inputs_embeds: expected one example, .* got \(2, 3, 48\)"),
        ({"inputs_embeds": "words"}, "inputs_embeds: expected a tensor, got str"),
        ({"input_ids": IDS, "attention_mask": [1] * 12}, "attention_mask: expected 13 entries, .* got 12"),
        ({"input_ids": IDS, "attention_mask": [0] * 13}, "attention_mask: expected one 0 or 1 per token and some 1"),
        ({"input_ids": IDS, "attention_mask": [2] * 13}, "attention_mask: expected one 0 or 1 per token"),
        ([5, 300], r"text: expected token ids in 0\.\.299, got 5\.\.300"),
        ([-1, 5], r"text: expected token ids in 0\.\.299, got -1\.\.5"),
        (["a", "b"], "text: expected a string or a sequence of token ids, got list"),
        (None, "text: expected a string or a sequence of token ids, got NoneType"),
    ],
)
def test_bad_text_is_refused_at_the_call(text: object, message: str) -> None:
    checkpoint = tiny_checkpoint("llama")
    with pytest.raises(ValueError, match=message):
        layers(checkpoint, text)  # not iterated
    assert_left_clean(checkpoint)


def test_training_mode_is_refused_at_the_call() -> None:
    checkpoint = tiny_checkpoint("bert")
    checkpoint.model.train()
    with pytest.raises(ValueError, match=r"evaluation mode, got training mode; call model\.eval"):
        layers(checkpoint, IDS)


def test_an_unsupported_checkpoint_is_refused_at_the_call() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 20}
    checkpoint = open_checkpoint(AutoModel.from_config(AutoConfig.for_model("fnet", **sizes)))
    with pytest.raises(ValueError, match="unsupported type 'fnet'; expected one of bert, roberta"):
        layers(checkpoint, [1, 2])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        ("t5", "a text", r"text: expected a mapping for tiny-t5@0, such as .*'decoder_input_ids': \.\.\.}, got str"),
        ("bart", IDS, "text: expected a mapping .* got list; cwlib does not choose what a decoder is given"),
        ("t5", {"input_ids": IDS}, r"text: expected decoder_input_ids in the mapping, got \['input_ids'\]"),
        ("t5", {"input_ids": IDS, "decoder_input_ids": [300]}, r"decoder_input_ids: expected token ids in 0\.\.299"),
        ("vit", IDS, "such as {'pixel_values': ...}, got list"),
        ("whisper", "a text", "such as {'input_features': ..., 'decoder_input_ids': ...}"),
        (
            "clip",
            example("clip") | {"attention_mask": [1] * 12 + [0]},
            "attention_mask: expected padding of tokens only, got it beside images",
        ),
    ],
)
def test_inputs_that_do_not_suit_the_family_are_refused(family: str, text: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers(tiny_checkpoint(family), text)


def assert_close(padded: list[LayerWalk], plain: list[LayerWalk]) -> None:
    for a, b in zip(padded, plain, strict=True):
        torch.testing.assert_close(a.walk.attention, b.walk.attention, rtol=0, atol=1e-5)
        torch.testing.assert_close(a.field, b.field, rtol=0, atol=1e-4)
        torch.testing.assert_close(a.output, b.output, rtol=0, atol=1e-4)


@pytest.mark.claim("T2")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_padding_is_left_out_of_walk_field_and_output(family: str, side: str) -> None:
    checkpoint, pad = tiny_checkpoint(family), [1 if "roberta" in family or family == "mpnet" else 0] * 3
    ones = [1] * len(IDS)
    ids, mask = (IDS + pad, ones + [0] * 3) if side == "right" else (pad + IDS, [0] * 3 + ones)
    padded = list(layers(checkpoint, {"input_ids": ids, "attention_mask": mask}))
    for layer in padded:
        assert layer.walk.n_dst == layer.walk.n_src == len(layer.field) == len(layer.output) == len(IDS)
        assert layer.residual() <= 1e-5
    if side == "right":  # on the left it shifts positions
        assert_close(padded, list(layers(checkpoint, IDS)))


@pytest.mark.claim("T2")
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_padding_of_both_sequences_is_left_out(family: str) -> None:
    checkpoint = tiny_checkpoint(family)
    padded = {
        "input_ids": [*IDS, 0, 0],
        "attention_mask": [1] * len(IDS) + [0, 0],
        "decoder_input_ids": [*OTHER_IDS, 0],
        "decoder_attention_mask": [1] * len(OTHER_IDS) + [0],
    }
    captured = list(layers(checkpoint, padded))
    assert max(layer.residual() for layer in captured) <= 1e-5
    assert_close(captured, list(layers(checkpoint, example(family))))


# --- several stacks, shared layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["t5", "bart", "whisper"])
def test_cross_attention_is_a_bipartite_walk_and_every_stack_has_its_own_order(family: str) -> None:
    kept = list(layers(tiny_checkpoint(family), example(family)))
    encoder = [layer for layer in kept if layer.path.startswith("encoder")]
    cross = [layer for layer in kept if layer.kind == "cross"]
    own = [layer for layer in kept if layer.path.startswith("decoder") and layer.kind == "self"]
    sources = 12 if family == "whisper" else len(IDS)
    for stack, shape in (
        (encoder, (sources, sources)),
        (own, (len(OTHER_IDS), len(OTHER_IDS))),
        (cross, (len(OTHER_IDS), sources)),
    ):
        assert [layer.index for layer in stack] == list(range(2 if stack is encoder else 3))
        assert [layer.previous for layer in stack] == [None, *stack[:-1]]
        assert {(layer.walk.n_dst, layer.walk.n_src) for layer in stack} == {shape}
    assert [layer.kind for layer in kept[2:]] == ["self", "cross"] * 3
    assert all(torch.equal(layer.field, cross[0].field) for layer in cross)  # the encoder's output
    measured = cwlib.measure(cross[1])
    assert 0 < measured["depth_step"] < 1
    assert "spectral_gap" not in measured and "spectral_gap" in cwlib.measure(own[1])


def test_layers_that_share_a_module_are_one_per_call_also_after_an_interrupted_pass() -> None:
    checkpoint = tiny_checkpoint("albert")
    for _ in range(2):
        stream = layers(checkpoint, IDS)
        next(stream)
        stream.close()
        kept = list(layers(checkpoint, IDS))
        assert [layer.index for layer in kept] == [0, 1, 2]
        assert [layer.previous for layer in kept] == [None, *kept[:-1]]
        assert len({layer.path for layer in kept}) == 1
    assert len(attention_layers(checkpoint.model)) == 1


def test_a_model_that_goes_around_its_output_projection_is_not_passed_over() -> None:
    checkpoint = tiny_checkpoint("bloom", pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(ValueError, match=r"model: h\.0\.self_attention: its output projection was not called"):
        list(layers(checkpoint, IDS))


@pytest.mark.claim("T2")
def test_a_learned_sink_absorbs_what_no_token_gets() -> None:
    checkpoint = tiny_checkpoint("gpt_oss")
    logits = torch.linspace(-2, 2, HEADS)
    for block in checkpoint.model.layers:
        block.self_attn.sinks.data = logits
    for layer in layers(checkpoint, IDS):
        absorbed = layer.walk.absorption
        assert absorbed.min() > 0.001 and absorbed.max() < 0.999
        torch.testing.assert_close(absorbed + layer.walk.attention.sum(-1), torch.ones_like(absorbed))
        assert (absorbed.mean(1).diff() > 0).all()  # the larger the logit, the more
        assert layer.residual() <= 1e-5
        measured = cwlib.measure(layer, gauge="mean")
        assert np.isnan([measured[name] for name in ("entropy_rate", "sink_mass", "spectral_gap")]).all()
        assert np.isfinite([measured[name] for name in ("edge_isometry", "laplacian_defect", "t2_residual")]).all()
        assert np.isfinite(cwlib.measure(layer, ["entropy_rate"], gauge="norm")["entropy_rate"])


@pytest.mark.parametrize("source", ["gaussian", "shuffled", "sinkless"])
def test_nulls_of_a_layer_with_a_sink_keep_it(source: str) -> None:
    captured = list(layers(tiny_checkpoint("gpt_oss"), IDS))
    for layer, (_, null) in zip(captured, null_layers(source, 0, captured, {}), strict=True):
        if source == "sinkless":
            assert null.walk.absorption is None
        else:
            torch.testing.assert_close(null.walk.absorption.mean(0), layer.walk.absorption.mean(0))


# --- streaming ----------------------------------------------------------------------------------------------------


def test_a_layer_is_computed_only_when_asked_for() -> None:
    checkpoint = tiny_checkpoint("llama")
    ran = []
    for n, block in enumerate(checkpoint.model.layers):
        block.register_forward_pre_hook(lambda _m, _a, n=n: ran.append(n))
    stream = layers(checkpoint, IDS)
    assert ran == []
    for n in range(3):
        next(stream)
        assert ran == list(range(n + 1))


def living_storages(shape: tuple[int, ...]) -> int:
    """How many tensors with these last dimensions exist anywhere, views of one counted once."""
    found = [o for o in gc.get_objects() if type(o) is torch.Tensor and tuple(o.shape[-len(shape) :]) == shape]
    return len({tensor.untyped_storage().data_ptr() for tensor in found})


@pytest.mark.parametrize("family", FAMILIES)
def test_at_most_two_layers_are_alive(family: str) -> None:
    checkpoint = tiny_checkpoint(family, num_hidden_layers=6)
    shape = (HEADS, 37, 37)  # of no other tensor
    allowed = 3 if family == "mpnet" else 2  # MPNet holds a position bias of this shape
    refs: list[weakref.ref] = []
    for layer in layers(checkpoint, list(range(5, 42))):
        refs.append(weakref.ref(layer))
        # by reference counts alone: a long text must not wait for the garbage collector
        assert sum(ref() is not None for ref in refs) <= 2
        assert living_storages(shape) <= allowed
    assert len(refs) == 6
    del layer
    assert living_storages(shape) == 0


@pytest.mark.parametrize("depth", [3, 9])
@pytest.mark.parametrize("given", [False, True], ids=["read anew", "attention passed"])
@pytest.mark.parametrize("offload", [False, True], ids=["in memory", "offloaded"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_attention_of_at_most_two_layers_is_alive_however_the_weights_are_held(
    family: str, offload: bool, given: bool, depth: int, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(family, num_hidden_layers=depth)
    if offload:
        checkpoint.model.save_pretrained(tmp_path / "model")
        checkpoint = open_checkpoint(tmp_path / "model", device="cpu", offload=True)
    attention = attention_layers(checkpoint.model) if given else None
    walks: list[weakref.ref] = []
    maps: list[weakref.ref] = []
    for layer in layers(checkpoint, list(range(5, 42)), attention):
        walks.append(weakref.ref(layer.walk.attention))
        maps.append(weakref.ref(layer.walk.value))
        assert sum(ref() is not None for ref in walks) <= 2, "by reference counts alone"
        if offload or not given:
            assert sum(ref() is not None for ref in maps) <= 2
    assert len(walks) == depth
    assert living_storages((HEADS, 37, 37)) <= 2
    del layer
    gc.collect()
    assert not any(ref() is not None for ref in walks)
    if attention is not None:  # kept with their cores, unless they would be copies of weights that are in files
        assert (attention[0].maps is attention[0].maps) == attention[0].in_memory == (not offload)
        assert (maps[0]() is None) == offload


def test_previous_is_the_layer_before_while_it_lives() -> None:
    stream = layers(tiny_checkpoint("llama"), IDS)
    first = next(stream)
    assert first.previous is None
    second = next(stream)
    assert second.previous is first
    gone = weakref.ref(first)
    del first
    assert second.previous is gone() is not None  # the stream holds it for the step between layers
    third = next(stream)
    assert gone() is None
    assert second.previous is None
    assert third.previous is second


def test_a_list_of_layers_keeps_every_previous() -> None:
    kept = list(layers(tiny_checkpoint("gemma3"), IDS))
    assert [layer.previous for layer in kept] == [None, *kept[:-1]]


def test_a_checkpoint_is_freed_after_use() -> None:
    checkpoint = tiny_checkpoint("qwen2")
    list(layers(checkpoint, IDS))
    model = weakref.ref(checkpoint.model)
    del checkpoint
    assert model() is None


# --- the model is left as it was ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FULL)
def test_the_familys_own_attention_implementation_gives_the_same_walks_and_comes_back(family: str) -> None:
    eager = tiny_checkpoint(family)
    own = AutoModel.from_config(tiny_config(family, {})).eval()  # with the family's own choice, mostly sdpa
    own.load_state_dict(eager.model.state_dict())
    default = own.config._attn_implementation
    other = dataclasses.replace(eager, model=own)
    assert_same(list(layers(other, example(family))), list(layers(eager, example(family))))
    assert_left_clean(other, default)


def test_a_live_model_with_sdpa_gives_the_same_walks() -> None:
    model = sdpa_checkpoint("llama").model
    assert_same(list(layers(open_checkpoint(model), IDS)), list(layers(tiny_checkpoint("llama"), IDS)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_the_same_before_during_and_after(family: str) -> None:
    checkpoint = tiny_checkpoint(family)
    model, ids = checkpoint.model, torch.tensor([IDS])

    def plain() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids).last_hidden_state

    expected = plain()
    stream = layers(checkpoint, IDS[:5])
    next(stream)
    assert torch.equal(plain(), expected)  # the hooks mind only their own forward pass
    list(stream)
    assert torch.equal(plain(), expected)
    assert_left_clean(checkpoint)


class OwnError(Exception):
    pass


def exhaust(stream: Iterator[LayerWalk]) -> None:
    for _ in stream:
        pass


def close(stream: Iterator[LayerWalk]) -> None:
    next(stream)
    stream.close()


def abandon(stream: Iterator[LayerWalk]) -> None:
    next(stream)
    next(stream)


def stop_early(stream: Iterator[LayerWalk]) -> None:
    for layer in stream:
        if layer.index == 1:
            break


def never_start(stream: Iterator[LayerWalk]) -> None:
    pass


def fail_between(stream: Iterator[LayerWalk]) -> None:
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            raise KeyboardInterrupt


def throw_into(stream: Iterator[LayerWalk]) -> None:
    next(stream)
    with pytest.raises(KeyboardInterrupt):
        stream.throw(KeyboardInterrupt)


@pytest.mark.parametrize("end", [exhaust, close, abandon, stop_early, never_start, fail_between, throw_into])
def test_nothing_is_left_behind(end: Callable) -> None:
    checkpoint = sdpa_checkpoint("llama")
    for _ in range(3):
        end(layers(checkpoint, IDS))
        assert_left_clean(checkpoint, "sdpa")


@pytest.mark.parametrize("error", [OwnError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_the_model_reaches_the_consumer_as_itself(error: type[BaseException]) -> None:
    checkpoint = sdpa_checkpoint("llama")
    raised = error("from within")

    def fail(_module: nn.Module, _args: tuple) -> None:
        raise raised

    handle = checkpoint.model.layers[1].mlp.register_forward_pre_hook(fail)
    seen = []
    with pytest.raises(error) as caught:
        for layer in layers(checkpoint, IDS):
            seen.append(layer.index)
    assert caught.value is raised
    assert seen == [0, 1]
    handle.remove()
    del caught, layer
    assert_left_clean(checkpoint, "sdpa")
    assert len(list(layers(checkpoint, IDS))) == 3


def test_ctrl_c_while_the_model_computes_leaves_it_clean(request: pytest.FixtureRequest) -> None:
    # A background job is started with SIGINT ignored.
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    checkpoint = sdpa_checkpoint("llama")
    main = threading.main_thread().ident

    def interrupt(_module: nn.Module, _args: tuple) -> None:
        signal.pthread_kill(main, signal.SIGINT)  # the consumer is waiting for the next layer

    handle = checkpoint.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        exhaust(layers(checkpoint, IDS))
    handle.remove()
    assert_left_clean(checkpoint, "sdpa")
    assert max(layer.residual() for layer in layers(checkpoint, IDS)) <= 1e-5


def test_interleaved_streams_of_one_model_give_what_separate_runs_give() -> None:
    checkpoint = sdpa_checkpoint("gemma3")
    texts = IDS, list(reversed(IDS)), IDS[:4]
    apart = [list(layers(checkpoint, ids)) for ids in texts]
    together = list(zip(*(layers(checkpoint, ids) for ids in texts), strict=True))
    for alone, entwined in zip(apart, zip(*together, strict=True), strict=True):
        assert_same(alone, list(entwined))
    assert_left_clean(checkpoint, "sdpa")


@pytest.mark.parametrize("first", [0, 1], ids=["the earlier ends first", "the later ends first"])
def test_a_stream_that_ends_leaves_another_of_the_same_model_alone(first: int) -> None:
    checkpoint = sdpa_checkpoint("llama")
    streams = [layers(checkpoint, IDS) for _ in range(2)]
    for _ in range(2):
        for stream in streams:
            next(stream)
    streams[first].close()
    (last,) = streams[1 - first]
    assert last.index == 2
    assert last.residual() <= 1e-5
    assert_left_clean(checkpoint, "sdpa")


def test_a_stream_within_a_stream() -> None:
    checkpoint = sdpa_checkpoint("llama")
    pairs = [(a.index, b.index) for a in layers(checkpoint, IDS) for b in layers(checkpoint, IDS[:5])]
    assert pairs == [(a, b) for a in range(3) for b in range(3)]
    assert_left_clean(checkpoint, "sdpa")


def test_streams_share_threads_one_after_the_other_and_keep_their_number_of_cores() -> None:
    checkpoint, ids = tiny_checkpoint("gpt2"), torch.arange(5)[None]
    list(layers(checkpoint, ids))
    before = threading.active_count()
    cores = torch.get_num_threads()
    seen = []
    handle = checkpoint.model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            list(layers(checkpoint, ids))
            next(iter(layers(checkpoint, ids)))  # and one that is abandoned
    finally:
        torch.set_num_threads(cores)
        handle.remove()
    assert seen == [1, 1, 2, 2, 1, 1]
    assert threading.active_count() == before
    assert_left_clean(checkpoint)


@forks
def test_a_forked_process_captures_with_threads_of_its_own() -> None:
    script = """
import os, sys, torch
from cwlib import layers, open_checkpoint
from cwlib.footprint import gpt2
torch.set_num_threads(1)
checkpoint, ids = open_checkpoint(gpt2(2, 16, 2), device="cpu"), torch.arange(5)[None]
first = [layer.output for layer in layers(checkpoint, ids)]
child = os.fork()
if child == 0:
    same = all(torch.equal(a, b.output) for a, b in zip(first, layers(checkpoint, ids), strict=True))
    os._exit(0 if same else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_streams_in_several_threads_give_what_separate_runs_give() -> None:
    checkpoint = sdpa_checkpoint("llama")
    texts = [IDS[n:] for n in range(4)]
    alone = [list(layers(checkpoint, ids)) for ids in texts]
    results: dict[int, list[LayerWalk]] = {}
    threads = [
        threading.Thread(target=lambda n=n, ids=ids: results.__setitem__(n, list(layers(checkpoint, ids))))
        for n, ids in enumerate(texts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, expected in enumerate(alone):
        assert_same(results[n], expected)
    assert_left_clean(checkpoint, "sdpa")


# --- no stale numbers ---------------------------------------------------------------------------------------------


def in_place(parameter: nn.Parameter, new: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(new)


def through_data(parameter: nn.Parameter, new: torch.Tensor) -> None:
    parameter.data.copy_(new)


def through_numpy(parameter: nn.Parameter, new: torch.Tensor) -> None:
    parameter.detach().numpy()[...] = new.numpy()


def replaced(parameter: nn.Parameter, new: torch.Tensor) -> None:
    parameter.data = new


def trained(parameter: nn.Parameter, new: torch.Tensor) -> None:
    parameter.requires_grad_(True)
    parameter.grad = parameter.detach() - new
    torch.optim.SGD([parameter], lr=1.0).step()


@pytest.mark.parametrize("edit", [in_place, through_data, through_numpy, replaced, trained])
def test_an_edit_of_the_weights_is_seen(edit: Callable) -> None:
    checkpoint = tiny_checkpoint("qwen2")

    def measured() -> tuple[LayerWalk, dict[str, float]]:
        layer = next(iter(layers(checkpoint, IDS)))
        return layer, cwlib.measure(layer, ["single_walk_error", "sum_isometry", "edge_isometry", "identity_alignment"])

    before = measured()[1]
    value = checkpoint.model.layers[0].self_attn.v_proj
    for parameter in (value.weight, value.bias):
        edit(parameter, parameter.detach() * torch.linspace(-1, 3, parameter.numel()).reshape(parameter.shape))
    layer, after = measured()
    bare = cwlib.ConnectionWalk(layer.walk.attention, layer.walk.value, layer.walk.output, groups=layer.walk.groups)
    expected = cwlib.measure(bare, list(after))  # cores computed afresh
    assert after == pytest.approx(expected, rel=1e-9)
    assert all(abs(after[name] - before[name]) > 1e-3 for name in after)
    assert layer.residual() <= 1e-5


def test_streams_do_not_disturb_gradients_or_inference_mode() -> None:
    checkpoint = tiny_checkpoint("llama")
    checkpoint.model.requires_grad_(True)
    for layer in islice(layers(checkpoint, IDS), 2):
        assert torch.is_grad_enabled()
        tensors = layer.walk.attention, layer.walk.value, layer.walk.output, layer.field, layer.output
        assert not any(tensor.requires_grad for tensor in tensors)
    with torch.inference_mode():
        assert max(layer.residual() for layer in layers(checkpoint, IDS)) <= 1e-5


@pytest.mark.parametrize("wrong", ["another model's", "some", "none"])
def test_attention_layers_that_are_not_the_models_are_refused(wrong: str) -> None:
    checkpoint, other = tiny_checkpoint("llama"), tiny_checkpoint("llama")
    own = attention_layers(checkpoint.model)
    given = {"another model's": attention_layers(other.model), "some": own[::2], "none": ()}[wrong]
    with pytest.raises(ValueError, match="attention: expected"):
        layers(checkpoint, TEXT, given)
    assert len(list(layers(checkpoint, TEXT, own))) == len(own)


def test_a_step_from_a_layer_that_is_gone_is_refused_not_nan() -> None:
    last = list(layers(tiny_checkpoint("llama"), TEXT))[-1]
    gc.collect()
    with pytest.raises(ValueError, match="the layer before, which is gone"):
        cwlib.measure(last, ["depth_step"])
    assert "depth_step" not in cwlib.measure(last) and "sink_mass" in cwlib.measure(last)


# --- processes ------------------------------------------------------------------------------------------------------

OPENED = """
import os, signal, sys, threading, time
import cwlib
from cwlib.checkpoints import tiny_checkpoint
checkpoint = tiny_checkpoint("gpt2")
checkpoint.model.set_attn_implementation("sdpa")
started = cwlib.layers(checkpoint, [1, 2, 3])
next(started)
"""


def ran(script: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", OPENED + script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("rest", ["", "kept = [zip(range(1), started)]", "class Holder: held = started"])
def test_a_process_ends_though_an_iterator_is_half_done(rest: str) -> None:
    found = ran(rest)
    assert (found.returncode, found.stderr) == (0, "")


@forks
def test_a_forked_process_is_told_to_begin_anew() -> None:
    found = ran("""
if os.fork() == 0:
    try:
        next(started)
    except RuntimeError as error:
        print(error, flush=True)
    print(len(list(cwlib.layers(checkpoint, [1, 2, 3]))), checkpoint.model.config._attn_implementation, flush=True)
    print(sum(len(module._forward_hooks) for module in checkpoint.model.modules()), flush=True)
    os._exit(0)
print("parent", os.wait()[1], len(list(started)))
""")
    assert found.stdout.splitlines() == [
        "layers: this iterator began before the process forked; call cwlib.layers here anew",
        *("3 sdpa", "0", "parent 0 2"),
    ], found.stderr


def test_ctrl_c_leaves_a_model_as_it_was() -> None:
    found = ran("""
del started
interrupted = 0
for n in range(60):
    try:
        threading.Timer(0.0005 * n, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            list(cwlib.layers(checkpoint, [1, 2, 3]))
    except KeyboardInterrupt:
        interrupted += 1
for _ in range(100):
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in checkpoint.model.modules())
    if hooks == 0:
        break
    time.sleep(0.05)
print(interrupted, hooks, checkpoint.model.config._attn_implementation, len(list(cwlib.layers(checkpoint, [1, 2]))))
""")
    assert found.stdout.split() == ["60", "0", "sdpa", "3"], found.stderr


def test_other_things_than_checkpoints_and_layers_are_refused(unchecked: None) -> None:
    checkpoint = tiny_checkpoint("gpt2")
    for thing in (checkpoint.model, "gpt2", None):
        with pytest.raises(TypeError, match=r"checkpoint: expected one of cwlib\.open_checkpoint, got"):
            cwlib.layers(thing, [1, 2])
    with pytest.raises(TypeError, match=r"attention: expected the layers of attention_layers"):
        cwlib.layers(checkpoint, [1, 2], attention=[1])
