"""`specsot bench load --hostile`: attacks reach the doors they are meant for, and what they cost is judged.

A conductor on a fake ring stands behind real doors.
"""

from __future__ import annotations

import pytest

from specsot_app.cli import main
from specsot_lab.bench.attacks import KINDS, SLOW, Target, attack, attacks, nested
from specsot_lab.bench.clients import LoadLevel, RequestTimes
from specsot_lab.bench.hostile import AttackResult, page_of
from tests.doors.front import front
from tests.http.house import served

pytestmark = pytest.mark.timeout(60)

ANYTHING = {"": "It is so."}
CAME = {
    "ids": {"http 413"},
    "text": {"http 400"},
    "forms": {"http 400", "http 200"},
    "garbage": {"closed", "ConnectionResetError"},
    "cancels": {"answered"},
    "grpc-ids": {"invalid_argument"},
    "others": {"not_found", "invalid_argument"},
    "probe": {"answered"},
}


@pytest.mark.parametrize("kind", CAME)
async def test_an_attack_reaches_its_door(kind: str) -> None:
    async with front(ANYTHING) as grpc_door, served(ANYTHING) as http_door:
        target = Target(grpc_door.address, http_door.url.removeprefix("http://").rstrip("/"))
        await attack(kind, target, 2)
    assert sum(target.came.values()) == 2
    assert set(target.came) <= CAME[kind]


async def test_slow_clients_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsot_lab.bench.attacks.SLOW", 0.0)
    assert SLOW > 0
    async with served() as http_door:
        target = Target("", http_door.url.removeprefix("http://").rstrip("/"))
        for kind in ("slow-heads", "slow-bodies", "unread"):
            await attack(kind, target, 1)
    assert target.came == {"still open": 2, "left": 1}


def test_every_kind_is_tried() -> None:
    assert {*KINDS, "probe"} == set(attacks()) == {*CAME, "slow-heads", "slow-bodies", "unread"}


def test_forms_are_new_each_time() -> None:
    import random

    assert nested(random.Random(1), 3) != nested(random.Random(2), 3)


def level(between: float, error: str | None = None) -> LoadLevel:
    texts = (1.0, 1.0 + between, 1.0 + 2 * between)
    return LoadLevel(16, 3.0, (RequestTimes(0.5, 4.0, texts, 3), RequestTimes(0.5, 4.0, texts, 3, error)))


@pytest.mark.parametrize(
    ("one", "holds"),
    [
        (level(0.29), True),
        (level(0.31), False),
        (level(0.1, "Unavailable"), False),
    ],
)
def test_a_client_may_wait_three_times_as_long_and_have_no_error(one: LoadLevel, holds: bool) -> None:
    under = AttackResult("ids", (level(0.1), level(0.1)), one, {"attempts": 7}, {"longest": 0.25}, 0)
    assert under.holds is holds
    shown = page_of([under.row()])
    assert "| ids " in shown
    assert ("NO" in shown) is not holds


def test_another_ring_is_a_failure() -> None:
    assert not AttackResult("ids", (level(0.1), level(0.1)), level(0.1), {}, {}, 1).holds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hostile", "ids,bombs"], "no attack is called bombs"),
        (["--hostile", "all", "--master", "127.0.0.1:1"], "only against a fleet that is started here"),
    ],
)
def test_what_cannot_be_attacked_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "load", *arguments]) == 2
    assert said in capsys.readouterr().err
