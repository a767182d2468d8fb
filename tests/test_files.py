"""Files appear whole or not at all, and an error names the file."""

import errno
import os
from pathlib import Path

import pytest

from cwlib import files


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("owner", "step"), [(files.os, "replace"), (Path, "write_bytes")])
def test_a_failed_write_names_the_file_leaves_the_old_one_and_no_scratch(
    owner: object, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.csv"
    files.write_atomically(path, b"old")
    monkeypatch.setattr(owner, step, full)
    with pytest.raises(OSError, match=rf"No space left on device: {path} cannot be written; free space or") as caught:
        files.write_atomically(path, b"new")
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]


def test_folders_are_made_and_one_that_is_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.csv"
    files.write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    with pytest.raises(OSError, match=rf"{path / 'below'} cannot be written"):
        files.write_atomically(path / "below", b"content")
