"""Members lend each other the model's files over gRPC: the serving and the fetching side."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import structlog

from specsot.checkpoint import borrowed
from specsot.checkpoint.cache import cache_folder, remove_unused
from specsot.errors import InvalidRequest, ModelError, NotFound, Refused, SpecsotError, Unavailable, WireError
from specsot.members import MASTER
from specsot.tasks import FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, wait_until
from specsot.transport.grpc_channel import reach
from specsot.transport.grpc_status import peer_errors
from specsot.transport.link_ends import check_hello, hello_of
from specsot.transport.security import PLAIN, Tls
from specsot.v1 import fleet_pb2, fleet_pb2_grpc, models_pb2, models_pb2_grpc

log = structlog.get_logger()

# The service by which members lend files to each other.
MODELS_SERVICE = "specsot.v1.Models"
# Seconds without a byte from any lender after which loading a range of a file fails. Untuned.
LENDER_TIMEOUT_SECONDS = 15.0

_Context = grpc.aio.ServicerContext[Any, Any]


class LendingService(models_pb2_grpc.ModelsServicer):
    """The serving side of lending: lends the files of a directory once `open` has named the directory.

    name: name of this member, for error messages.
    """

    def __init__(self, name: str = "") -> None:
        """Create the service, which has nothing to lend yet.

        name: name of this member, for error messages.

        Until `open` names a directory, all calls raise Unavailable.
        """
        self.name = name
        self._directory: Path | None = None
        self._fingerprint = ""
        self._files: Mapping[str, Path] = {}

    def attach(self, server: grpc.aio.Server) -> None:
        """Serve the calls of `specsot.v1.Models` on a server that was not started yet.

        server: the server.
        """
        models_pb2_grpc.add_ModelsServicer_to_server(self, server)

    def open(self, directory: Path, fingerprint: str) -> None:
        """Lend the files of a directory from now on, in the place of an earlier one.

        directory: the model's directory.
        fingerprint: fingerprint of the model in the directory, see `specsot.checkpoint.fingerprint`.
        """
        self._directory = directory
        self._fingerprint = fingerprint

    async def ListFiles(
        self, request: models_pb2.ListFilesRequest, context: _Context
    ) -> models_pb2.ListFilesResponse:
        """Return the names and sizes of the files that can be fetched.

        request: the caller's hello, and the fingerprint of the model that it needs.
        context: context of the call.

        Raises Refused for a caller that is no member and for another model, Unavailable before `open`.

        The directory is read anew at each call. Files of text that the caller fetches whole are marked as
        such; the others are weights.
        """
        self._check(request, context)
        await self._list_directory()
        listed = [
            models_pb2.ModelFile(name=name, size=path.stat().st_size, text=name in borrowed.LENT_TEXTS)
            for name, path in self._files.items()
        ]
        return models_pb2.ListFilesResponse(files=listed)

    async def ReadFile(
        self, request: models_pb2.ReadFileRequest, context: _Context
    ) -> AsyncGenerator[models_pb2.ReadFileResponse]:
        """Yield the bytes begin .. end - 1 of a file in blocks, each with its checksum.

        request: the caller's hello, the model's fingerprint, the file's name and the range of bytes.
        context: context of the call.

        Raises NotFound if there is no such file, InvalidRequest if the file does not have these bytes.

        Raises Refused for a caller that is no member and for another model, and Unavailable before `open`.
        Each block has borrowed.BLOCK bytes, except the last one. An empty range has no bytes, so that it
        raises InvalidRequest.
        """
        self._check(request, context)
        if request.name not in self._files:
            # The file may have been created since the directory was read.
            await self._list_directory()
        path = self._files.get(request.name)
        if path is None:
            raise NotFound(f"{self.name} has no file {request.name[:80]!r}")
        if not request.begin < request.end <= path.stat().st_size:
            raise InvalidRequest(f"{request.name} has no bytes {request.begin} to {request.end}")
        with path.open("rb") as file:
            file.seek(request.begin)
            for begin in range(request.begin, request.end, borrowed.BLOCK):
                data = await asyncio.to_thread(file.read, min(borrowed.BLOCK, request.end - begin))
                digest = hashlib.sha256(data).digest()
                yield models_pb2.ReadFileResponse(begin=begin, data=data, digest=digest)

    def _check(
        self, request: models_pb2.ListFilesRequest | models_pb2.ReadFileRequest, context: _Context
    ) -> None:
        """Raise an error unless the caller is a member and needs the model that this member lends; otherwise
        return None.

        request: the request of either call.
        context: context of the call.

        Raises Refused for a peer that is no member and for another model, Unavailable before `open`.
        """
        check_hello(request.hello, context)
        if self._directory is None:
            raise Unavailable(f"{self.name} has no files to lend")
        if request.fingerprint != self._fingerprint:
            raise Refused(
                f"{self.name} has another model: fingerprint {self._fingerprint}, "
                f"asked for {request.fingerprint[:80]}"
            )

    async def _list_directory(self) -> None:
        """Read the directory anew, because files may have been fetched since.

        Must be called after `open`. Raises ModelError if an index or pointer file is broken.
        """
        assert self._directory is not None
        self._files = await asyncio.to_thread(borrowed.lendable, self._directory)


class Lenders:
    """The fetching side of lending: reads files from any of the members that the master names as lenders.

    fingerprint: fingerprint of the fleet's model. Empty until a lender was found.
    """

    def __init__(
        self, name: str, master: str, tls: Tls = PLAIN, timeout_seconds: float = LENDER_TIMEOUT_SECONDS
    ) -> None:
        """Create the fetching side, which asks no member yet.

        Must be created on the event loop that serves `read`, which is called on another thread.

        name: name of this member.
        master: address of the master.
        tls: the TLS files of this member.
        timeout_seconds: seconds without a byte from any lender after which `read` fails.
        """
        self._hello = hello_of(name, 0)
        self._master = master
        self._tls = tls
        self._timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self.fingerprint = ""

    async def find(self) -> list[str]:
        """Return the addresses of the members that lend the fleet's model; empty if there are none yet.

        Raises Unavailable if the master cannot be reached, Refused if the fleet's model has changed.

        The first answer with addresses sets `fingerprint`, with which later answers are compared. An answer
        without addresses is not compared. Raises the master's errors otherwise.
        """
        async with self._stub(self._master, MASTER, fleet_pb2_grpc.FleetStub) as fleet:
            lenders = await fleet.ListLenders(fleet_pb2.ListLendersRequest(name=self._hello.sender))
        if lenders.addresses and not self.fingerprint:
            self.fingerprint = lenders.fingerprint
        if lenders.addresses and lenders.fingerprint != self.fingerprint:
            raise Refused(
                f"the fleet has another model now: fingerprint {lenders.fingerprint}, here {self.fingerprint}"
            )
        return list(lenders.addresses)

    async def list_files(self) -> dict[str, borrowed.LentFile]:
        """Return the files of all lenders together, by name, because lenders may have different files.

        If several lenders have a file, the entry of the first one is returned. A lender that fails or lists
        invalid files is left out.

        Raises Unavailable, with the last lender's error, if no lender has any, and what `find` raises.
        """
        files: dict[str, borrowed.LentFile] = {}
        reason = "no member has files of the model yet"
        for address in await self.find():
            try:
                async with self._stub(address, "worker", models_pb2_grpc.ModelsStub) as models:
                    request = models_pb2.ListFilesRequest(hello=self._hello, fingerprint=self.fingerprint)
                    response = await models.ListFiles(request, timeout=30)
                found = {one.name: borrowed.LentFile(one.size, one.text) for one in response.files}
                borrowed.check_files(found)
                files = found | files
            except SpecsotError as error:
                reason = f"{address}: {error}"
        if not files:
            raise Unavailable(reason)
        return files

    def read(self, name: str, begin: int, end: int, store_block: borrowed.Put) -> None:
        """Read a range of a file, and pass its blocks on in order; blocks until all have arrived.

        Must not be called on the event loop's thread.

        name: name of the file, as `list_files` returns it.
        begin: the first byte.
        end: the byte after the last one.
        store_block: called with (address of the lender, place of the block in the file, the block).

        Raises ModelError if no lender has the bytes.
        """
        asyncio.run_coroutine_threadsafe(self._read(name, begin, end, store_block), self._loop).result()

    async def _read(self, name: str, begin: int, end: int, store_block: borrowed.Put) -> None:
        """Read from one lender after another; each continues where the one before it failed.

        name: name of the file.
        begin: the first byte.
        end: the byte after the last one.
        store_block: called with (address of the lender, place of the block in the file, the block).

        Raises ModelError if no lender delivered a byte for `timeout_seconds`, and if `store_block` raises it.

        Returns once all bytes were stored; does nothing if `begin` is not less than `end`. Attempts without
        any byte are repeated after FIRST_RETRY_SECONDS, then twice as long each time, at most
        MAX_RETRY_SECONDS. Raises Refused if the fleet's model has changed.
        """
        reason = "there is none"
        wait = FIRST_RETRY_SECONDS
        last_received = time.monotonic()
        while begin < end:
            reached = begin
            try:
                addresses = await self.find()
            except Unavailable as error:
                addresses = []
                reason = str(error)
            for address in addresses:
                try:
                    async with aclosing(self._blocks(address, name, begin, end)) as blocks:
                        async for data in blocks:
                            store_block(address, begin, data)
                            begin += len(data)
                    break
                except ModelError:
                    raise
                except SpecsotError as error:
                    reason = f"{address}: {error}"
                    log.warning("lender failed", file=name, at=begin, reason=reason)
            if begin > reached:
                last_received = time.monotonic()
                wait = FIRST_RETRY_SECONDS
            elif time.monotonic() - last_received > self._timeout_seconds:
                raise ModelError(f"no member lends bytes {begin} to {end} of {name}: {reason}")
            if begin < end:
                await asyncio.sleep(wait)
                wait = min(2 * wait, MAX_RETRY_SECONDS)

    async def _blocks(self, address: str, name: str, begin: int, end: int) -> AsyncGenerator[bytes]:
        """Yield blocks of a file from one lender, in order.

        address: the lender's address.
        name: name of the file.
        begin: the first byte.
        end: the byte after the last one.

        Raises WireError if a block has the wrong place, size or checksum, and the errors of the lender.

        Blocks have borrowed.BLOCK bytes, except the last one. A file that ends before `end` raises WireError
        too, after its blocks were yielded.
        """
        request = models_pb2.ReadFileRequest(
            hello=self._hello, fingerprint=self.fingerprint, name=name, begin=begin, end=end
        )
        async with self._stub(address, "worker", models_pb2_grpc.ModelsStub) as models:
            async for block in models.ReadFile(request):
                size = min(borrowed.BLOCK, end - begin)
                if (block.begin, len(block.data)) != (begin, size):
                    raise WireError(f"{len(block.data)} bytes at {block.begin}, expected {size} at {begin}")
                if hashlib.sha256(block.data).digest() != block.digest:
                    raise WireError(f"the checksum of {name} at {begin} is wrong")
                yield block.data
                begin += size
        if begin < end:
            raise WireError(f"{name} ended at {begin}, not {end}")

    @asynccontextmanager
    async def _stub(self, address: str, role: str, stub: Any) -> AsyncGenerator[Any]:
        """Return a context manager with a stub that is connected to a member; errors of the peer are raised
        as such.

        address: the member's address, host:port or unix:path.
        role: what the member's certificate must say that it is.
        stub: the class of the stub.

        Raises Unavailable if the member cannot be reached. The channel is closed at the end of the context.
        """
        channel = await reach(address, largest=4 * borrowed.BLOCK, tls=self._tls, name=role)
        try:
            with peer_errors():
                yield stub(channel)
        finally:
            await channel.close()


async def borrow(lenders: Lenders, leaving: asyncio.Event) -> Path | None:
    """Return the directory of the fleet's model, fetched from other members.

    The directory has the model's text files; its weights are fetched when they are read. Waits until a member
    lends files. Returns None if `leaving` is set before that.

    lenders: the fetching side, whose `fingerprint` names the directory afterwards.
    leaving: set once this process must end.

    Raises Refused if the fleet's model changes meanwhile, and ModelError if the files are invalid or cannot
    be fetched.

    Directories of other models that were not used for long are deleted first. The model is registered in this
    process, so that reading its files fetches them.
    """
    wait = FIRST_RETRY_SECONDS
    while not leaving.is_set():
        try:
            files = await lenders.list_files()
        except Unavailable as error:
            log.info("waiting for a member that has the model", reason=str(error), again_in=wait)
            await wait_until(leaving, wait)
            wait = min(2 * wait, MAX_RETRY_SECONDS)
            continue
        folder = cache_folder() / "members" / lenders.fingerprint
        model = borrowed.BorrowedModel(folder, lenders.fingerprint, files, lenders.read)
        await asyncio.to_thread(remove_unused, folder.parent, time.time())
        await asyncio.to_thread(model.need_texts)
        borrowed.register(model)
        return folder
    return None
