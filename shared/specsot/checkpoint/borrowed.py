"""A model directory that is filled from other members' files, block by block, when tensors are needed.

Weight files are sparse: they have their full size from the beginning, with holes for what was not fetched
yet, so any reader of safetensors and GGUF files can read them. Every block is stored with its SHA-256
digest, by which a later run recognizes the block. The module also says which
files a directory can lend. It needs no torch.
"""

from __future__ import annotations

import hashlib
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

from specsot.checkpoint.cache import OTHER_CACHE, use
from specsot.checkpoint.fields import explain_os_errors, read_json
from specsot.checkpoint.gguf.directory import read_places
from specsot.checkpoint.gguf.finding import POINTER
from specsot.checkpoint.hub import INDEXES, TEXTS
from specsot.checkpoint.safetensors_header import INDEX, SINGLE, header_size, spans_of
from specsot.core.info import memory_in_words
from specsot.errors import ModelError, WireError

log = structlog.get_logger()

# Bytes. The unit that is sent, checked and stored. Untuned.
BLOCK = 1 << 20
# Bytes of a digest.
DIGEST = 32
# Files. Bounds how many files a lender may offer. Untuned.
MAX_FILES = 4096
# Bytes. Bounds a text file that a lender may offer. Untuned.
MAX_TEXT_BYTES = 256 << 20
# The text files that members lend to each other.
LENT_TEXTS = (*(name for name in TEXTS if name != INDEXES[1]), POINTER)
# Names of weight files that may be lent; pickles may not.
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*\.(safetensors|gguf)")

# Called with the sender, the offset in the file, and a whole block (or the last, shorter one).
Put = Callable[[str, int, bytes], None]
# Called with file, begin, end and put: passes all blocks of that range to put. Raises SpecsotError.
Read = Callable[[str, int, int, Put], None]


@dataclass(frozen=True, slots=True)
class LentFile:
    """A file of a model that a member offers to other members.

    size: Size of the file in bytes.
    text: True for a text file, which every member needs as a whole; False for weights.
    """

    size: int
    text: bool


def check_files(files: Mapping[str, LentFile]) -> None:
    """Check the files that a lender offers, and return None if they are acceptable. Raise WireError if there
    are more than MAX_FILES, if a text file has a name that is not in LENT_TEXTS or more than MAX_TEXT_BYTES,
    or if a weight file is no *.safetensors or *.gguf directly in the model directory.

    files: the offered files by name.

    The sizes of weight files are not limited.
    """
    if len(files) > MAX_FILES:
        raise WireError(f"a model of {len(files)} files, {MAX_FILES} at most")
    for name, file in files.items():
        if not (name in LENT_TEXTS if file.text else NAME.fullmatch(name)):
            raise WireError(f"{name!r} is no file of a model")
        if file.text and file.size > MAX_TEXT_BYTES:
            raise WireError(
                f"{name} of {memory_in_words(file.size)}, {memory_in_words(MAX_TEXT_BYTES)} at most"
            )


class BorrowedModel:
    """One model that is fetched from other members, block by block, into a directory.

    folder: The model directory.
    fingerprint: Fingerprint of the model, as its lenders have it.
    stored: Bytes that were fetched by this process so far.
    """

    def __init__(
        self,
        folder: Path,
        fingerprint: str,
        files: Mapping[str, LentFile],
        read: Read,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the folder if it is missing, mark it as used, and make a file of the offered size for each
        file, without data in it.

        folder: The directory to fill; blocks that are in it already are kept.
        fingerprint: Fingerprint of the model, as its lenders have it.
        files: What the lenders offer, by name.
        read: Fetches bytes from a lender: called with the file's name, the offsets of the first byte and of
            the byte after the last one, and a function that stores each block.
        clock: Returns seconds, for the rate in the log.

        Raises WireError if the offered files are not acceptable, and ModelError if the folder cannot be
        written.
        """
        check_files(files)
        self.folder = folder
        self.fingerprint = fingerprint
        self.stored = 0
        self._files = files
        self._read = read
        self._clock = clock
        # One thread fetches layers ahead while another one loads layers.
        self._fetching = Lock()
        # Blocks that are present and were checked.
        self._present = set[tuple[str, int]]()
        # Bytes by sender, and seconds, since the last `log_fetched`.
        self._received = Counter[str]()
        self._seconds = 0.0
        self._spans = cache(self._read_spans)
        with explain_os_errors(folder, OTHER_CACHE):
            (folder / "blocks").mkdir(parents=True, exist_ok=True)
            self._used = use(folder)
            for name, file in files.items():
                with (folder / name).open("ab") as opened:
                    opened.truncate(file.size)

    def need_texts(self) -> None:
        """Fetch all text files that are missing: config, tokenizer, index.

        Raises ModelError if the disk is full or cannot be written, and what `read` raises.

        Does nothing for text files that are complete. Raises ModelError also if no member offers a file any
        more. What was fetched is logged in one line.
        """
        for name, file in self._files.items():
            if file.text:
                self.need(name, 0, file.size)
        self.log_fetched("config and tokenizer")

    def need_tensor(self, name: str, tensor: str) -> None:
        """Fetch the bytes of one tensor of a safetensors file, if they are missing.

        name: name of the file.
        tensor: name of the tensor, which the file must have; otherwise KeyError is raised.

        Raises ModelError if the header is broken, the disk is full, or no member offers the bytes, and what
        `read` raises.
        """
        self.need(name, *self._spans(name)[tensor])

    def need_header(self, name: str) -> None:
        """Fetch the header of a safetensors file, if it is missing. Do nothing for GGUF, whose pointer file
        has it already.

        name: name of the file. Raises ModelError if the header is broken or cannot be fetched.

        Raises ModelError also if no member offers the file.
        """
        if name != POINTER:
            self._spans(name)

    def need(self, name: str, begin: int, end: int) -> None:
        """Fetch bytes begin .. end - 1 of a file if they are missing. Whole blocks are fetched.

        name: name of the file.
        begin: offset of the first byte.
        end: offset of the byte after the last one. If it equals `begin`, nothing is fetched.

        Raises ModelError if no member offers these bytes or if the disk is full, and what `read` raises.

        Only one thread fetches at a time; others wait. Blocks that an earlier run fetched are checked before
        they count as present.
        """
        if name not in self._files or not 0 <= begin <= end <= self._files[name].size:
            raise ModelError(f"{self.folder.name}: no member has bytes {begin} to {end} of {name}")
        with self._fetching:
            self._fetch(name, begin, end)

    def _fetch(self, name: str, begin: int, end: int) -> None:
        """Fetch the blocks of these bytes that are missing. Do nothing if all are present.

        name: name of the file.
        begin: offset of the first byte.
        end: offset of the byte after the last one.

        Returns once all blocks are stored. Raises ModelError if the disk has too little room or cannot be
        written, and what `read` raises.

            # BLOCK 1 MiB, bytes 0.5 MiB .. 2.5 MiB: blocks 0, 1, 2; if 1 is present, 0 and 2 are read apart
        """
        missing = [block for block in range(begin // BLOCK, -(-end // BLOCK)) if not self._has(name, block)]
        if not missing:
            return
        self._check_room(len(missing) * BLOCK)
        began = self._clock()
        for first, last in _runs(missing):
            until = min((last + 1) * BLOCK, self._files[name].size)
            self._read(name, first * BLOCK, until, partial(self._put, name))
        self._seconds += self._clock() - began

    def log_fetched(self, content: str) -> None:
        """Log one line about what was fetched since the last call: size, senders, rate. Nothing is logged if
        nothing was.

        content: what the fetched bytes are, for the line.

        The counts start again at 0 after the line.
        """
        if not self._received:
            return
        size = sum(self._received.values())
        log.info(
            "fetched from members",
            what=content,
            members=", ".join(sorted(self._received)),
            size=memory_in_words(size),
            rate=f"{memory_in_words(size / max(self._seconds, 1e-9))}/s",
            into=str(self.folder),
        )
        self._received.clear()
        self._seconds = 0.0

    def _put(self, name: str, sender: str, begin: int, data: bytes) -> None:
        """Store a block. The digest is written last, so a block with a digest is complete.

        name: name of the file.
        sender: address of the lender.
        begin: offset of the block in the file, a multiple of BLOCK.
        data: the bytes of the block.

        Raises ModelError if the bytes cannot be written.

        The block then counts as present, and its bytes count for the sender and in `stored`.
        """
        block = begin // BLOCK
        with explain_os_errors(self.folder / name):
            _write(self.folder / name, begin, data)
            _write(self._digests(name), block * DIGEST, hashlib.sha256(data).digest())
        self._present.add((name, block))
        self._received[sender] += len(data)
        self.stored += len(data)

    def _has(self, name: str, block: int) -> bool:
        """Return True if a block was fetched and is intact: its bytes are checked once per run against the
        stored digest. Return False if the block was not fetched, or if its bytes do not have the stored
        digest.

        name: name of the file.
        block: number of the block, counted from 0.
        """
        if (name, block) not in self._present:
            stored_digest = _stored(self._digests(name), block * DIGEST, DIGEST)
            if (
                not any(stored_digest)
                or stored_digest != hashlib.sha256(_stored(self.folder / name, block * BLOCK, BLOCK)).digest()
            ):
                return False
            self._present.add((name, block))
        return True

    def _digests(self, name: str) -> Path:
        """Return the file with the digests of a file's blocks.

        name: name of the file.
        """
        return self.folder / "blocks" / name

    def _check_room(self, size: int) -> None:
        """Raise ModelError if the disk of the model's folder has less free space than `size`; otherwise
        return None.

        size: bytes that are about to be fetched.

        Blocks that are in the sparse files already do not count as needed.
        """
        free = shutil.disk_usage(self.folder).free
        if size > free:
            raise ModelError(
                f"{self.folder}: {memory_in_words(size)} to fetch, {memory_in_words(free)} of disk free"
                f"{OTHER_CACHE}"
            )

    def _read_spans(self, name: str) -> dict[str, tuple[int, int]]:
        """Return (begin, end) of each tensor in a safetensors file, in bytes from the file's beginning.

        name: name of the file, whose header is fetched if it is missing.

        Raises ModelError if the header is broken or cannot be fetched.

        The begin is the offset of the first byte, the end that of the byte after the last one. The files'
        metadata entry is left out.
        """
        path = self.folder / name
        self.need(name, 0, 8)
        length = header_size(path, _stored(path, 0, 8), self._files[name].size)
        self.need(name, 8, 8 + length)
        spans = spans_of(path, _stored(path, 8, length))
        return {tensor: (8 + length + begin, 8 + length + end) for tensor, (begin, end) in spans.items()}


def _runs(blocks: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last number of each run of consecutive numbers. Yields nothing without numbers.

    blocks: ascending numbers.

        # [0 1 2 5 6] -> (0, 2), (5, 6)
    """
    for _, run in groupby(enumerate(blocks), lambda one: one[1] - one[0]):
        numbers = [block for _, block in run]
        yield numbers[0], numbers[-1]


def _write(path: Path, begin: int, data: bytes) -> None:
    """Write data at an offset of a file, which is created if it is missing. Raises OSError if that fails.

    path: the file.
    begin: the offset in bytes.
    data: the bytes to write.

    Bytes before `begin` that were never written read as zeros. Bytes of the file beyond the data stay as they
    are.
    """
    with path.open("r+b" if path.exists() else "w+b") as file:
        file.seek(begin)
        file.write(data)


def _stored(path: Path, begin: int, size: int) -> bytes:
    """Return up to `size` bytes at an offset of a file; fewer at its end, and b"" if the file is missing.

    path: the file.
    begin: the offset in bytes.
    size: number of bytes.

    Errors other than a missing file are raised as OSError.
    """
    try:
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(size)
    except FileNotFoundError:
        return b""


# The borrowed models of this process, by folder. Readers pass on only a path, so they look the model up here.
_BORROWED: dict[Path, BorrowedModel] = {}


def register(model: BorrowedModel) -> None:
    """Let `borrowed_of` find this model by its folder, in the place of an earlier model of the same folder.

    model: the model that is being fetched.
    """
    _BORROWED[model.folder] = model


def borrowed_of(directory: Path) -> BorrowedModel | None:
    """Return the borrowed model of a directory, or None if the directory is no borrowed one.

    directory: a model directory.
    """
    return _BORROWED.get(directory)


def lendable(directory: Path) -> dict[str, Path]:
    """Return the files of a model that other members may fetch: the path of each file by its name. These are
    the text files in LENT_TEXTS and the weights: the GGUF files that a pointer file names, else the files of
    the safetensors index, else the single file SINGLE.

    Files that are missing are left out, and pickles are never lent; the result may be empty. Raises
    ModelError if an index or pointer file is broken.

    directory: the model directory.
    """
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
