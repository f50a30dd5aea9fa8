"""Finds the model that --model or --draft-model names, here or on the hub. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from specsot.checkpoint.config import require_model_directory
from specsot.checkpoint.gguf.finding import POINTER, find_gguf
from specsot.checkpoint.hub import HubName, fetch_description, fetch_model, hub_name, snapshot_of


def resolve_model(named: str | Path) -> Path:
    """The directory with the files of the model that was named. Raises ModelError, one line.

    Everything else takes what this returns. What is resolved already is returned as it is. What is here wins
    over a name on the hub, of which the text files are fetched.
    """
    place = Path(named).expanduser()
    if not place.exists() and (name := hub_name(str(named))):
        place = fetch_model(name)
    if (place / POINTER).is_file() or _is_snapshot(place):
        return require_model_directory(place)
    file = find_gguf(place)
    if file is None:
        return require_model_directory(place)
    from specsot.checkpoint.gguf.directory import directory_of  # numpy, and the tokenizers library

    return directory_of(file)


def describe_model(named: str | Path) -> Path:
    """The same; but of a model on the hub there are its config and the index of its weights alone."""
    name = None if Path(named).expanduser().exists() else hub_name(str(named))
    return require_model_directory(fetch_description(name)) if name else resolve_model(named)


def folder_of_model(directory: Path) -> Path:
    """Where people put files beside its weights (specsot.json, router.json, kv_heads.json): the folder of a
    GGUF file, else the directory itself.
    """
    if not (directory / POINTER).is_file():
        return directory
    return _gguf_of(directory).parent


def name_of_model(directory: Path) -> str:
    """What a model is called: the hub's name for it, or that of its directory or file."""
    snapshot = snapshot_of(directory)
    return snapshot.repository if snapshot else directory.resolve().name


def address_of_model(directory: Path) -> str:
    """What names the same model to a process elsewhere, which has other caches."""
    file = directory
    if (directory / POINTER).is_file():
        file = _gguf_of(directory)
    snapshot = snapshot_of(file)
    if snapshot is None:
        return str(file)
    inside = None if file == snapshot.folder else str(file.relative_to(snapshot.folder))
    return str(HubName(snapshot.repository, snapshot.commit, inside))


def _gguf_of(directory: Path) -> Path:
    from specsot.checkpoint.gguf.directory import read_places

    return Path(min(place.file for place in read_places(directory / POINTER).values()))


def _is_snapshot(place: Path) -> bool:
    """Which of its files are here says nothing of it."""
    snapshot = snapshot_of(place)
    return snapshot is not None and snapshot.folder == place
