"""Models on the Hugging Face Hub: what names one, and fetching its files one by one as they are needed.

huggingface_hub fetches, into its own cache, with its token, offline flag and progress bars. A model is a
folder of that cache, whose path tells repository and commit: whoever has it can fetch what is not in it.
Needs no torch.
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

from specsot.core.info import memory_in_words
from specsot.errors import ModelError

log = structlog.get_logger()

NAMED = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w][\w./-]*))?(?::(?P<file>[^:]+\.gguf))?"
)
FOLDER = re.compile(r"models--(?P<owner>.+?)--(?P<name>.+)")
COMMIT = re.compile(r"[0-9a-f]{40}")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Everything but weights that anybody here reads. Indexes of pickles are text, too.
TEXTS = (
    *("config.json", "generation_config.json", "specsot.json", "kv_heads.json", "router.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("chat_template.jinja", "chat_template.json"),
    *INDEXES,
)
# Templates that only the master reads, so members never lend them to each other.
NAMED_TEMPLATES = "additional_chat_templates/*.jinja"
DESCRIBING = ("config.json", "generation_config.json", *INDEXES)  # what a model is, but not what it says
TOKEN = "a token (hf auth login, or HF_TOKEN)"


@dataclass(frozen=True, slots=True)
class HubName:
    """owner/name, owner/name@revision, and behind either of them perhaps :FILE.gguf."""

    repository: str
    revision: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        revision = self.revision
        file = self.file
        return self.repository + (f"@{revision}" if revision else "") + (f":{file}" if file else "")


def hub_name(named: str) -> HubName | None:
    """What looks like one; whether there is such a repository, only the hub knows."""
    found = NAMED.fullmatch(named)
    return HubName(**found.groupdict()) if found else None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A repository at one commit, as a folder of a cache. Of its files some are there."""

    folder: Path
    repository: str
    commit: str

    @property
    def cache(self) -> Path:
        return self.folder.parents[2]

    @property
    def stored(self) -> int:
        """Bytes of the repository in the cache, unfinished files included."""
        blobs = self.folder.parents[1] / "blobs"
        return sum(one.stat().st_size for one in blobs.iterdir()) if blobs.is_dir() else 0


def snapshot_of(path: Path) -> Snapshot | None:
    """Of a folder or of a file in it; None for what is no part of the hub's cache."""
    for folder in (path, *path.parents):
        if folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name):
            found = FOLDER.fullmatch(folder.parent.parent.name)
            return Snapshot(folder, f"{found['owner']}/{found['name']}", folder.name) if found else None
    return None


@cache
def fetch_model(name: HubName) -> Path:
    """The folder of a repository with its text files, or the GGUF file of one that has no other weights.

    Weights come when they are asked for, file by file. Asked once in a process: a branch may move meanwhile.
    Where the hub cannot be reached, what is in the cache serves. Raises ModelError, one line.
    """
    from huggingface_hub import snapshot_download

    offered = _list_files(name)
    offline = offered is None
    if name.file:
        return _fetch_file(name, name.file, offline)
    with told_clearly(name, "config.json"):
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
    """The folder of a repository with its config and the index of its weights, and nothing else.

    Raises ModelError, one line.
    """
    from huggingface_hub import snapshot_download

    if name.file:
        raise ModelError(f"{name}: what a GGUF file says of itself is fetched with it: name one that is here")
    with told_clearly(name, "config.json"):
        files: list[str] = [*DESCRIBING]
        return Path(snapshot_download(name.repository, revision=name.revision, allow_patterns=files))


def shapes_on_hub(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a safetensors file of the hub that is not here, from its first bytes.

    Raises ModelError.
    """
    from huggingface_hub import HfApi

    snapshot = snapshot_of(path)
    assert snapshot is not None
    file = str(path.relative_to(snapshot.folder))
    with told_clearly(HubName(snapshot.repository), file):
        found = HfApi().parse_safetensors_file_metadata(snapshot.repository, file, revision=snapshot.commit)
    return {name: tuple(one.shape) for name, one in found.tensors.items()}


def fetched(path: Path) -> Path:
    """A file of a model, fetched where it is the hub's and not here. Raises ModelError."""
    snapshot = None if path.exists() else snapshot_of(path)
    if snapshot is None:
        return path
    from huggingface_hub import hf_hub_download

    file = str(path.relative_to(snapshot.folder))
    log.info("fetching", file=file, of=snapshot.repository)
    with told_clearly(HubName(snapshot.repository), file):
        hf_hub_download(snapshot.repository, file, revision=snapshot.commit, cache_dir=snapshot.cache)
    log.info("fetched", file=file, size=memory_in_words(path.stat().st_size))
    return path


def offers(path: Path) -> bool:
    """Whether the hub has this file of a model. Raises ModelError where it cannot be asked."""
    snapshot = snapshot_of(path)
    if snapshot is None:
        return False
    from huggingface_hub import HfApi

    file = str(path.relative_to(snapshot.folder))
    with told_clearly(HubName(snapshot.repository), file):
        return HfApi().file_exists(snapshot.repository, file, revision=snapshot.commit)


def _list_files(name: HubName) -> list[str] | None:
    """Of the repository; None where the hub is not to be asked or, after a line that says so, cannot be."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return None
    with told_clearly(name, "list of files"):
        try:
            found = HfApi().model_info(name.repository, revision=name.revision)
        except (errors.HfHubHTTPError, ValueError):
            raise
        except Exception as error:  # of its HTTP library, which is another one with every version
            _say_unreachable(constants.ENDPOINT, type(error).__name__)
            return None
        return [one.rfilename for one in found.siblings or ()]


@cache
def _say_unreachable(at: str, why: str) -> None:
    log.warning("the hub cannot be reached, so only models in the cache can be used", at=at, why=why)


def _fetch_file(name: HubName, file: str, offline: bool) -> Path:
    from huggingface_hub import hf_hub_download

    with told_clearly(name, file):
        log.info("fetching", file=file, of=name.repository)
        return Path(hf_hub_download(name.repository, file, revision=name.revision, local_files_only=offline))


@contextmanager
def told_clearly(name: HubName, file: str) -> Generator[None]:
    """What huggingface_hub raises becomes a ModelError of one line. file: what was asked for."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import disable_progress_bars

    at = constants.ENDPOINT
    if not sys.stderr.isatty():
        disable_progress_bars()  # they would write into the log
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
    except Exception as error:  # of its HTTP library, of the disk
        why = f"{file}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        return
    raise ModelError(f"{name}: {why}")
