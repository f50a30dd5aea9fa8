"""Members that lend each other the model: the same text, only what is needed, and nothing that is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specsot.checkpoint.borrowed import BLOCK, BorrowedModel, LentFile, lendable, register
from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.resolving import resolve_model
from specsot.errors import ModelError, NotFound, Refused, Unavailable, WireError
from specsot.members import Overrides, Range
from specsot.service.options import DraftModelOptions, ModelOptions
from specsot.transport.grpc_channel import Terms
from specsot.transport.grpc_server import open_server
from specsot.transport.lending import MODELS_SERVICE, Lenders, LendingService, borrow
from specsot.transport.security import PLAIN, Tls
from specsot.v1 import fleet_pb2, fleet_pb2_grpc
from specsot_drafter.loader import DraftLoader
from specsot_model.weights import WeightFiles
from specsot_worker.loader import StageLoader
from tests.conftest import some
from tests.laws.ring import Setup, write
from tests.model.gguf_files import KINDS, write_gguf
from tests.model.published import HERE as QUANTIZED
from tests.model.test_hub import configuration
from tests.model.tiny import write_model
from tests.models import Shape, write_base, write_head
from tests.security.tls_files import Authority

WIDE = Shape(layers=4, hidden=128, heads=8, inner=512)  # 5 MB: several blocks in each half
HALF = Range(2, 4)
PROMPTS = [[3, 17, 4, 99, 21]]


class NamedLenders(fleet_pb2_grpc.FleetServicer):
    """A master that knows of lenders, and of nothing else."""

    def __init__(self) -> None:
        self.fingerprint, self.addresses = "", list[str]()

    async def ListLenders(self, request: Any, context: Any) -> fleet_pb2.ListLendersResponse:
        return fleet_pb2.ListLendersResponse(fingerprint=self.fingerprint, addresses=self.addresses)


class ShakyLender(LendingService):
    """Its files are right; from block `after` on it hangs up, or what it sends is not what it read."""

    def __init__(self, after: int, fault: str) -> None:
        super().__init__("shaky")
        self.after, self.fault, self.begins = after, fault, list[int]()

    async def ReadFile(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        self.begins.append(request.begin)
        async for piece in super().ReadFile(request, context):
            if piece.begin // BLOCK >= self.after and request.name.endswith(".safetensors"):
                if self.fault == "gone":
                    raise Unavailable("killed")
                piece.data = piece.data[:-1] + bytes([piece.data[-1] ^ 1])
            yield piece


class Fleet:
    """A master's endpoint and lenders' endpoints on loopback."""

    def __init__(self, stack: AsyncExitStack, address: str, master: NamedLenders, tls: Tls) -> None:
        self._stack, self.address, self.master, self._tls = stack, address, master, tls

    async def lend(self, base: Path, lender: LendingService | None = None) -> str:
        lender = lender or LendingService("lender")
        lender.open(base, fingerprint(base))
        endpoint = await open_server("127.0.0.1:0", {MODELS_SERVICE: lender.attach}, Terms(tls=self._tls))
        self._stack.push_async_callback(endpoint.close, 0)
        self.master.fingerprint = fingerprint(base)
        self.master.addresses.append(f"127.0.0.1:{endpoint.port}")
        return self.master.addresses[-1]

    def lenders(self, tls: Tls = PLAIN) -> Lenders:
        return Lenders("borrower", self.address, tls, timeout_seconds=0)


@asynccontextmanager
async def fleet(tls: Tls = PLAIN, master_tls: Tls = PLAIN) -> AsyncGenerator[Fleet]:
    async with AsyncExitStack() as stack:
        master = NamedLenders()

        def attach(server: Any) -> None:
            fleet_pb2_grpc.add_FleetServicer_to_server(master, server)

        endpoint = await open_server("127.0.0.1:0", {"specsot.v1.Fleet": attach}, Terms(tls=master_tls))
        stack.push_async_callback(endpoint.close, 0)
        yield Fleet(stack, f"127.0.0.1:{endpoint.port}", master, tls)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("lent") / "base", WIDE)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.at(tmp_path / "authority")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


async def borrowed(lenders: Lenders) -> Path:
    folder = await borrow(lenders, asyncio.Event())
    assert folder is not None
    return folder


def load(folder: Path, layers: Range = HALF) -> None:
    options = ModelOptions(folder, dtype="fp32", kv_memory=1 << 20)
    StageLoader(options, "w").make_stage(configuration(layers), layers)


def tensors(folder: Path) -> dict[str, Any]:
    import torch

    files = WeightFiles(folder)
    return {name: files.tensor(name, torch.float32, "cpu").tolist() for name in files.names()}


@pytest.mark.parametrize("quantized", [False, True])
async def test_a_ring_without_files_generates_the_same_sequence(base: Path, quantized: bool) -> None:
    base = QUANTIZED / "gptq" if quantized else base
    expected, _ = await write(Setup(base, stages=2), PROMPTS, 8)
    async with fleet() as there:
        await there.lend(base)
        folder = await borrowed(there.lenders())
        assert fingerprint(folder) == fingerprint(base)
        assert (await write(Setup(folder, stages=2), PROMPTS, 8))[0] == expected


@pytest.mark.parametrize("quantization", some([None, "int8"], 0))
async def test_a_borrower_counts_and_fetches_its_own_layers(base: Path, quantization: Any, capsys) -> None:
    async with fleet() as there:
        await there.lend(base)
        folder = await borrowed(there.lenders())
        given = {"dtype": "fp32", "kv_memory": 1 << 20, "quantization": quantization}
        loader, local = (StageLoader(ModelOptions(one, **given), "w") for one in (folder, base))
        joining, theirs = await asyncio.to_thread(loader.registration), local.registration()
        assert (joining.weights, joining.fingerprint) == (theirs.weights, theirs.fingerprint)
        assert (joining.lends, theirs.lends) == (False, True)
        before, layers = loader.fetched, Range(3, 4)
        assert before < 2 * BLOCK  # texts, and a header
        await asyncio.to_thread(loader.make_stage, configuration(layers), layers)
    size = (base / "model.safetensors").stat().st_size
    assert 0 < loader.fetched - before < size / 2
    told = capsys.readouterr().out
    assert "fetched from members" in told
    assert "layers 3:4" in told


@pytest.mark.parametrize(
    ("fault", "said"), [("gone", "killed"), ("changed", "the checksum of model.safetensors at")]
)
async def test_another_lender_goes_on_where_one_fails(base: Path, fault: str, said: str, capsys) -> None:
    shaky, sound = ShakyLender(2, fault), ShakyLender(99, "")
    async with fleet() as there:
        await there.lend(base, shaky)
        folder = await borrowed(there.lenders())
        await there.lend(base, sound)
        assert await asyncio.to_thread(tensors, folder) == tensors(base)
    assert min(sound.begins) == 2 * BLOCK
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "said"), [("gone", "killed"), ("changed", "the checksum of model.safetensors at")]
)
async def test_without_another_lender_one_line_says_what_is_missing(
    base: Path, fault: str, said: str
) -> None:
    async with fleet() as there:
        await there.lend(base, ShakyLender(2, fault))
        folder = await borrowed(there.lenders())
        with pytest.raises(
            ModelError, match=rf"no member lends bytes \d+ to \d+ of model\.safetensors: .*{said}"
        ):
            await asyncio.to_thread(load, folder)


async def test_a_drafter_borrows_what_its_head_takes_of_the_base(base: Path, tmp_path: Path, capsys) -> None:
    head = write_head(tmp_path / "head", WIDE)
    async with fleet() as there:
        await there.lend(base)
        folder = await borrowed(there.lenders())
        given = DraftModelOptions(
            folder,
            dtype="fp32",
            kv_memory=1 << 20,
            draft_model=head,
            overrides=Overrides(aux_layers=(1, 2, 3)),
        )
        joining = await asyncio.to_thread(DraftLoader(given, "d").registration)
    assert joining.fingerprint == fingerprint(base)
    assert "what the drafter takes of its base" in capsys.readouterr().out


async def test_a_restart_finds_what_came_and_fetches_anew_what_changed(base: Path, cache: Path) -> None:
    async with fleet() as there:
        lender = ShakyLender(99, "")
        await there.lend(base, lender)
        await asyncio.to_thread(load, await borrowed(there.lenders()))
        lender.begins.clear()
        folder = await borrowed(there.lenders())
        await asyncio.to_thread(load, folder)
        assert lender.begins == []
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x07")
        folder = await borrowed(there.lenders())
        await asyncio.to_thread(load, folder)
        assert len(lender.begins) == 1
    assert folder.is_relative_to(cache)


async def test_a_gguf_file_is_lent_like_any_other(tmp_path: Path) -> None:
    lent = resolve_model(write_gguf(tmp_path / "tiny.gguf", write_model(tmp_path / "hf"), KINDS[:2]))
    async with fleet() as there:
        await there.lend(lent)
        folder = await borrowed(there.lenders())
        assert await asyncio.to_thread(tensors, folder) == tensors(lent)
        assert resolve_model(folder) == folder


async def test_another_model_is_refused_with_both_fingerprints(base: Path, tmp_path: Path) -> None:
    other = write_base(tmp_path / "other", WIDE, seed=9)
    async with fleet() as there:
        await there.lend(base)
        lenders = there.lenders()
        folder = await borrowed(lenders)
        await there.lend(other)
        with pytest.raises(
            Refused, match=f"another model now: fingerprint {fingerprint(other)}, here {fingerprint(base)}"
        ):
            await asyncio.to_thread(load, folder)
        lenders.fingerprint = "0123456789abcdef"
        there.master.fingerprint = "0123456789abcdef"
        with pytest.raises(Unavailable, match=r"another model: fingerprint \w+, asked for 0123456789abcdef"):
            await lenders.list_files()


async def test_strangers_are_lent_nothing(base: Path, authority: Authority) -> None:
    async with fleet(authority.issue("worker"), authority.issue("master")) as there:
        await there.lend(base)
        assert await borrowed(there.lenders(authority.issue("worker", into="mine")))
        stranger = there.lenders(authority.issue("client"))
        stranger.fingerprint = fingerprint(base)
        with pytest.raises(Unavailable, match="borrower shows a certificate for client"):
            await stranger.list_files()
        with pytest.raises(Unavailable):
            await there.lenders(authority.known).list_files()


async def test_it_waits_until_a_member_lends_weights(base: Path) -> None:
    async with fleet() as there:
        leaving = asyncio.Event()
        waiting = asyncio.create_task(borrow(there.lenders(), leaving))
        await asyncio.sleep(0)
        await there.lend(base)
        assert await waiting
        leaving.set()
        assert await borrow(there.lenders(), leaving) is None


async def test_only_files_of_the_model_are_lent(base: Path, tmp_path: Path) -> None:
    (base / "pytorch_model.bin").write_bytes(b"code")
    (base / "secret.txt").write_text("keep")
    assert set(lendable(base)) == {"config.json", "model.safetensors"}
    async with fleet() as there:
        await there.lend(base)
        lenders = there.lenders()
        await lenders.list_files()
        for name in ("secret.txt", "pytorch_model.bin", "../base/config.json"):
            with pytest.raises(NotFound, match="has no file"):
                await anext(lenders._blocks((await lenders.find())[0], name, 0, 1))


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("../x.safetensors", 1, False),
        ("x.bin", 1, False),
        ("/x.gguf", 1, False),
        ("x.json", 1, True),
        ("config.json", 1 << 40, True),
    ],
)
def test_what_a_lender_may_not_offer_is_refused(tmp_path: Path, name: str, size: int, text: bool) -> None:
    with pytest.raises(WireError):
        BorrowedModel(tmp_path / "m", "f", {name: LentFile(size, text)}, lambda *_: None)
    assert not (tmp_path / "m").exists()


def test_a_header_that_lies_takes_no_memory(tmp_path: Path) -> None:
    def read(name: str, begin: int, end: int, put: Any) -> None:
        put("liar", begin, (1 << 62).to_bytes(8, "little") + b"x" * (end - begin - 8))

    model = BorrowedModel(tmp_path / "m", "f", {"model.safetensors": LentFile(4000, False)}, read)
    register(model)
    with pytest.raises(ModelError, match="not a whole safetensors file"):
        WeightFiles(tmp_path / "m")
