"""Keeps the packed weights of a GGUF model in files of the cache, and maps them at the next start.

Mapped weights are read from the disk when a kernel first needs them, take no memory of the process's own, and
are shared by all processes that map them.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from typing import IO

import structlog
import torch
from torch import Tensor

from specsot.checkpoint.cache import cache_folder, remove_unused, use
from specsot.checkpoint.gguf.directory import is_current
from specsot.members import Quantization
from specsot_model.linear import Packed, cpu_layout

log = structlog.get_logger()

# Version of the files' content. Every change of a packed weight's layout, or of how weights are rounded,
# needs another version.
FORM = "2"
# Bytes. The first bytes of a file: the weight's shape and its format (`layout.FORMAT`) as JSON, and spaces.
# Arrays then begin on a page.
HEADER = 4096
# Bytes. Weights are not kept if the disk would have less free space afterwards. Untuned.
FREE_ON_DISK = 4 << 30
# The beginning of the names of files that are not complete yet.
UNFINISHED = ".unfinished-"
# Seconds. Unfinished files of this age are removed. Untuned.
UNFINISHED_SECONDS = 3600.0


# Renames files once they are on the disk. Python waits for its thread before the process ends.
_publisher = ThreadPoolExecutor(1, "packed-files")


def flush() -> None:
    """Wait until each weight that this process has kept is on the disk under its final name, or has failed to
    get there. The publisher has one thread, so what is submitted now ends after all of them.
    """
    _publisher.submit(bool).result()


class PackedFiles:
    """The packed weights of one GGUF model in one form, in a folder of the cache.

    The folder's name has the key of the model's directory, which changes with the size or the time of the
    GGUF file. A file is written under another name, and renamed once its bytes are on the disk, so that a
    file with its final name is complete.
    """

    def __init__(self, folder: Path, mark: IO[str]) -> None:
        """Use a folder; see `packed_files_of`.

        folder: The folder, which exists.
        mark: The open file that keeps other processes from removing the folder.
        """
        self._folder = folder
        self._mark = mark

    def find(self, name: str, shape: Sequence[int]) -> Packed | None:
        """Return a weight that an earlier process kept, mapped; None if there is none.

        A file of another shape, or of another size than the shape asks for, counts as none.

        name: Name of the weight in the model.
        shape: (out, in) of the weight.
        """
        return _mapped(self._folder / name, shape)

    def keep(self, name: str, packed: Packed) -> Packed:
        """Write a weight to a file, and return it mapped from there, so that its memory can be freed.

        The weight is returned as it is if the disk has too little room, or cannot be written; the next start
        then packs it again.

        name: Name of the weight in the model.
        packed: The weight.
        """
        weight = packed.weight
        unfinished = None
        try:
            if disk_usage(self._folder).free - weight.nbytes < FREE_ON_DISK:
                return packed
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix=UNFINISHED, delete=False) as file:
                unfinished = Path(file.name)
                head = {"shape": list(weight.shape), "bits": weight.bits}
                file.write(json.dumps(head).encode().ljust(HEADER))
                for array in weight.arrays:
                    array.numpy().tofile(file)
            mapped = _mapped(unfinished, weight.shape)
        except OSError as error:
            log.warning("packed weights were not kept", folder=str(self._folder), reason=error.strerror)
            if unfinished:
                with suppress(OSError):
                    unfinished.unlink()
            return packed
        _publisher.submit(_publish, unfinished, self._folder / name)
        return mapped or packed


def packed_files_of(directory: Path, quantization: Quantization) -> PackedFiles | None:
    """Return the packed weights of a model directory that was made of a GGUF file; None if they are not kept.

    They are not kept for a directory outside of the cache, such as one that was borrowed, and if the cache
    cannot be written. Weights of GGUF files that were changed or removed since, and weights that no process
    has used for `cache.UNUSED_SECONDS`, are removed from the cache now.

    They are not kept either if the GGUF file has changed since the directory was made. Raises ModelError if
    the processor lacks instructions that packed weights need.

    Processors that keep a file's 4 and 6 bits, and others, which round them to 8 bits, use different folders.

    directory: The model directory.
    quantization: Form of the model's matrices, "int8" or "int4".
    """
    key = directory.parent
    if key.parent != cache_folder() / "gguf" or not is_current(directory):
        return None
    folder = (
        cache_folder()
        / "packed"
        / f"{key.name}-{quantization}-{FORM}{'-kept' if cpu_layout().ENABLED_LOSSLESS_TYPES else ''}"
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark = use(folder)
    except OSError as error:
        log.warning("packed weights were not kept", folder=str(folder), reason=error.strerror)
        return None
    remove_unused(folder.parent, time.time(), _is_outdated)
    _remove_unfinished(folder)
    return PackedFiles(folder, mark)


def _is_outdated(folder: Path) -> bool:
    """Tell whether a folder's weights were made of a GGUF file that has changed or is gone.

    folder: A folder of packed weights; its name begins with the key of the model's directory.
    """
    key = cache_folder() / "gguf" / folder.name.partition("-")[0]
    return not any(is_current(directory) for directory in key.glob("*"))


def _remove_unfinished(folder: Path) -> None:
    """Remove unfinished files that nothing was written to for an hour, as those of a process that was killed.

    A process that still uses such a file has mapped it, and only loses the file's name.

    folder: A folder of packed weights.
    """
    for file in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > UNFINISHED_SECONDS:
                file.unlink()


def _publish(written: Path, path: Path) -> None:
    """Wait until a file's bytes are on the disk, and rename it. If that fails, the file keeps its name.

    written: The file as it is named now.
    path: Its final name.
    """
    with suppress(OSError):
        with written.open("rb") as file:
            os.fsync(file.fileno())
        written.replace(path)


def _mapped(path: Path, shape: Sequence[int]) -> Packed | None:
    """Return the weight of a file, mapped; None if the file is missing, has another shape or size, or has a
    form that this processor's kernel cannot compute.

    path: The file.
    shape: (out, in) of the weight.
    """
    from specsot_kernels.cpu.layout import FORMATS
    from specsot_kernels.cpu.running import PackedArrays, array_sizes

    try:
        with path.open("rb") as file:
            head = json.loads(file.read(HEADER))
            bits = int(head["bits"])
            codes, scales, bias = array_sizes(shape, bits)
            size = HEADER + codes + 4 * (scales + bias)
            same = head["shape"] == list(shape) and os.fstat(file.fileno()).st_size == size
            if bits not in FORMATS or not same:
                return None
            if hasattr(os, "posix_fadvise"):
                # The system reads the file from the disk while other weights are prepared.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        whole: Tensor = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    # PyTorch raises RuntimeError if the file was removed meanwhile, or cannot be mapped.
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):
        return None
    arrays = whole[HEADER:].split([codes, 4 * scales, 4 * bias])
    floats = (array.view(torch.float32) for array in arrays[1:])
    return Packed.of_arrays(shape, PackedArrays(arrays[0], *floats), bits)
