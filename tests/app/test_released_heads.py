"""A head that a release publishes is fetched once, by name, and only if it has the listed SHA-256."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specsot.checkpoint import released_heads, resolving
from specsot.checkpoint.cache import cache_folder
from specsot.checkpoint.released_heads import HeadFile, HeadList, ReleasedHead, fetch_head, head_called
from specsot.errors import ModelError
from specsot.service.options import DraftModelOptions
from specsot_app.fleet import bundled_heads
from specsot_app.fleet import options as fleet_options
from specsot_app.fleet.options import FleetOptions, draft_of
from tests.conftest import REPOSITORY
from tests.models import Shape, write_base
from tools.heads import LIST, heads, list_text

SHAPE = Shape(hidden=32, heads=2, kv_heads=1, head_dim=16, inner=48, vocabulary=60)
CONTENTS = {"config.json": b"{}", "model.safetensors": b"weights"}


class Assets(ThreadingHTTPServer):
    """The files of a release on loopback, and what was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Visit, directory=str(folder)))
        self.folder = folder
        self.asked = list[str]()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Visit(SimpleHTTPRequestHandler):
    server: Assets

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.asked.append(self.path.rpartition("/")[2])
        super().do_GET()


@pytest.fixture
def head() -> ReleasedHead:
    files = {
        name: HeadFile(f"tiny.eagle3.{name}", hashlib.sha256(data).hexdigest(), len(data))
        for name, data in CONTENTS.items()
    }
    return ReleasedHead("tiny-1.5b", SHAPE.hidden, SHAPE.vocabulary, files)


@pytest.fixture
def assets(tmp_path: Path, head: ReleasedHead) -> Generator[Assets]:
    folder = tmp_path / "assets"
    (folder / "v1").mkdir(parents=True)
    for name, data in CONTENTS.items():
        (folder / "v1" / head.files[name].asset).write_bytes(data)
    server = Assets(folder)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch, assets: Assets, head: ReleasedHead) -> Generator[HeadList]:
    """This copy is from a release that has the head."""
    listed = HeadList(assets.address, {head.name: head})
    for module in (released_heads, bundled_heads, resolving):
        monkeypatch.setattr(module, "released_heads", lambda: listed)
    bundled_heads._fetched_or_none.cache_clear()
    yield listed
    bundled_heads._fetched_or_none.cache_clear()


def test_a_head_is_fetched_once_and_kept(assets: Assets, head: ReleasedHead) -> None:
    folder = fetch_head(head, assets.address)
    assert folder.parent == cache_folder() / "heads"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS
    assert fetch_head(head, assets.address) == folder
    assert sorted(assets.asked) == sorted(file.asset for file in head.files.values())
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing else is left there"


@pytest.mark.parametrize("data", [b"weightz", b"weigh", b"weights and more"], ids=["other", "cut", "longer"])
def test_other_bytes_are_refused_in_one_line_and_not_kept(
    assets: Assets, head: ReleasedHead, data: bytes
) -> None:
    (assets.folder / "v1" / head.files["model.safetensors"].asset).write_bytes(data)
    with pytest.raises(
        ModelError, match=r"model\.safetensors has .* of the release: it is not used$"
    ) as error:
        fetch_head(head, assets.address)
    assert "\n" not in str(error.value)
    assert list((cache_folder() / "heads").iterdir()) == []


def test_what_the_server_lacks_is_named(assets: Assets, head: ReleasedHead) -> None:
    with pytest.raises(ModelError, match=r"/v2/tiny\.eagle3\.config\.json cannot be fetched: 404 "):
        fetch_head(head, assets.address.replace("v1", "v2"))


def test_a_new_version_of_a_head_does_not_take_the_old_one_s_place(head: ReleasedHead) -> None:
    newer = dict(head.files) | {"config.json": replace(head.files["config.json"], sha256="0" * 64)}
    assert replace(head, files=newer).folder != head.folder


def test_a_copy_that_is_no_release_says_where_the_head_is(head: ReleasedHead) -> None:
    with pytest.raises(ModelError, match=r"releases fetch it, a clone has it in models/tiny-1\.5b"):
        fetch_head(head, "")


def test_every_program_knows_the_name(release: HeadList, head: ReleasedHead) -> None:
    """The drafter alone, and a whole fleet; in any spelling."""
    assert DraftModelOptions(draft_model="Tiny 1.5B").draft == head.folder
    assert fleet_options.named_head(FleetOptions(draft_model="tiny-1.5b")) == head.folder
    assert fleet_options.named_head(FleetOptions(draft_model="tiny-1.5b", drafter="model")) is None
    assert head_called("tiny-7b", release) is None


@pytest.mark.usefixtures("release")
def test_an_unknown_name_is_refused_with_the_names_of_all_heads(demo_model: Path) -> None:
    said = "^tiny-7b: no such file or directory, and no head of SpecSoT, which has: tiny-1.5b$"
    with pytest.raises(ModelError, match=said):
        _ = DraftModelOptions(draft_model="tiny-7b").draft
    with pytest.raises(ModelError, match=said):
        fleet_options.draft_of(FleetOptions(draft_model="tiny-7b"), demo_model / "base")
    with pytest.raises(ModelError, match=r"^tiny-7b: no such file or directory, and no name on the hub"):
        fleet_options.draft_of(FleetOptions(draft_model="tiny-7b", drafter="model"), demo_model / "base")


@pytest.mark.usefixtures("release")
def test_a_base_of_that_name_and_size_drafts_with_the_head(tmp_path: Path, head: ReleasedHead) -> None:
    base = write_base(tmp_path / "Tiny-1.5B-Instruct", SHAPE)
    assert draft_of(FleetOptions(model=base), base) == head.folder
    other = write_base(tmp_path / "tiny-1.5b", replace(SHAPE, vocabulary=61))
    assert draft_of(FleetOptions(model=other), other) is None


@pytest.mark.usefixtures("release")
def test_without_the_server_the_base_answers_without_a_head(
    tmp_path: Path, assets: Assets, capsys: pytest.CaptureFixture[str]
) -> None:
    assets.shutdown()
    assets.server_close()
    base = write_base(tmp_path / "tiny-1.5b", SHAPE)
    assert [draft_of(FleetOptions(model=base), base) for _ in range(2)] == [None, None]
    said = capsys.readouterr()
    assert (said.out + said.err).count("no draft head") == 1, "once"


def test_the_list_has_the_heads_of_this_repository() -> None:
    """Run tools/heads.py after a head was added or trained again."""
    assert LIST.read_text(encoding="utf-8") == list_text(heads(REPOSITORY / "models"), "")
