"""Links between members that use TLS: messages, foreign certificates, and certificates that are renewed."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization as form

from specsot.core.frames import Drafts, Frame, Result
from specsot.errors import InvalidRequest, Refused, Unavailable
from specsot.members import Configuration, Range, Stage
from specsot.transport.grpc_channel import Terms
from specsot.transport.grpc_links import GrpcDialer
from specsot.transport.grpc_server import open_server
from specsot.transport.links import Inbox, Lost
from specsot.transport.security import PLAIN, Tls, context_of, read_pems
from specsot_worker.ring_links import may_send
from tests.security.members import listening
from tests.security.tls_files import Authority

pytestmark = pytest.mark.timeout(60)


async def test_frames_over_mutual_tls(authority: Authority) -> None:
    inbox, hidden = Inbox(), torch.arange(300_000.0).reshape(300, 1000)
    async with listening(authority.issue("worker"), inbox) as address:
        link = await GrpcDialer("here", tls=authority.issue("worker", into="other")).dial(address, 3)
        await link.send(Frame(3, 0, hidden=hidden))
        await link.send(Result(3, 0))
        await link.close()
        frame, result = [(await inbox.get()).message for _ in range(2)]
    assert torch.equal(frame.hidden, hidden)
    assert result == Result(3, 0)


async def test_who_is_dialed_is_checked_by_role(authority: Authority) -> None:
    dialer = GrpcDialer("here", tls=authority.issue("worker"))
    async with listening(authority.issue("drafter")) as address:
        with pytest.raises(Unavailable, match="its certificate is for another name"):
            await dialer.dial(address, 1)
        await (await dialer.dial(address, 1, "drafter")).close()


@pytest.mark.parametrize("names", [("master",), (), ("client",)])
async def test_who_dials_is_checked_by_role(authority: Authority, names: tuple[str, ...]) -> None:
    """A certificate of the fleet's CA alone opens nothing."""
    inbox = Inbox()
    async with listening(authority.issue("worker"), inbox) as address:
        with pytest.raises(Refused, match=r"here shows a certificate for .*; worker or drafter is needed"):
            await GrpcDialer("here", tls=authority.issue(*names, into="mine")).dial(address, 1)
    assert inbox.pop() is None


async def test_no_member_sends_messages_outside_its_role(authority: Authority) -> None:
    """A drafter may draft, and not pose as the stage before: the link ends, and both ends hear why."""
    inbox, own = Inbox(), Inbox()
    async with listening(authority.issue("worker"), inbox) as address:
        link = await GrpcDialer("mallory", own, tls=authority.issue("drafter")).dial(address, 1)
        await link.send(Drafts(1))
        await link.send(Frame(1, 0))
        assert (await inbox.get()).message == Drafts(1)
        lost = (await inbox.get()).message
        assert (lost.peer, lost.epoch) == ("mallory", 1)
        assert lost.reason == "mallory shows a certificate for drafter, localhost; worker is needed"
        assert isinstance((await own.get()).message, Lost)
        await link.close()
    assert inbox.pop() is None


async def test_no_peer_may_connect_as_the_master(authority: Authority) -> None:
    inbox = Inbox()
    async with listening(authority.issue("worker"), inbox) as address:
        with pytest.raises(Refused, match="a peer must not have the name master"):
            await GrpcDialer("master", tls=authority.issue("drafter")).dial(address, 1)
    assert inbox.pop() is None


async def test_a_drafter_in_a_workers_name_ends_nothing(authority: Authority) -> None:
    """What comes by its certificate is told with it, and a stage asks whether that may be."""
    inbox = Inbox()
    configuration = Configuration(
        1, "w1", (Stage("w0", "a", Range(0, 1)), Stage("w1", "b", Range(1, 2))), 4, 4, 4
    )
    async with listening(authority.issue("worker"), inbox) as address:
        for role, may in (("drafter", False), ("worker", True)):
            link = await GrpcDialer("w0", tls=authority.issue(role, into=role)).dial(address, 1)
            await link._wire.hang_up()
            arrival = await inbox.get()
            assert isinstance(arrival.message, Lost)
            assert may_send(configuration, arrival) is may


@pytest.mark.parametrize("how", ["in the clear", "without a certificate", "by another CA"])
async def test_a_peer_without_a_certificate_is_not_even_read(authority: Authority, how: str) -> None:
    other = Authority.at(authority.folder / "other").issue("worker")
    tls = {
        "in the clear": PLAIN,
        "without a certificate": authority.known,
        "by another CA": replace(other, ca=authority.file),
    }[how]
    inbox = Inbox()
    async with listening(authority.issue("worker"), inbox) as address:
        with pytest.raises(Unavailable, match="no process answers"):
            await GrpcDialer("here", tls=tls).dial(address, 1)
    assert inbox.pop() is None


async def test_certificates_are_renewed_in_service(authority: Authority) -> None:
    """Both sides get another CA while a link is up. It stays up, and the next link uses the new CA."""
    own, theirs = authority.issue("worker"), authority.issue("drafter")
    inbox = Inbox()
    async with listening(own, inbox) as address:
        old = await GrpcDialer("old", tls=theirs).dial(address, 1)
        successor = Authority.at(authority.folder / "next")
        for tls in (own, theirs):
            renew(tls, successor)
        new = await GrpcDialer("new", tls=theirs).dial(address, 1)
        for link, sender in ((old, "old"), (new, "new")):
            await link.send(Drafts(1))
            assert (await inbox.get()).sender == sender
            await link.close()


def renew(tls: Tls, authority: Authority) -> None:
    """New certificates of another authority in the places of the old ones."""
    name = tls.cert.stem if tls.cert else ""
    made = authority.issue(name)
    for path, fresh in zip(tls.paths, made.paths):
        fresh.rename(path)
    authority.ca.cert_pem.write_to_path(authority.file)


async def test_certificates_that_do_not_fit_are_not_taken(authority: Authority) -> None:
    """A certificate has come and its key has not: what was there before goes on, until both are there."""
    own, theirs = authority.issue("worker"), authority.issue("drafter")
    made = authority.issue("worker", into="next")
    assert own.cert
    assert own.key
    assert made.cert
    assert made.key
    dialer = GrpcDialer("here", tls=theirs)
    async with listening(own) as address:
        before = await certificate_at(address, theirs)
        made.cert.rename(own.cert)
        assert await certificate_at(address, theirs) == before
        await (await dialer.dial(address, 1)).close()
        made.key.rename(own.key)
        assert await certificate_at(address, theirs) != before
        await (await dialer.dial(address, 1)).close()


async def certificate_at(address: str, tls: Tls) -> bytes:
    """What an endpoint shows."""
    context = ssl.create_default_context(cafile=tls.ca)
    assert tls.cert
    context.load_cert_chain(tls.cert, tls.key)
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="worker")
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        ("ca missing", "ca.pem: no such file or directory"),
        ("ca empty", "ca.pem: no certificates in PEM"),
        ("cert missing", "worker.pem: no such file or directory"),
        ("cert nonsense", "not a certificate and its key in PEM"),
        ("key of another", "worker.key is not the key of .*worker.pem"),
        ("key encrypted", "worker.key: the key is encrypted"),
    ],
)
def test_files_that_are_not_what_they_should_be(authority: Authority, damage: str, complaint: str) -> None:
    tls = authority.issue("worker")
    assert tls.ca
    assert tls.cert
    assert tls.key
    match damage.split():
        case ["ca", "missing"]:
            tls.ca.unlink()
        case ["ca", _]:
            tls.ca.write_bytes(b"")
        case ["cert", "missing"]:
            tls.cert.unlink()
        case ["cert", _]:
            tls.cert.write_bytes(b"nonsense")
        case ["key", "encrypted"]:
            tls.key.write_bytes(encrypted(tls.key.read_bytes()))
        case _:
            other = authority.issue("drafter")
            assert other.key
            tls.key.write_bytes(other.key.read_bytes())
    for read in (context_of, read_pems):
        with pytest.raises(InvalidRequest, match=complaint) as caught:
            read(tls)
        assert "\n" not in str(caught.value)


def encrypted(key: bytes) -> bytes:
    loaded = form.load_pem_private_key(key, None)
    locked = form.BestAvailableEncryption(b"secret")
    return loaded.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked)


async def test_an_endpoint_does_not_open_with_bad_certificates(authority: Authority, tmp_path: Path) -> None:
    tls = authority.issue("worker")
    with pytest.raises(InvalidRequest, match="nowhere: no such file"):
        async with listening(replace(tls, cert=tmp_path / "nowhere")):
            raise AssertionError("it opened")


async def test_a_stranger_who_never_speaks_is_cut(authority: Authority) -> None:
    """A connection that does not begin a handshake is gone after a while."""
    endpoint = await open_server("127.0.0.1:0", {}, Terms(tls=authority.issue("worker"), handshake=0.2))
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    assert await asyncio.wait_for(reader.read(), 100) == b""
    writer.close()
    await endpoint.close(0)
