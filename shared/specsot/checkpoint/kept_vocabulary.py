"""Keeps the vocabularies of models in the cache, so that only the first start parses tokenizer.json for them.

Parsing takes half a second of processor time for 152 thousand tokens; a kept vocabulary is read in a tenth.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np

from specsot.checkpoint.cache import UNUSED_SECONDS, cache_folder
from specsot.core import vocabulary
from specsot.core.vocabulary import Vocabulary, read_vocabulary

# SHA-256 in hexadecimal. Digest of the code that decides what a kept file contains: the form of the file, and
# which bytes a token has. It is part of the file's name, so files of other versions of the code are not read.
CODE: Final = hashlib.sha256(
    b"".join(Path(file).read_bytes() for file in (__file__, vocabulary.__file__))
).hexdigest()


def vocabulary_of(directory: Path, width: int | None = None) -> Vocabulary:
    """Return the vocabulary of `directory`/tokenizer.json, as `read_vocabulary` does, from the cache if an
    earlier process has kept it there.

    directory: the model's directory.
    width: number of the model's logits, see `read_vocabulary`.

    A kept vocabulary belongs to one path with the file's inode, time and size, and to one width. If any of
    these differs, tokenizer.json is parsed again. Members in one process share a vocabulary. Raises
    ModelError as `read_vocabulary` does.
    """
    path = (directory / "tokenizer.json").absolute()
    try:
        status = path.stat()
    except OSError:
        # This call raises the error that names the file.
        return read_vocabulary(directory, width)
    return _find(path, width, (status.st_ino, status.st_mtime_ns, status.st_size))


@functools.lru_cache(maxsize=4)
def _find(path: Path, width: int | None, version: tuple[int, ...]) -> Vocabulary:
    """Return the vocabulary of a tokenizer file from the cache. If the cache has none, parse the file and
    keep the result. A damaged file of the cache counts as none. The four newest results are also kept in
    memory.

    Raises ModelError as `read_vocabulary` does.

    path: the tokenizer.json, an absolute path.
    width: number of the model's logits, or None.
    version: inode, modification time in nanoseconds, and size of the file.
    """
    key = hashlib.sha256(repr((CODE, str(path), width, version)).encode()).hexdigest()[:16]
    kept = cache_folder() / "vocabularies" / key
    with suppress(OSError, ValueError, KeyError, TypeError):
        return decode(kept.read_bytes())
    vocabulary = read_vocabulary(path.parent, width)
    # A folder that cannot be written only costs the next start time.
    with suppress(OSError):
        _write(kept, encode(vocabulary))
    return vocabulary


def encode(vocabulary: Vocabulary) -> bytes:
    """Return the content of the file that keeps a vocabulary: a line of JSON, then int32 numbers, then the
    bytes of all tokens, one after the other.

    vocabulary: any vocabulary.

    The numbers are how many bytes each token has, -1 for a token without text, followed by the unnamed ids.

        # tokens [b"ab", None, b"c"], unnamed (1,) -> numbers 2, -1, 1, 1, then the bytes b"abc"
    """
    lengths = [-1 if text is None else len(text) for text in vocabulary.bytes]
    numbers = np.array([*lengths, *vocabulary.unnamed], "<i4").tobytes()
    body = numbers + b"".join(text for text in vocabulary.bytes if text)
    head = {
        "digest": vocabulary.digest,
        "tokens": len(vocabulary),
        "unnamed": len(vocabulary.unnamed),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    return json.dumps(head).encode() + b"\n" + body


def decode(content: bytes) -> Vocabulary:
    """Return the vocabulary of which `encode` has made this content.

    content: the content of a file.

    Raises ValueError, KeyError or TypeError for any other content, and if a part is missing or changed.
    """
    line, _, body = content.partition(b"\n")
    head = json.loads(line)
    if hashlib.sha256(body).hexdigest() != head["sha256"]:
        raise ValueError("the file is not what was written")
    tokens: int = head["tokens"]
    count: int = tokens + head["unnamed"]
    numbers = np.frombuffer(body, "<i4", count)
    lengths = numbers[:tokens]
    stops = (4 * count + np.cumsum(np.maximum(lengths, 0))).tolist()
    texts = tuple(
        None if length < 0 else body[stop - length : stop] for length, stop in zip(lengths.tolist(), stops)
    )
    return Vocabulary(texts, head["digest"], tuple(numbers[tokens:].tolist()))


def _write(file: Path, content: bytes) -> None:
    """Write a file completely or not at all, and remove files of its folder that were written more than
    UNUSED_SECONDS ago. A removed vocabulary that is still in use is parsed and written again at the next
    start.

    file: the file, whose folder is created if it is missing.
    content: its content.

    Raises OSError if the folder cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    for other in file.parent.iterdir():
        # Another process may have renamed or removed the file meanwhile.
        with suppress(FileNotFoundError):
            if time.time() - other.stat().st_mtime > UNUSED_SECONDS:
                other.unlink()
    number, written = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(number, "wb") as stream:
        stream.write(content)
    Path(written).replace(file)
