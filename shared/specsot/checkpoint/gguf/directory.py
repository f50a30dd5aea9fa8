"""Makes a model directory of text files from a GGUF file, once, in a cache; the weights stay in the file."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from math import prod
from pathlib import Path

from specsot.checkpoint.cache import OTHER_CACHE, cache_folder, publish
from specsot.checkpoint.fields import explain_os_errors, read_json
from specsot.checkpoint.gguf.finding import POINTER, parts_of, stem_of
from specsot.checkpoint.gguf.header import Header, read_header
from specsot.checkpoint.gguf.layout import Place, config_of, places_of
from specsot.checkpoint.gguf.tokenizer import StoredTokenizer
from specsot.errors import ModelError

# Version of the directories' content. Every change of the content needs another version.
FORM = "5"


def directory_of(file: Path) -> Path:
    """Return the model directory of a GGUF file, and make it if it does not exist yet.

    The directory has the file's name. Several processes may make it at the same time; the first one wins.
    Raises ModelError if the file is broken or not supported, or if the cache cannot be written.

    file: the GGUF file, or any part of a split one.

    An existing directory is returned as it is; a changed size or time of a file gives another directory.
    Raises ModelError also if a part is missing.
    """
    parts = [part.absolute() for part in parts_of(file)]
    directory = cache_folder() / "gguf" / _key(parts) / stem_of(parts[0])
    if not (directory / POINTER).is_file():
        header = _joined(parts)
        with explain_os_errors(directory, OTHER_CACHE):
            directory.parent.mkdir(parents=True, exist_ok=True)
            _publish(header, directory)
    return directory


def is_current(directory: Path) -> bool:
    """Tell whether the GGUF files of a directory have the sizes and times that they had when `directory_of`
    made it. False if a file is gone, or if the directory was made otherwise, for example by a version of
    SpecSoT that wrote other fields.

    directory: the model directory.
    """
    try:
        first = min(place.file for place in read_places(directory / POINTER).values())
        return _key(parts_of(Path(first))) == directory.parent.name
    except (KeyError, ModelError, TypeError, ValueError):
        return False


@cache
def bits_per_weight(directory: Path) -> float | None:
    """Return the mean number of bits that a GGUF file's matrices take per weight, such as 4.9 for Q4_K_M.

    Return None for a model directory that was not made of a GGUF file.

    directory: the model directory.

    Raises ModelError if the pointer file is no JSON object.
    """
    pointer = directory / POINTER
    if not pointer.is_file():
        return None
    matrices = [place for place in read_places(pointer).values() if len(place.shape) == 2]
    weights = sum(prod(place.shape) for place in matrices)
    return 8 * sum(place.bytes for place in matrices) / weights if weights else None


def read_places(pointer: Path) -> dict[str, Place]:
    """Return where each tensor of a model directory is stored, by the tensor's name in Transformers.

    If a GGUF file of the stored name lies next to the pointer, that file is used.

    pointer: the pointer file of the directory.

    Raises ModelError if the pointer file is missing or no JSON object.

    Otherwise the stored path is used, whether or not the file exists. An entry with missing or unknown fields
    raises KeyError or TypeError.
    """
    places: dict[str, Place] = {}
    for name, stored in read_json(pointer).items():
        for name_of_order in ("order", "columns"):
            axes, order = stored[name_of_order] or ((), ())
            stored[name_of_order] = (tuple(axes), tuple(order)) if axes else None
        neighbour = pointer.parent / Path(stored["file"]).name
        stored["file"] = str(neighbour) if neighbour.is_file() else stored["file"]
        places[name] = Place(**stored | {"shape": tuple(stored["shape"])})
    return places


def _key(parts: Sequence[Path]) -> str:
    """Return a key that differs for every GGUF file, and for every change of its size or time: 16 hex digits.

    parts: absolute paths of the file's parts. Raises ModelError if one is missing.

    The key also changes with the format of the directory (FORM).
    """
    lines = [FORM]
    for part in parts:
        with explain_os_errors(part):
            stat = part.stat()
        lines.append(f"{part}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _joined(parts: Sequence[Path]) -> Header:
    """Return one header for all of a file's parts: the first part has the metadata, every part its own
    tensors.

    parts: paths of the file's parts, the first one first.

    Raises ModelError if parts or tensors are missing.

    Numbers that the metadata do not name are not compared. Raises ModelError also if a header cannot be read.
    """
    headers = [read_header(part) for part in parts]
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    joined = replace(headers[0], tensors=tensors)
    num_tensors = joined.metadata.get("split.tensors.count", len(tensors))
    count = joined.metadata.get("split.count", 1)
    joined.require(
        (num_tensors, count or 1) == (len(tensors), len(parts)),
        f"of {num_tensors} tensors in {count} files, {len(tensors)} in {len(parts)} are here",
    )
    return joined


def _publish(header: Header, directory: Path) -> None:
    """Write the directory completely or not at all: it is written elsewhere and then renamed.

    header: the header of the GGUF file.
    directory: the path of the directory, whose parent exists.

    Raises ModelError if the metadata do not describe a supported model, OSError if the directory cannot be
    written.

    If another process made the directory meanwhile, that one is used and nothing is raised.
    """
    try:
        files = dict(_text_files(header))
    except (ModelError, OSError):
        raise
    except Exception as error:
        # Metadata may be wrong in any way, and the tokenizers library raises bare Exception.
        message = " ".join(str(error).split())[:200]
        raise ModelError(f"{header.file}: its metadata make no model ({message})") from None
    temporary = Path(tempfile.mkdtemp(dir=directory.parent))
    for name, text in files.items():
        (temporary / name).write_text(text, encoding="utf-8")
    publish(temporary, directory, POINTER)


def _text_files(header: Header) -> Iterator[tuple[str, str]]:
    """Yield name and content of every file of the model directory.

    header: the header of the GGUF file. Raises ModelError if its metadata do not describe a supported model.

    The file chat_template.jinja is yielded only if the file has a template.
    """
    config = config_of(header)
    tokenizer = StoredTokenizer(header)
    yield POINTER, json.dumps({name: asdict(place) for name, place in places_of(header, config).items()})
    yield "config.json", json.dumps(config, indent=2)
    yield "generation_config.json", json.dumps({"eos_token_id": tokenizer.ends()})
    yield "tokenizer.json", tokenizer.build().to_str()
    yield "tokenizer_config.json", json.dumps(tokenizer.config(), indent=2)
    if tokenizer.template is not None:
        yield "chat_template.jinja", tokenizer.template
