"""Which constants of the tuner matter: `python -m tests.drafter.sensitivity`.

Each is halved and doubled while recorded laps of a real model are replayed. A row says by how much the
mean gain over plain decoding changes at most (two machines, one text and four), and how far the worst text
falls below plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from specsot_drafter.core import acceptance, cost_model, risk_budget, tree_budget
from tests.drafter.test_replay import gains

PLACES = [("bf16", "noisy", 1), ("int8", "noisy", 1), ("bf16", "noisy", 4), ("int8", "noisy", 4)]


def numbers(module: ModuleType) -> dict[str, Any]:
    """Constants in capitals that are a number, or several."""
    named = {name: value for name, value in vars(module).items() if name.isupper() and name[0] != "_"}
    return {name: value for name, value in named.items() if isinstance(scaled(value, 1), int | float | tuple)}


def scaled(value: Any, by: float) -> Any:
    if isinstance(value, tuple):
        return tuple(scaled(one, by) for one in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return max(round(value * by), 1) if isinstance(value, int) else value * by


@contextmanager
def instead(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    gains.cache_clear()
    try:
        yield
    finally:
        setattr(module, name, before)
        gains.cache_clear()


def means() -> tuple[list[float], float]:
    found = [gains("tuner", *place) for place in PLACES]
    return [sum(one) / len(one) for one in found], min(map(min, found))


def main() -> None:
    usual, least = means()
    print(f"as they are: {', '.join(f'{one:.3f}' for one in usual)}; least {least:.3f}")
    for module in (tree_budget, risk_budget, cost_model, acceptance):
        for name, value in numbers(module).items():
            told: list[str] = []
            for by in (0.5, 2.0):
                with instead(module, name, scaled(value, by)):
                    other, worst = means()
                change = max((one / was - 1 for one, was in zip(other, usual)), key=abs)
                told.append(f"x {by:g}: {100 * change:+.1f} %, least {worst:.3f}")
            print(f"{module.__name__.split('.')[-1]}.{name} = {value}: {'; '.join(told)}", flush=True)


if __name__ == "__main__":
    main()
