"""Draft heads that a release publishes as files, and that are fetched once by name, checked by SHA-256.

`heads.toml` lists the heads, with the SHA-256 of each file. `tools/heads.py` writes that list from `models/`,
and a release adds the address of its files.
"""

from __future__ import annotations

import hashlib
import http.client
import re
import tomllib
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import structlog

from specsot.checkpoint.cache import cache_folder, publish
from specsot.core.info import memory_in_words
from specsot.errors import ModelError

log = structlog.get_logger()

# The list of the heads of this version.
LIST: Final = Path(__file__).with_name("heads.toml")
TIMEOUT: Final = 20.0  # Seconds. How long the server may send nothing. Untuned.
READ_BYTES: Final = 1 << 20  # Bytes. Read at a time. Untuned.
# Digits of a SHA-256 that tell versions of a head apart in the cache.
SHORT: Final = 12


@dataclass(frozen=True, slots=True)
class HeadFile:
    """One file of a head.

    asset: Name of the file among those of the release.
    sha256: The file's SHA-256, in hex.
    size: Bytes of the file.
    """

    asset: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class ReleasedHead:
    """A draft head that a release publishes.

    name: Name of the base model that the head drafts for, such as "qwen2.5-coder-1.5b".
    hidden_size: Hidden size of the base model.
    vocab_size: Vocabulary size of the base model.
    files: The files of the head's directory, by their names in it.
    """

    name: str
    hidden_size: int
    vocab_size: int
    files: Mapping[str, HeadFile]

    @property
    def folder(self) -> Path:
        """Folder of the head in the cache; another version of the head has another folder."""
        digest = hashlib.sha256("".join(sorted(file.sha256 for file in self.files.values())).encode())
        return cache_folder() / "heads" / f"{self.name}-{digest.hexdigest()[:SHORT]}"


@dataclass(frozen=True, slots=True)
class HeadList:
    """The heads of a version, and where their files are.

    address: Address of the folder that has the files; "" if this copy is not from a release.
    heads: The heads by name.
    """

    address: str
    heads: Mapping[str, ReleasedHead]


@cache
def released_heads(file: Path = LIST) -> HeadList:
    """Return the list of heads that comes with this version.

    file: The list as TOML.
    Raises OSError, tomllib.TOMLDecodeError or KeyError if the file is missing or is no such list.
    """
    table: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    return HeadList(
        address=table["address"],
        heads={
            name: ReleasedHead(
                name,
                head["hidden_size"],
                head["vocab_size"],
                {own: HeadFile(**fields) for own, fields in head["files"].items()},
            )
            for name, head in table["heads"].items()
        },
    )


def plain_name(name: str) -> str:
    """Return the lower-case letters and digits of a name: "Qwen2.5-Coder-1.5B" -> "qwen25coder15b".

    name: Name or address of a model.
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def head_called(name: str, listed: HeadList | None = None) -> ReleasedHead | None:
    """Return the head of a name, compared without case and punctuation; None if no head has it.

    name: Name such as "Qwen2.5-Coder-1.5B".
    listed: The list to search. None: the one of this version.
    """
    heads = (listed or released_heads()).heads.values()
    return next((head for head in heads if plain_name(head.name) == plain_name(name)), None)


def fetch_head(head: ReleasedHead, address: str | None = None) -> Path:
    """Return the folder of a head in the cache, whose files are fetched if they are not there yet.

    The folder gets its name only after the SHA-256 of every file was checked, so a folder that exists is
    complete. Processes may fetch the same head at the same time.

    head: The head.
    address: Address of the folder that has the files. None: that of the release.
    Raises ModelError, in one line, if the head is not in the cache and this copy is not from a release, if
        the server cannot be reached or lacks a file, if a file has another SHA-256 than the list says, and if
        the cache cannot be written.
    """
    folder = head.folder
    if folder.is_dir():
        return folder
    address = released_heads().address if address is None else address
    if not address:
        raise ModelError(
            f"the draft head {head.name} is not here: releases fetch it, a clone has it in models/{head.name}"
        )
    log.info("fetching a draft head", head=head.name, at=address, into=str(folder.parent))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent, prefix=".fetching-") as temporary:
            whole = Path(temporary) / "head"
            whole.mkdir()
            for name, file in head.files.items():
                _fetch_file(f"{address.rstrip('/')}/{file.asset}", file, whole / name)
            publish(whole, folder)
    except OSError as error:
        raise ModelError(f"the draft head {head.name} cannot be kept in {folder.parent}: {error}") from None
    size = memory_in_words(sum(file.size for file in head.files.values()))
    log.info("fetched a draft head", head=head.name, size=size)
    return folder


def _fetch_file(url: str, file: HeadFile, path: Path) -> None:
    """Fetch a file of a release, and check its size and SHA-256.

    url: Address of the file.
    file: What the file has to be.
    path: Where it is written.
    Raises ModelError if the file cannot be fetched or is another one, OSError if it cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as copy:
        for chunk in _chunks(url):
            size += len(chunk)
            if size > file.size:
                raise ModelError(f"{url} has more than the {file.size} bytes of the release: it is not used")
            digest.update(chunk)
            copy.write(chunk)
    if digest.hexdigest() != file.sha256:
        raise ModelError(
            f"{url} has the SHA-256 {digest.hexdigest()}, not {file.sha256} of the release: it is not used"
        )


def _chunks(url: str) -> Generator[bytes]:
    """Yield the bytes of an address, at most READ_BYTES at a time.

    url: The address.
    Raises ModelError if it cannot be fetched.
    """
    try:
        with closing(urllib.request.urlopen(url, timeout=TIMEOUT)) as response:
            while chunk := response.read(READ_BYTES):
                yield chunk
    except urllib.error.HTTPError as error:
        raise ModelError(f"{url} cannot be fetched: {error.code} {error.reason}") from None
    except (urllib.error.URLError, OSError, http.client.HTTPException, ValueError) as error:
        raise ModelError(f"{url} cannot be fetched: {getattr(error, 'reason', error)}") from None
