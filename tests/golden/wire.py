"""Bytes of messages: what was sent once is read and sent again as it was; what a sequencer sends is the same.

The examples were drawn from `tests/wire/strategies` when they were recorded, and are only read since.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specsot.core.frames import Close, Fork
from tests.golden.surface import carried, readers
from tests.worker.test_sequencer import VOCABULARY, order_of, ring_of

EXAMPLES = 12  # of each kind


def again(recorded: str) -> str:
    """Each line's bytes, read and written once more. A message in several parts is one line."""
    read: Mapping[str, Callable[[list[bytes]], list[bytes]]] = readers()
    lines = (line.split() for line in recorded.splitlines())
    return "".join(f"{kind} {shown(read[kind]([*map(seen, parts)]))}\n" for kind, *parts in lines)


def shown(parts: list[bytes]) -> str:
    return " ".join(part.hex() or "-" for part in parts)


def seen(written: str) -> bytes:
    return b"" if written == "-" else bytes.fromhex(written)


def draw() -> str:
    """Examples for the record."""
    from tests.golden.surface import writers
    from tests.wire.strategies import answers, asking, fleet, ring

    kinds = {
        "carry": ring.carried, "up": fleet.upward, "down": fleet.downward, "event": answers.numbered,
        "ask": asking.asks, "info": answers.infos,
    }  # fmt: skip
    lines: list[str] = []
    for number, (kind, strategy) in enumerate(kinds.items()):
        found = drawn(strategy, number)
        written = {shown(writers()[kind](value)) for value in found}
        fitting = sorted((one for one in written if len(one) < 4000), key=lambda one: (len(one), one))
        lines += [f"{kind} {one}" for one in fitting[:: max(len(fitting) // EXAMPLES, 1)]]
    return "\n".join(lines) + "\n"


def drawn(strategy: Any, number: int) -> list[Any]:
    from hypothesis import HealthCheck, Phase, given, seed, settings

    found: list[Any] = []

    @settings(
        max_examples=200, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @seed(number)
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


def frames() -> str:
    """Headers of the frames that a sequencer sends, with drafts that are right now and then."""
    return "".join(f"{frame}\n" for seed in (1, 2, 3) for frame in _frames_of(seed))


def _frames_of(seed: int) -> Iterator[str]:
    chance = random.Random(seed)
    ring = ring_of(chance, flight=seed, rows=17)
    prefix = [chance.randrange(VOCABULARY) for _ in range(12)]
    ring.sequencer.apply_order(order_of(1, prefix, 1, decodes=False))
    for sequence in range(2, 5):
        suffix = [chance.randrange(VOCABULARY) for _ in range(5)]
        ring.sequencer.apply_order(
            order_of(sequence, suffix, 6 * sequence, Fork(1, len(prefix)), drafted=sequence > 2)
        )
    turns = 0
    while ring.turn():
        turns += 1
        if turns == 15:
            ring.sequencer.apply_order(Close(4))
    for frame in ring.frames:
        yield shown(carried(frame))
