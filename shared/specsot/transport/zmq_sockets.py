"""The two ends of a link as ZMQ sockets: limits, heartbeats, keys, and news of the one connection.

One context a process; a socket serves one link and is never connected twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from specsot.errors import WireError
from specsot.tasks import start
from specsot.transport.grpc_options import HANDSHAKE, RING_BYTES, Keepalive

Socket = zmq.asyncio.Socket

MOST_WAITING = 16  # messages of at most 1 MiB in each end's own queue; more wait in the outbox
KEY_BYTES = 40  # a CURVE key, in Z85
FAILURES = (
    zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class Keys:
    """A CURVE key pair; made for one link, never written down."""

    public: bytes
    secret: bytes

    @classmethod
    def made(cls) -> Keys:
        return cls(*zmq.curve_keypair())


def checked_key(key: bytes) -> bytes:
    """A peer's public key. Raises WireError."""
    if len(key) != KEY_BYTES:
        raise WireError(f"a CURVE key has {KEY_BYTES} bytes, got {len(key)}")
    return key


class Guests:
    """Who may connect where: one key for each place. What libzmq asks before a handshake succeeds."""

    def __init__(self) -> None:
        self._keys: dict[str, bytes] = {}

    def admit(self, place: str, key: bytes) -> None:
        self._keys[place] = key

    def dismiss(self, place: str) -> None:
        self._keys.pop(place, None)

    def callback(self, domain: str, key: bytes) -> bool:
        """pyzmq's name for the question."""
        return self._keys.get(domain) == key


class Sockets:
    """Makes sockets. Nothing is started before the first one."""

    def __init__(self, keepalive: Keepalive | None = None, largest: int = RING_BYTES) -> None:
        self._keepalive, self._largest = keepalive or Keepalive(), largest
        self._context: zmq.asyncio.Context | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self.guests = Guests()

    def sending(self, own: Keys | None = None, there: bytes = b"") -> Socket:
        """own, there: CURVE keys; None where the operating system guards the way (ipc)."""
        socket = self._made(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, MOST_WAITING)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # what broke is lost: frames are never sent again
        if own:
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
            socket.setsockopt(zmq.CURVE_SERVERKEY, checked_key(there))
        return socket

    def receiving(self, place: str, own: Keys | None = None) -> Socket:
        """place: the name under which `guests` knows who may come, where keys are asked for at all."""
        socket = self._made(zmq.PULL)
        socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        if own:
            self._ask_guests(place)
            socket.setsockopt(zmq.ZAP_DOMAIN, place.encode())
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in while nobody could be asked
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
        return socket

    def forget(self, place: str) -> None:
        self.guests.dismiss(place)
        if self._authenticator:
            self._authenticator.credentials_providers.pop(place, None)

    def close(self) -> None:
        """Whatever is still open."""
        if self._authenticator:
            self._authenticator.stop()
        if self._context:
            self._context.destroy(linger=0)
        self._authenticator = self._context = None

    def _made(self, kind: int) -> Socket:
        """Both ends ask for signs of life; silence ends the connection."""
        if self._context is None:
            self._context = zmq.asyncio.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, self._largest)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE * 1000))
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._keepalive.every * 1000))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._keepalive.patience * 1000))
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _ask_guests(self, place: str) -> None:
        if self._authenticator is None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
        self._authenticator.configure_curve_callback(place, self.guests)


class SocketEvents:
    """News of a socket's connection. Over TCP strangers may knock at a receiving end: `only` names ours.

    up: it stands. down: it does not any more, or never will. Of a receiving end, only ends behind `up` count:
    before that descriptors of strangers end, whose numbers ours may get, and other failures tell none.
    """

    def __init__(self, socket: Socket, sending: bool) -> None:
        self._socket, self._ours = socket, None if sending else -1
        self.up, self.down = asyncio.Event(), asyncio.Event()
        self._ended: set[int] = set()
        monitor = socket.get_monitor_socket(FAILURES | zmq.Event.HANDSHAKE_SUCCEEDED)
        self._following = start(self._follow(monitor), lambda _: self.down.set())

    def only(self, descriptor: int) -> None:
        """The file descriptor of the connection that counts."""
        self._ours = descriptor
        if descriptor in self._ended:
            self.down.set()

    def close(self) -> None:
        """The socket too; what it has not sent is gone."""
        self._following.cancel()
        self.down.set()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=0)

    async def _follow(self, monitor: Socket) -> None:
        while True:
            news = recv_monitor_message(monitor)
            assert isinstance(news, Awaitable)
            message = await news
            if message["event"] == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.up.set()
            elif self._ours is None:
                self.down.set()
            elif message["event"] == zmq.Event.DISCONNECTED and self.up.is_set():
                self._end(int(message["value"]))

    def _end(self, descriptor: int) -> None:
        self._ended.add(descriptor)
        if descriptor == self._ours:
            self.down.set()


def event_in_words(error: zmq.ZMQError) -> str:
    return os.strerror(error.errno).lower() if error.errno else str(error)
