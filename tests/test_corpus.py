"""The built-in passages suit the study; the user's texts arrive unchanged or with a clear error."""

import ast
import hashlib
import json
import re
from dataclasses import FrozenInstanceError
from importlib import resources

import pytest

from cwlib.corpus import Passage, passages, read_passages

# A proxy for 160 to 320 tokens that needs no tokenizer. Calibration: under the catalogue's five tokenizers
# the passages have 199 to 296 tokens, at 0.90 to 1.38 tokens per word or punctuation mark, of which they have
# 189 to 291. Below 180, 160 tokens are no longer sure; above 300 is above every passage that was counted.
WORDS_AND_MARKS = range(180, 301)


@pytest.fixture(params=passages(), ids=lambda passage: passage.name)
def passage(request):
    return request.param


def by_kind(kind):
    (found,) = (p for p in passages() if p.name.endswith(kind))
    return found


def test_sixteen_distinct_passages_in_order():
    names = [p.name for p in passages()]
    assert len(names) == 16
    assert names == sorted(set(names))
    assert len({p.text for p in passages()}) == len({p.sha256 for p in passages()}) == 16
    assert len({p.description for p in passages()}) == 16


def test_passage_is_its_file_without_the_header(passage):
    content = resources.files("cwlib").joinpath("passages", f"{passage.name}.txt").read_text(encoding="utf-8")
    assert content == f"# {passage.description}\n\n{passage.text}\n"
    assert "\n" not in passage.description and passage.description.strip() == passage.description != ""
    assert passage.text.strip() == passage.text


def test_passage_length_fits_every_tokenizer(passage):
    assert len(re.findall(r"\w+|[^\w\s]", passage.text)) in WORDS_AND_MARKS


def test_hash_is_of_the_text_alone(passage):
    assert passage.sha256 == hashlib.sha256(passage.text.encode("utf-8")).hexdigest()
    assert Passage("other", "other", passage.text).sha256 == passage.sha256
    assert Passage(passage.name, passage.description, passage.text + " ").sha256 != passage.sha256


def test_passage_cannot_be_changed(passage):
    with pytest.raises(FrozenInstanceError):
        passage.text = "another"


def test_code_and_data_passages_are_valid():
    assert any(isinstance(node, ast.FunctionDef) for node in ast.parse(by_kind("python").text).body)
    assert json.loads(by_kind("json").text)["rules"]


def test_line_breaks_of_verse_are_kept():
    stanzas = by_kind("verse").text.split("\n\n")
    assert [len(stanza.splitlines()) for stanza in stanzas] == [4] * 5


def test_users_file_is_left_untouched(tmp_path):
    text = "# A heading stays\r\n\r\nna\u00efve \u2013 \u4e2d\u6587\n\n"
    file = tmp_path / "own.text"
    file.write_bytes(text.encode("utf-8"))
    assert read_passages(file) == read_passages(str(file)) == (Passage("own.text", "own.text", text),)


def test_byte_order_mark_is_not_text(tmp_path):
    file = tmp_path / "windows.txt"
    file.write_bytes(b"\xef\xbb\xbfHello")
    assert read_passages(file)[0].text == "Hello"


def test_users_folder_is_sorted_and_filtered(tmp_path):
    for name in ("b.txt", "a.txt", "a.md", "C.TXT", "data.csv"):
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "folder.txt").mkdir()
    found = read_passages(tmp_path)
    assert [p.name for p in found] == ["C.TXT", "a.md", "a.txt", "b.txt"]
    assert [p.text for p in found] == [f"text of {p.name}" for p in found]
    assert [p.description for p in found] == [p.name for p in found]


@pytest.mark.parametrize(
    ("name", "content", "problem", "remedy"),
    [
        ("empty.txt", b"", "is empty", "put text in it"),
        ("blank.md", b" \n\t\r\n", "is empty", "put text in it"),
        ("latin1.txt", "caf\u00e9".encode("latin-1"), "expected UTF-8", "save it as UTF-8"),
        ("utf16.txt", "text".encode("utf-16"), "expected UTF-8", "save it as UTF-8"),
    ],
)
def test_unusable_file_is_named_alone_or_in_its_folder(tmp_path, name, content, problem, remedy):
    (tmp_path / "good.txt").write_text("a good text")
    (tmp_path / name).write_bytes(content)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(ValueError, match=problem) as error:
            read_passages(path)
        assert str(tmp_path / name) in str(error.value) and remedy in str(error.value)


def test_missing_path_is_named(tmp_path):
    missing = tmp_path / "nowhere"
    with pytest.raises(ValueError, match=r"does not exist; check the spelling") as error:
        read_passages(missing)
    assert str(missing) in str(error.value)


def test_folder_without_texts_is_named(tmp_path):
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"holds none; add one") as error:
        read_passages(tmp_path)
    assert str(tmp_path) in str(error.value) and ".txt or .md" in str(error.value)
