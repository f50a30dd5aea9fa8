"""Models on the Hugging Face Hub: parses their names, and fetches their files one by one when needed.

huggingface_hub fetches the files into its own cache, with its token, offline flag and progress bars. A model
is a snapshot folder of that cache. The folder's path contains repository and commit, so missing files can be
fetched by the path alone. It needs no torch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import structlog

from specsot.checkpoint.safetensors_header import INDEX
from specsot.core.info import memory_in_words
from specsot.errors import ModelError

log = structlog.get_logger()

# The name of a model on the hub, see `HubName`.
NAMED = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w][\w./-]*))?(?::(?P<file>[^:]+\.gguf))?"
)
# The folder of a repository in the hub's cache.
FOLDER = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
# The folder of a snapshot: the commit in hex.
COMMIT = re.compile(r"[0-9a-f]{40}")
# Files that say which weight file holds each tensor.
INDEXES = (INDEX, "pytorch_model.bin.index.json")
# All files that this project reads, except weights. Indexes of pickles are text as well.
TEXTS = (
    *("config.json", "generation_config.json", "specsot.json", "kv_heads.json", "router.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json"),
    *INDEXES,
)
# Templates that only the master reads, so members never lend them to each other.
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
# Files that describe a model's shape, without its tokenizer.
DESCRIBING = ("config.json", "generation_config.json", *INDEXES)
# Part of error messages that says which token is meant.
TOKEN = "a token (hf auth login, or HF_TOKEN)"


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a model on the hub: owner/name, owner/name@revision, either one followed by :FILE.gguf.

    repository: owner/name.
    revision: A branch, tag or commit; None: the default branch.
    file: The GGUF file that is meant; None: the whole repository.
    """

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        """Return the name as `hub_name` parses it: owner/name@revision:FILE.gguf.

        Without a revision or a file, the sign in front of it is left out as well.
        """
        revision = f"@{self.revision}" if self.revision else ""
        return self.repository + revision + (f":{self.file}" if self.file else "")


def hub_name(name: str) -> HubName | None:
    """Return the parts of a name that looks like one on the hub, such as owner/name@revision, or None if the
    text does not. The hub is not asked.

    name: the text of --model or --draft-model.
    """
    match = NAMED.fullmatch(name)
    return HubName(**match.groupdict()) if match else None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one commit, as a folder of the hub's cache. Some of its files may be missing.

    folder: The snapshot folder.
    repository: owner/name.
    commit: The commit, 40 hex digits.
    """

    folder: Path
    repository: str
    commit: str

    @property
    def cache(self) -> Path:
        """The cache folder that contains the repository."""
        return self.folder.parents[2]

    @property
    def stored(self) -> int:
        """Return the bytes of the repository in the cache, unfinished files included. 0 if nothing was
        fetched yet.
        """
        blobs = self.folder.parents[1] / "blobs"
        return sum(one.stat().st_size for one in blobs.iterdir()) if blobs.is_dir() else 0


def snapshot_of(path: Path) -> Snapshot | None:
    """Return the snapshot that a folder or file belongs to, or None if it is not in a cache of the hub.

    path: a folder or file. It need not exist.

    Nothing is read from the disk: the result follows from the names of the path's folders alone.
    """
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name):
            match = FOLDER.fullmatch(folder.parent.parent.name)
            return Snapshot(folder, f"{match['owner']}/{match['name']}", folder.name) if match else None
    return None


@cache
def fetch_model(name: HubName) -> Path:
    """Fetch the text files of a repository and return its folder, without weights.

    If a GGUF file is named, or the repository has no other weights than one GGUF file, fetch and return that
    file. Other weights are fetched later, file by file, when they are needed.

    The result is cached for the process, because a branch may move in the meantime. If the hub cannot be
    reached, the files in the cache are used.

    name: the model's name on the hub.

    Raises ModelError, in one line, if there is no such repository or file, if it holds several GGUF files and
    none is named, or if it holds no model.

    Without GGUF files and other weights, a repository with a config.json is returned as it is.
    """
    from huggingface_hub import snapshot_download

    offered = _list_files(name)
    offline = offered is None
    if name.file:
        return _fetch_file(name, name.file, offline)
    with explain_hub_errors(name, "config.json"):
        folder = Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=[*TEXTS, NAMED_TEMPLATES],
                local_files_only=offline,
            )
        )
    if any((folder / index).is_file() for index in INDEXES):
        return folder
    files = [path.name for path in folder.glob("*")] if offered is None else offered
    if any(file.endswith((".safetensors", ".bin")) for file in files):
        return folder
    if found := sorted(file for file in files if file.endswith(".gguf")):
        if len(found) > 1:
            raise ModelError(f"{name}: {len(found)} GGUF files; name one, such as {name}:{found[0]}")
        return _fetch_file(name, found[0], offline)
    if (folder / "config.json").is_file():
        return folder
    raise ModelError(f"{name}: neither config.json nor a GGUF file in this repository of the hub")


@cache
def fetch_description(name: HubName) -> Path:
    """Fetch only the config and the weight index of a repository, and return its folder. The result is cached
    for the process.

    name: the model's name on the hub.

    Raises ModelError, in one line, if they cannot be fetched, and also if a GGUF file is named.

    The weight index may be missing, if the repository has only one weight file. If the hub cannot be reached,
    the files in the cache are used.
    """
    from huggingface_hub import snapshot_download

    if name.file:
        raise ModelError(
            f"{name}: a GGUF file is described only by the whole file: name a file on this machine"
        )
    with explain_hub_errors(name, "config.json"):
        files: list[str] = [*DESCRIBING]
        return Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=files))


@cache
def shapes_on_hub(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file on the hub, by name; only the file's header is
    read.

    path: Path that the file would have in the cache, within a snapshot.

    Raises ModelError if the hub has no such file or cannot be asked.

    Raises AssertionError for a path outside a snapshot.
    """
    from huggingface_hub import HfApi

    snapshot = snapshot_of(path)
    assert snapshot is not None
    file = str(path.relative_to(snapshot.folder))
    with explain_hub_errors(HubName(snapshot.repository), file):
        found = HfApi().parse_safetensors_file_metadata(snapshot.repository, file, revision=snapshot.commit)
    return {name: tuple(one.shape) for name, one in found.tensors.items()}


def fetched(path: Path) -> Path:
    """Return the path of a model's file; fetch the file if it is missing and belongs to a hub snapshot.

    A missing file of any other directory is not fetched, and its path is returned all the same.

    path: path of the file, in a model directory. An existing file is returned at once.

    Raises ModelError if the file cannot be fetched.

    The fetched file is stored in the snapshot's cache. Two lines are logged about a file that is fetched.
    """
    snapshot = None if path.exists() else snapshot_of(path)
    if snapshot is None:
        return path
    from huggingface_hub import hf_hub_download

    file = str(path.relative_to(snapshot.folder))
    log.info("fetching", file=file, repository=snapshot.repository)
    with explain_hub_errors(HubName(snapshot.repository), file):
        hf_hub_download(snapshot.repository, file, revision=snapshot.commit, cache_dir=snapshot.cache)
    log.info("fetched", file=file, size=memory_in_words(path.stat().st_size))
    return path


def offers(path: Path) -> bool:
    """Return whether the hub has this file; False for paths outside its cache.

    path: path that the file would have in the cache.

    Raises ModelError if the hub cannot be asked.

    The files in the cache are not considered.
    """
    snapshot = snapshot_of(path)
    if snapshot is None:
        return False
    from huggingface_hub import HfApi

    file = str(path.relative_to(snapshot.folder))
    with explain_hub_errors(HubName(snapshot.repository), file):
        return HfApi().file_exists(snapshot.repository, file, revision=snapshot.commit)


def _list_files(name: HubName) -> list[str] | None:
    """Return the files of a repository on the hub.

    Return None in offline mode, and if the hub cannot be reached; the latter is logged.

    name: the model's name on the hub.

    Raises ModelError if the hub has no such repository or revision, or does not show it.

    Raises ModelError also if the name is not valid for the hub. The paths are relative to the repository.
    """
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return None
    with explain_hub_errors(name, "list of files"):
        try:
            found = HfApi().model_info(name.repository, revision=name.revision)
        except (errors.HfHubHTTPError, ValueError):
            raise
        except Exception as error:
            # huggingface_hub changes its HTTP library between versions, so any error may come from there.
            _log_unreachable(constants.ENDPOINT, type(error).__name__)
            return None
        return [one.rfilename for one in found.siblings or ()]


@cache
def _log_unreachable(at: str, why: str) -> None:
    """Log that the hub cannot be reached; once per process for the same arguments.

    at: address of the hub.
    why: type of the error.
    """
    log.warning("the hub cannot be reached, so only models in the cache can be used", at=at, why=why)


def _fetch_file(name: HubName, file: str, offline: bool) -> Path:
    """Fetch one file of a repository and return its path in the cache. Raises ModelError if that fails.

    name: the model's name on the hub.
    file: the file's path in the repository.
    offline: True to use only the cache.

    Nothing is fetched if the cache has the file of the present commit. With `offline`, raises ModelError if
    the cache does not have it.
    """
    from huggingface_hub import hf_hub_download

    with explain_hub_errors(name, file):
        log.info("fetching", file=file, repository=name.repository)
        return Path(hf_hub_download(name.repository, file, revision=name.revision, local_files_only=offline))


@contextmanager
def explain_hub_errors(name: HubName, file: str) -> Generator[None]:
    """Return a context that turns errors of huggingface_hub into a ModelError of one line. A ModelError
    passes unchanged.

    name: the model's name on the hub, for the message.
    file: the file that is asked for, for the message.

    Yields None.

    Any `Exception`, also one that is not of the hub, becomes a ModelError. Without a terminal, progress bars
    are turned off for the rest of the process.
    """
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import disable_progress_bars

    at = constants.ENDPOINT
    if not sys.stderr.isatty():
        # Without a terminal, progress bars would be written into the log.
        disable_progress_bars()
    try:
        yield
    except ModelError:
        raise
    except errors.GatedRepoError:
        why = f"gated: accept its terms at {at}/{name.repository}; then it takes {TOKEN}"
    except errors.RepositoryNotFoundError:
        why = f"no such file or directory here, and no such repository at {at}; a private one takes {TOKEN}"
    except errors.RevisionNotFoundError:
        why = f"{name.repository} at {at} has no revision {name.revision}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        off = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{at} cannot be reached"
        cache = f"its {file} is not in the cache ({constants.HF_HUB_CACHE})"
        why = f"no such file or directory here, {off}, and {cache}"
    except errors.EntryNotFoundError:
        why = f"no {file} in this repository of the hub"
    except Exception as error:
        # Errors of the HTTP library or of the disk.
        why = f"{file}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        return
    raise ModelError(f"{name}: {why}")
