"""The texts on which checkpoints are measured: sixteen built-in passages, or the user's own."""

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from operator import attrgetter
from pathlib import Path

SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class Passage:
    """One text, measured as a single sequence; its hash is part of a table row's key.

    Attributes
    ----------
    name : str
        Unique within one corpus: the file's stem if built in, the file's full name if the user's.
    description : str
        What kind of text it is, in one line (the file's name if the user's).
    text : str
        The text as it goes to the tokenizer.
    """

    name: str
    description: str
    text: str

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the UTF-8 text, as 64 hexadecimal digits; name and description play no part."""
        return hashlib.sha256(self.text.encode("utf-8")).hexdigest()


@cache
def passages() -> tuple[Passage, ...]:
    """Return the built-in passages, sorted by name.

    They were written for this artifact, one per kind of text (narrative, verse, code, contract, ...). Each
    has 160 to 320 tokens, special tokens included, under the tokenizer of each of the six checkpoints of the
    `wheels` profile.
    """
    folder = resources.files("cwlib").joinpath("passages")
    found = [_built_in(file) for file in folder.iterdir() if file.name.endswith(".txt")]
    return tuple(sorted(found, key=attrgetter("name")))


def read_passages(path: str | Path, name: str = "path") -> tuple[Passage, ...]:
    """Return the user's own texts, unchanged: a file is one passage, a folder one per .txt or .md file in it.

    Parameters
    ----------
    path : str or Path
        A file of any suffix, or a folder (subfolders are not searched); sorted by file name.
    name : str
        What errors call it.

    Raises
    ------
    ValueError
        If the path does not exist, the folder holds no .txt or .md file, or a file is not UTF-8 or holds only
        whitespace.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        files = [file for file in path.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES]
        if not files:
            raise ValueError(
                f"{name}: expected a folder with {' or '.join(SUFFIXES)} files, but {path} holds none; "
                "add one, or give the path of a single file."
            )
        return tuple(_users(file, name) for file in sorted(files, key=attrgetter("name")))
    if not path.exists():
        raise ValueError(f"{name}: expected a file or a folder, but {path} does not exist; check the spelling.")
    return (_users(path, name),)


def _built_in(file: Traversable) -> Passage:
    header, _, text = file.read_text(encoding="utf-8").partition("\n\n")
    return Passage(file.name.removesuffix(".txt"), header.removeprefix("# "), text.removesuffix("\n"))


def _users(path: Path, name: str) -> Passage:
    try:
        # Bytes, since text mode would rewrite line ends; "utf-8-sig", since a byte-order mark is not text.
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: expected UTF-8, but {path} is not: {error}; save it as UTF-8.") from error
    if not text.strip():
        raise ValueError(f"{name}: expected a text, but {path} is empty; put text in it or remove it.")
    return Passage(path.name, path.name, text)
