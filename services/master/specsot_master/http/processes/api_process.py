"""Serves the connections that the engine hands to one API process."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Final

from specsot.service.lifecycle import write_logs
from specsot.service.runtime_env import return_freed_memory, spare_collector
from specsot.tasks import start
from specsot.transport.security import PLAIN, Tls, Tokens
from specsot_master.http.app import build_guarded_app
from specsot_master.http.calls import HttpContext
from specsot_master.http.processes.link import EngineLink, open_link
from specsot_master.http.processes.messages import ConnectionEnded, Leave, ReadyToServe, ToApi, Welcome
from specsot_master.http.processes.remote_requests import RemoteRequests
from specsot_master.http.server import MAX_CONNECTIONS, HandedConnections
from specsot_master.prompts import Prompts
from specsot_master.text import Text

# Seconds for which responses may continue after the engine has ended, so that clients read why. Untuned.
ENGINE_ENDED_SECONDS: Final = 1.0


async def run(link: socket.socket, handover: socket.socket) -> None:
    """Run this process: write logs as the engine does, and serve connections until the engine orders this
    process to leave, or has ended.

    link: the connected socket of the link to the engine.
    handover: the connected socket over which the engine hands over accepted connections.

    Raises ModelError if the model's tokenizer cannot be read, and InvalidRequest for bad certificates.
    """
    process = ApiProcess()
    if welcome := await process.join(link):
        write_logs("master", welcome.log_format, welcome.log_level)
        server = process.open_server(welcome)
        return_freed_memory()
        spare_collector()
        await process.serve(server, handover)


class ApiProcess:
    """The state of an API process: its link to the engine, and what the engine has ordered."""

    def __init__(self) -> None:
        """Create a process whose link is not connected."""
        loop = asyncio.get_running_loop()
        self._link = EngineLink[ToApi](ToApi, self._handle, self._on_lost)
        self._requests: RemoteRequests | None = None
        # The options that the engine has sent; None if the engine has ended before.
        self._welcome: asyncio.Future[Welcome | None] = loop.create_future()
        # The seconds for which responses may continue; set once this process shall end.
        self._leaving: asyncio.Future[float] = loop.create_future()

    async def join(self, link: socket.socket) -> Welcome | None:
        """Connect to the engine, and return the options that it sends; None if the engine has ended before.

        link: the connected socket of the link to the engine.
        """
        await open_link(self._link, link)
        return await self._welcome

    async def serve(self, server: HandedConnections, handover: socket.socket) -> None:
        """Serve connections until the engine orders this process to leave, or has ended.

        server: what `open_server` returned.
        handover: the connected socket over which the engine hands over accepted connections.
        """
        self._link.send(ReadyToServe())
        taking = start(take_connections(handover, server))
        try:
            grace = await self._leaving
        finally:
            taking.cancel()
        await server.close(grace)
        self._link.close()

    def open_server(self, welcome: Welcome) -> HandedConnections:
        """Return the HTTP server of this process, which serves no connection yet.

        welcome: the options that the engine has sent.

        Raises ModelError if the model's tokenizer cannot be read, and InvalidRequest for bad certificates.
        """
        base = Path(welcome.base)
        model = welcome.model
        text = Text(base, welcome.vocabulary)
        prompts = Prompts(base, text, welcome.plan_style)
        self._requests = requests = RemoteRequests(self._link, prompts, model.max_positions)
        context = HttpContext(
            requests,
            model,
            text,
            state=requests.state,
            figures=requests.metrics,
            began=welcome.began,
            mode=welcome.mode,
            ping_every=welcome.ping_every,
        )
        token_file = Path(welcome.token_file) if welcome.token_file else None
        tokens = Tokens(token_file, welcome.token) if token_file or welcome.token else None
        certificate, key = welcome.certificate, welcome.key
        tls = Tls(cert=Path(certificate), key=Path(key)) if certificate and key else PLAIN
        share = welcome.num_processes
        app = build_guarded_app(context, tokens, welcome.names, welcome.origins, share)
        max_connections = -(-MAX_CONNECTIONS // share)
        return HandedConnections(app, tls, max_connections, lambda: self._link.send(ConnectionEnded()))

    def _handle(self, message: ToApi) -> None:
        """Handle a message of the engine: its options and its order to leave here, others by the requests.

        message: a message of the engine.
        """
        match message:
            case Welcome():
                self._welcome.set_result(message)
            case Leave(grace):
                self._leave(grace)
            case _ if self._requests is not None:
                self._requests.handle(message)
            case _:
                pass

    def _on_lost(self) -> None:
        """End, because the engine has ended; requests fail with a message that says so."""
        if self._requests is not None:
            self._requests.on_lost()
        if not self._welcome.done():
            self._welcome.set_result(None)
        self._leave(ENGINE_ENDED_SECONDS)

    def _leave(self, grace: float) -> None:
        """Order this process to end, unless it ends already.

        grace: seconds for which responses may continue.
        """
        if not self._leaving.done():
            self._leaving.set_result(grace)


async def take_connections(handover: socket.socket, server: HandedConnections) -> None:
    """Serve every connection that the engine hands over, until it hands over no more or this is cancelled.

    handover: the connected socket over which connections arrive, one with each byte.
    server: serves the connections.
    """
    handover.setblocking(False)
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    loop.add_reader(handover, arrived.set)
    try:
        while True:
            await arrived.wait()
            arrived.clear()
            # One at a time: further ones set the event again, because the socket stays readable.
            try:
                data, descriptors, _, _ = socket.recv_fds(handover, 1, 1)
            except BlockingIOError:
                continue
            if not data:
                return
            for number in descriptors:
                start(server.take(socket.socket(fileno=number)))
    finally:
        loop.remove_reader(handover)
