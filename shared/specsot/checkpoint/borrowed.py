"""A model directory that another member's files fill, block by block, as its tensors are asked for.

Weight files have their full size from the beginning and holes where nothing was fetched yet, so whatever
reads safetensors and GGUF files reads them. Every block is kept with its SHA-256: a restart knows it by that.
Also which files a directory can lend. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from threading import Lock

import structlog

from specsot.checkpoint.cache import use
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.gguf.directory import read_places
from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.hub import INDEXES, TEXTS
from specsot.core.info import memory_in_words
from specsot.errors import ModelError, WireError

log = structlog.get_logger()

BLOCK = 1 << 20  # bytes that travel, are checked and are kept as one; not measured
DIGEST = 32  # bytes
# files, bytes: what a lender may tell; not measured
MOST_FILES = 4096
LONGEST_TEXT = 256 << 20
HEADER_LIMIT = 100 << 20  # bytes; safetensors' own bound on its header
INDEX = INDEXES[0]
SINGLE = "model.safetensors"
LENT_TEXTS = (*(name for name in TEXTS if name != INDEXES[1]), POINTER)
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*\.(safetensors|gguf)")  # of weight files; no pickles

Put = Callable[[str, int, bytes], None]  # (who sent it, where it begins, a whole block or the last one)
Read = Callable[[str, int, int, Put], None]  # (file, begin, end, put): raises SpecsotError


@dataclass(frozen=True, slots=True)
class LentFile:
    """size: bytes. text: every member needs it."""

    size: int
    text: bool


def check_files(files: Mapping[str, LentFile]) -> None:
    """What a lender says it has. Raises WireError."""
    if len(files) > MOST_FILES:
        raise WireError(f"a model of {len(files)} files, {MOST_FILES} at most")
    for name, file in files.items():
        if not (name in LENT_TEXTS if file.text else NAME.fullmatch(name)):
            raise WireError(f"{name!r} is no file of a model")
        if file.text and file.size > LONGEST_TEXT:
            raise WireError(
                f"{name} of {memory_in_words(file.size)}, {memory_in_words(LONGEST_TEXT)} at most"
            )


class BorrowedModel:
    """One model on its way here. `stored`: bytes that came so far."""

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        files: Mapping[str, LentFile],
        read: Read,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """folder: where it goes; what is there already stays. Raises ModelError, WireError."""
        check_files(files)
        self.folder = folder
        self.fingerprint = fingerprint
        self.stored = 0
        self._files = files
        self._read = read
        self._clock = clock
        self._fetching = Lock()  # layers are fetched ahead beside whatever loads others
        self._here = set[tuple[str, int]]()  # blocks that were checked
        # since the last `tell`
        self._came = Counter[str]()
        self._seconds = 0.0
        self._spans = cache(self._read_spans)
        try:
            (folder / "blocks").mkdir(parents=True, exist_ok=True)
            self._used = use(folder)
            for name, file in files.items():
                with (folder / name).open("ab") as opened:
                    opened.truncate(file.size)
        except OSError as error:
            raise ModelError(f"{folder}: {error.strerror} (XDG_CACHE_HOME names another cache)") from None

    def need_texts(self) -> None:
        for name, file in self._files.items():
            if file.text:
                self.need(name, 0, file.size)
        self.tell("config and tokenizer")

    def need_tensor(self, name: str, tensor: str) -> None:
        """Of a safetensors file."""
        self.need(name, *self._spans(name)[tensor])

    def need_header(self, name: str) -> None:
        """Of a safetensors file; a GGUF file's is in the pointer."""
        if name != POINTER:
            self._spans(name)

    def need(self, name: str, begin: int, end: int) -> None:
        """Have these bytes in the file. Raises ModelError, and what reading raises."""
        if name not in self._files or not 0 <= begin <= end <= self._files[name].size:
            raise ModelError(f"{self.folder.name}: no member has bytes {begin} to {end} of {name}")
        with self._fetching:
            self._fetch(name, begin, end)

    def _fetch(self, name: str, begin: int, end: int) -> None:
        """What is missing of these bytes."""
        missing = [block for block in range(begin // BLOCK, -(-end // BLOCK)) if not self._has(name, block)]
        if not missing:
            return
        self._check_room(len(missing) * BLOCK)
        began = self._clock()
        for first, last in _runs(missing):
            until = min((last + 1) * BLOCK, self._files[name].size)
            self._read(name, first * BLOCK, until, partial(self._put, name))
        self._seconds += self._clock() - began

    def tell(self, what: str) -> None:
        """One line: what came since the last one, from whom, how fast."""
        if not self._came:
            return
        size = sum(self._came.values())
        log.info(
            "fetched from members",
            what=what,
            whom=", ".join(sorted(self._came)),
            size=memory_in_words(size),
            rate=f"{memory_in_words(size / max(self._seconds, 1e-9))}/s",
            into=str(self.folder),
        )
        self._came.clear()
        self._seconds = 0.0

    def _put(self, name: str, sender: str, begin: int, data: bytes) -> None:
        """The digest last: a block with one is whole."""
        block = begin // BLOCK
        try:
            _write(self.folder / name, begin, data)
            _write(self._digests(name), block * DIGEST, hashlib.sha256(data).digest())
        except OSError as error:
            raise ModelError(f"{self.folder / name}: {error.strerror}") from None
        self._here.add((name, block))
        self._came[sender] += len(data)
        self.stored += len(data)

    def _has(self, name: str, block: int) -> bool:
        """A block of an earlier run is read once, to see that it is still what came."""
        if (name, block) not in self._here:
            kept = _stored(self._digests(name), block * DIGEST, DIGEST)
            if (
                not any(kept)
                or kept != hashlib.sha256(_stored(self.folder / name, block * BLOCK, BLOCK)).digest()
            ):
                return False
            self._here.add((name, block))
        return True

    def _digests(self, name: str) -> Path:
        return self.folder / "blocks" / name

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise ModelError(
                f"{self.folder}: {memory_in_words(size)} to fetch, {memory_in_words(free)} of disk free "
                "(XDG_CACHE_HOME names another cache)"
            )

    def _read_spans(self, name: str) -> dict[str, tuple[int, int]]:
        """Where each tensor of a safetensors file begins and ends. Raises ModelError."""
        path = self.folder / name
        self.need(name, 0, 8)
        length = header_size(path, _stored(path, 0, 8), self._files[name].size)
        self.need(name, 8, 8 + length)
        spans = spans_of(path, _stored(path, 8, length))
        return {one: (8 + length + begin, 8 + length + end) for one, (begin, end) in spans.items()}


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    for _, run in groupby(enumerate(blocks), lambda one: one[1] - one[0]):
        numbers = [block for _, block in run]
        yield numbers[0], numbers[-1]


def header_size(path: Path, prefix: bytes, size: int) -> int:
    """Bytes of the JSON header behind the 8-byte length that opens a safetensors file. Raises ModelError."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, HEADER_LIMIT):
        raise ModelError(f"{path}: not a whole safetensors file")
    return length


def spans_of(path: Path, header: bytes) -> dict[str, tuple[int, int]]:
    """Where each tensor begins and ends in a safetensors file's data. Raises ModelError."""
    try:
        named = {
            one: told["data_offsets"] for one, told in json.loads(header).items() if one != "__metadata__"
        }
        spans = {one: (int(begin), int(end)) for one, (begin, end) in named.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        spans = {"": (-1, -1)}
    if any(begin < 0 for begin, _ in spans.values()):
        raise ModelError(f"{path}: not a readable safetensors header")
    return spans


def _write(path: Path, begin: int, data: bytes) -> None:
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(begin)
        file.write(data)


def _stored(path: Path, begin: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(size)
    except FileNotFoundError:
        return b""


_BORROWED: dict[Path, BorrowedModel] = {}  # of this process, by folder: a path is all that readers pass on


def register(model: BorrowedModel) -> None:
    _BORROWED[model.folder] = model


def borrowed_of(directory: Path) -> BorrowedModel | None:
    """None for a directory whose files are here."""
    return _BORROWED.get(directory)


def lendable(directory: Path) -> dict[str, Path]:
    """Files that others may take, by name: those that are here, pickles never. Raises ModelError."""
    pointer = directory / POINTER
    index = directory / INDEX
    texts = {name: directory / name for name in LENT_TEXTS}
    if pointer.is_file():
        weights = {Path(place.file).name: Path(place.file) for place in read_places(pointer).values()}
    else:
        names = set(read_json(index).get("weight_map", {}).values()) if index.is_file() else {SINGLE}
        weights = {str(name): directory / str(name) for name in names}
    named = {name: path for name, path in weights.items() if NAME.fullmatch(name)}
    return {name: path for name, path in (texts | named).items() if path.is_file()}
