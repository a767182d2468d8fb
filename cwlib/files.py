"""Files appear whole or not at all."""

import os
from pathlib import Path
from uuid import uuid4


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, then rename: a reader sees the old or the new file whole.

    Raises
    ------
    OSError
        Naming the file, if it cannot be written; what was there before is untouched.
    """
    scratch = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            scratch.write_bytes(content)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:  # that of a full disk names no file, others name the scratch
        raise type(error)(
            error.errno, f"{error.strerror or error}: {path} cannot be written; free space or name another folder"
        ) from error
