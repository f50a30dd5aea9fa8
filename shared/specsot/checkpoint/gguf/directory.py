"""Makes of a GGUF file a model directory of text files, once, in a cache; weights stay where they are."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree

from specsot.checkpoint.cache import cache_folder
from specsot.checkpoint.fields import read_json
from specsot.checkpoint.gguf.finding import POINTER, parts_of, stem_of
from specsot.checkpoint.gguf.header import Header, read_header
from specsot.checkpoint.gguf.layout import Place, config_of, places_of
from specsot.checkpoint.gguf.tokenizer import StoredTokenizer
from specsot.errors import ModelError

FORM = "3"  # of the directories; another one for each change of what is in them


def directory_of(file: Path) -> Path:
    """The model directory of a GGUF file, which is made where there is none yet. Raises ModelError.

    It has the file's name. Several processes may make it at once: the first one's stays.
    """
    parts = [one.absolute() for one in parts_of(file)]
    made = cache_folder() / "gguf" / _key(parts) / stem_of(parts[0])
    if not (made / POINTER).is_file():
        header = _joined(parts)
        try:
            made.parent.mkdir(parents=True, exist_ok=True)
            _publish(header, made)
        except OSError as error:
            raise ModelError(f"{made}: {error.strerror} (XDG_CACHE_HOME names another cache)") from None
    return made


def read_places(pointer: Path) -> dict[str, Place]:
    """Where each tensor of a directory is: a file beside the pointer counts. Raises ModelError."""
    places: dict[str, Place] = {}
    for name, stored in read_json(pointer).items():
        axes, order = stored.pop("order") or ((), ())
        turned = (tuple(axes), tuple(order)) if axes else None
        beside = pointer.parent / Path(stored["file"]).name
        stored["file"] = str(beside) if beside.is_file() else stored["file"]
        places[name] = Place(**stored | {"shape": tuple(stored["shape"])}, order=turned)
    return places


def _key(parts: Sequence[Path]) -> str:
    """Another one for each file, and for each state of it."""
    told = [FORM]
    for part in parts:
        try:
            stat = part.stat()
        except OSError as error:
            raise ModelError(f"{part}: {error.strerror}") from None
        told.append(f"{part}:{stat.st_size}:{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def _joined(parts: Sequence[Path]) -> Header:
    """The first part has the metadata; every part tells of its own tensors."""
    headers = [read_header(part) for part in parts]
    tensors = {name: one for header in headers for name, one in header.tensors.items()}
    whole = replace(headers[0], tensors=tensors)
    told = whole.metadata.get("split.tensors.count", len(tensors))
    count = whole.metadata.get("split.count", 1)
    if (told, count or 1) != (len(tensors), len(parts)):
        raise ModelError(
            f"{whole.file}: of {told} tensors in {count} files, {len(tensors)} in {len(parts)} are here"
        )
    return whole


def _publish(header: Header, made: Path) -> None:
    """Whole or not at all."""
    try:
        files = dict(_text_files(header))
    except (ModelError, OSError):
        raise
    except Exception as error:  # of whatever else a file says of itself; tokenizers raises bare Exception
        said = " ".join(str(error).split())[:200]
        raise ModelError(f"{header.file}: its metadata make no model ({said})") from None
    draft = Path(tempfile.mkdtemp(dir=made.parent))
    for name, text in files.items():
        (draft / name).write_text(text, encoding="utf-8")
    try:
        draft.rename(made)
    except OSError:  # somebody was faster
        rmtree(draft, ignore_errors=True)
        if not (made / POINTER).is_file():
            raise


def _text_files(header: Header) -> Iterator[tuple[str, str]]:
    config = config_of(header)
    tokenizer = StoredTokenizer(header)
    yield POINTER, json.dumps({name: asdict(place) for name, place in places_of(header, config).items()})
    yield "config.json", json.dumps(config, indent=2)
    yield "generation_config.json", json.dumps({"eos_token_id": tokenizer.ends()})
    yield "tokenizer.json", tokenizer.build().to_str()
    yield "tokenizer_config.json", json.dumps(tokenizer.config(), indent=2)
    if tokenizer.template is not None:
        yield "chat_template.jinja", tokenizer.template
