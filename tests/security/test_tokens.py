"""Bearer tokens: where they come from, how they are compared, and that they may change."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import pytest

from specsot.errors import Forbidden, InvalidRequest, Unauthenticated
from specsot.transport import security as room
from specsot.transport.security import Tokens, first_token


def let_in(tokens: Tokens, header: str | None) -> bool:
    try:
        tokens.check(header)
    except Unauthenticated:
        return False
    return True


@pytest.mark.parametrize("header", ["Bearer one", "bearer two", "BEARER  two", "Bearer env"])
def test_known_tokens(tmp_path: Path, header: str) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\n\n  two \r\n")
    assert let_in(Tokens(file, "env"), header)


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "one",
        "Bearer",
        "Bearer ",
        "Bearer on",
        "Bearer onee",
        "Bearer one two",
        "Basic one",
        "Bearer é",
    ],
)
def test_everything_else(tmp_path: Path, header: str | None) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    assert not let_in(Tokens(file), header)


def test_tokens_change_while_the_endpoint_is_open(tmp_path: Path) -> None:
    """Added, taken away, broken, all gone: a file that says nothing lets nobody in."""
    file = tmp_path / "tokens"
    file.write_text("one\n")
    tokens = Tokens(file)
    for text, one, two in (("one\ntwo\n", True, True), ("two\n", False, True), ("a b\n", False, False)):
        file.write_text(text)
        assert (let_in(tokens, "Bearer one"), let_in(tokens, "Bearer two")) == (one, two), text
    file.write_text("one\n")
    assert let_in(tokens, "Bearer one")
    file.unlink()
    assert not let_in(tokens, "Bearer one")
    file.with_name("new").write_text("two\n")
    file.with_name("new").rename(file)
    assert let_in(tokens, "Bearer two")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "it has no token"),
        (b"\n \n", "it has no token"),
        (b"opensesame\nnot good\n", "token 2 cannot travel in a header"),
        ("schlüssel\n".encode(), "token 1 cannot travel in a header"),
        (b"x" * 5000, "token 1 cannot travel in a header"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"a\n" * 10_001, "it has too many tokens"),
        (None, "no such file or directory"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    file = tmp_path / "tokens"
    if content is not None:
        file.write_bytes(content)
    for read in (Tokens, first_token):
        with pytest.raises(InvalidRequest, match=complaint) as caught:
            read(file)
        assert "opensesame" not in str(caught.value)


def test_a_client_shows_the_first_one(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("\n one \ntwo\n")
    assert first_token(file) == "one"


def test_every_known_token_is_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first one matching is no reason to stop; digests are what is compared, all equally long."""
    compared: list[tuple[int, int]] = []

    def compare(shown: bytes, known: bytes) -> bool:
        compared.append((len(shown), len(known)))
        return hmac.compare_digest(shown, known)

    monkeypatch.setattr(room, "hmac", type("Hmac", (), {"compare_digest": staticmethod(compare)}))
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\nthree\n")
    assert let_in(Tokens(file), "Bearer one")
    assert compared == [(32, 32)] * 3


def test_no_part_of_a_token_is_stored_or_logged(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("opensesame\n")
    tokens = Tokens(file, "opensesame")
    assert "opensesame" not in repr(vars(tokens))
    with pytest.raises(Unauthenticated) as caught:
        tokens.check("Bearer opensesam")
    assert "opensesam" not in str(caught.value)


def test_an_administrators_token_is_marked_or_the_only_one(tmp_path: Path) -> None:
    file = tmp_path / "tokens"

    def administers(token: str) -> bool:
        tokens = Tokens(file)
        assert let_in(tokens, f"Bearer {token}")
        try:
            tokens.check_admin(f"Bearer {token}")
        except Forbidden:
            return False
        return True

    for text, one, two in (("one\ntwo\n", False, False), ("one\ntwo  admin\n", False, True)):
        file.write_text(text)
        assert (administers("one"), administers("two")) == (one, two), text
    file.write_text("one\n")
    assert administers("one")
    file.write_text("admin\n")
    assert administers("admin")
    file.write_text("two admin\none\n")
    assert first_token(file) == "two"
    assert not let_in(Tokens(file), "Bearer two admin")


def test_an_owner_is_known_by_no_token_and_no_digest_of_one(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("one\ntwo\n")
    tokens = Tokens(file)
    owners = [tokens.owner(f"Bearer {token}") for token in ("one", "two", "one")]
    assert owners[0] == owners[2] != owners[1]
    assert not {"one", hashlib.sha256(b"one").hexdigest()[:32]} & set(owners)
