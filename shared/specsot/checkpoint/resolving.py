"""Finds the model that --model or --draft-model names, on this machine or on the hub, without torch."""

from __future__ import annotations

from pathlib import Path

from specsot.checkpoint.config import require_model_directory
from specsot.checkpoint.gguf.finding import POINTER, find_gguf
from specsot.checkpoint.hub import HubName, fetch_description, fetch_model, hub_name, snapshot_of
from specsot.checkpoint.released_heads import fetch_head, head_called, released_heads
from specsot.errors import ModelError


def resolve_model(model_name: str | Path) -> Path:
    """Return the model directory of a named model: a directory, a GGUF file, or a name on the hub.

    All other functions take the returned directory. A local path wins over a name on the hub; of a model on
    the hub, the text files are fetched. A directory that this function returned is returned as it is.

    model_name: the text of --model or --draft-model, or a path.

    Raises ModelError, in one line, if there is no such model, if it is not supported, or if it cannot be
    fetched.

    "~" in a path stands for the home directory. A GGUF file, or a folder whose only weights are one GGUF
    file, gives the directory that is made of it in the cache.
    """
    place = Path(model_name).expanduser()
    if not place.exists() and (name := hub_name(str(model_name))):
        place = fetch_model(name)
    if (place / POINTER).is_file() or _is_snapshot(place):
        return require_model_directory(place)
    file = find_gguf(place)
    if file is None:
        return require_model_directory(place)
    # Imported here, because it needs numpy and the tokenizers library.
    from specsot.checkpoint.gguf.directory import directory_of

    return directory_of(file)


def describe_model(model_name: str | Path) -> Path:
    """Return the directory like `resolve_model`, but fetch only config and weight index from the hub.

    model_name: the text of --model or --draft-model, or a path.

    Raises ModelError, in one line, as `resolve_model` does, and for a GGUF file on the hub.
    """
    name = None if Path(model_name).expanduser().exists() else hub_name(str(model_name))
    return require_model_directory(fetch_description(name)) if name else resolve_model(model_name)


def resolve_draft(name: str | Path) -> Path:
    """Return the directory of a draft model: like `resolve_model`, but the name of a released head is that of
    the head, which is fetched if it is not in the cache.

    name: the text of --draft-model, or a path. A local path wins over the name of a head.

    Raises ModelError, in one line, as `resolve_model` does, and if the head cannot be fetched. A name that is
    neither a path nor one on the hub is refused with the names of the released heads.
    """
    is_name = not Path(name).expanduser().exists() and "/" not in str(name)
    head = head_called(str(name)) if is_name else None
    if is_name and head is None:
        known = ", ".join(released_heads().heads)
        raise ModelError(f"{name}: no such file or directory, and no head of SpecSoT, which has: {known}")
    return resolve_model(name) if head is None else fetch_head(head)


def folder_of_model(directory: Path) -> Path:
    """Return the folder for files that users add to a model: specsot.json, router.json, kv_heads.json.

    It is the folder of the GGUF file for a GGUF model, else the model directory itself.

    directory: the model directory, as `resolve_model` returns it.

    Raises ModelError if the pointer to the GGUF file is broken.
    """
    if not (directory / POINTER).is_file():
        return directory
    return _gguf_of(directory).parent


def name_of_model(directory: Path) -> str:
    """Return a model's name: the one on the hub, else that of its directory or file.

    directory: the model directory, as `resolve_model` returns it.
    """
    snapshot = snapshot_of(directory)
    return snapshot.repository if snapshot else directory.resolve().name


def address_of_model(directory: Path) -> str:
    """Return a name by which a process on another machine, with another cache, finds the same model.

    For a model that is not of the hub, that is its path: of the GGUF file or of the directory.

    directory: the model directory, as `resolve_model` returns it.

        # <cache>/models--owner--name/snapshots/<commit> -> "owner/name@<commit>"

    A GGUF file on the hub is named with its path in the repository: "owner/name@<commit>:FILE.gguf".
    """
    file = directory
    if (directory / POINTER).is_file():
        file = _gguf_of(directory)
    snapshot = snapshot_of(file)
    if snapshot is None:
        return str(file)
    inside = None if file == snapshot.folder else str(file.relative_to(snapshot.folder))
    return str(HubName(snapshot.repository, snapshot.commit, inside))


def _gguf_of(directory: Path) -> Path:
    """Return the (first) GGUF file that a model directory was made of.

    directory: a model directory with a pointer file. Raises ModelError if that file is broken.

    The first one is the one whose path is first in alphabetical order.
    """
    from specsot.checkpoint.gguf.directory import read_places

    return Path(min(place.file for place in read_places(directory / POINTER).values()))


def _is_snapshot(place: Path) -> bool:
    """Return whether a path is a snapshot folder of the hub's cache, some of whose files may be missing.

    place: the path.
    """
    snapshot = snapshot_of(place)
    return snapshot is not None and snapshot.folder == place
