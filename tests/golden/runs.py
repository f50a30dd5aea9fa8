"""Recorded runs, a file each beside this one: what the product makes of the same inputs now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from tests.golden import transcripts

FOLDER = Path(__file__).parent / "runs"
PURE: Mapping[str, Callable[[], str]] = {
    f"master/{name}": lambda name=name: asyncio.run(transcripts.replay(name)) for name in transcripts.RUNS
}


def wire_again() -> str:
    from tests.golden.wire import again

    return again(file_of("wire/examples").read_text(encoding="utf-8"))


def wire_frames() -> str:
    from tests.golden.wire import frames

    return frames()


def answers_of(name: str) -> str:
    from tests.golden.answers import replay

    return replay(name)


def infer_lines() -> str:
    from tests.golden.answers import lines

    return lines()


HEAVY: Mapping[str, Callable[[], str]] = {
    "wire/examples": wire_again,
    "wire/frames": wire_frames,
    **{
        f"answers/{name}": partial(answers_of, name)
        for name in ("plain", "eagle", "ngram, two stages, packed")
    },
    "answers/infer --json": infer_lines,
}
RUNS = {**PURE, **HEAVY}


def file_of(name: str) -> Path:
    return FOLDER / f"{name.replace(', ', '-').replace(' --', '-').replace(' ', '-')}.txt"


def recorded(name: str) -> str:
    return file_of(name).read_text(encoding="utf-8")


def write(names: Iterable[str]) -> None:
    """What is recorded from now on. Examples of messages are drawn where there are none."""
    for name in names:
        file_of(name).parent.mkdir(parents=True, exist_ok=True)
        if name == "wire/examples" and not file_of(name).exists():
            from tests.golden.wire import draw

            file_of(name).write_text(draw(), encoding="utf-8")
        file_of(name).write_text(RUNS[name](), encoding="utf-8")
