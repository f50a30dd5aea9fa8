"""What the demo model answers through whole fleets in this process: token ids, texts, plans, ends.

fp32, one thread: the same on every CPU but where two tokens are equally likely. How many steps it took, and
in
which company, is not recorded; that may differ from run to run.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from specsot import SpecSoT
from tests.golden.surface import main

QUESTION = "Give an overview of Stages of Sleep."
DIRECT: Mapping[str, Any] = {"mode": "direct", "max_new_tokens": 24}
PLANNED: Mapping[str, Any] = {"mode": "sot", "max_new_tokens": 128}
WARM: Mapping[str, Any] = {"temperature": 0.7, "seed": 11}
WINDOW: Mapping[str, Any] = {"sinks": 4, "recent": 16}
PRUNING: Mapping[str, Any] = {"keep_ratio": 0.5, "prune_every": 16, "skip_layers": 1}
ASKS: Mapping[str, Mapping[str, Any]] = {
    "direct": DIRECT,
    "direct, warm": {**DIRECT, **WARM},
    "planned": PLANNED,
    "direct, window": {**DIRECT, **WINDOW},
}
MORE: Mapping[str, Mapping[str, Any]] = {
    "planned, warm": {**PLANNED, **WARM},
    "direct, pruned": {**DIRECT, **PRUNING},
    "penalties": {
        **DIRECT,
        **WARM,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "top_k": 20,
        "top_p": 0.9,
    },
    "choice": {"mode": "direct", "choice": ["deep", "light"]},
    "regex": {"mode": "direct", "regex": "[a-z]{3,9} [0-9]{2}", "max_new_tokens": 24},
    "stop": {**DIRECT, "stop": "sleep"},
}
FLEETS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]] = {
    "plain": ({"drafter": "none"}, {**ASKS, **MORE}),
    "eagle": ({"drafter": "eagle"}, ASKS),
    "ngram, two stages, packed": ({"drafter": "ngram", "stages": 2, "layout": "packed"}, ASKS),
}


def replay(name: str) -> str:
    """What one fleet answers, a line a question."""
    options, asks = FLEETS[name]
    with SpecSoT.from_pretrained(demo="small", dtype="fp32", **options) as model:
        told = {asked: model.generate_sync(QUESTION, **how) for asked, how in asks.items()}
    return "".join(
        f"{asked}: {json.dumps(facts(answer), ensure_ascii=False)}\n" for asked, answer in told.items()
    )


def facts(answer: Any) -> dict[str, Any]:
    figures = answer.statistics
    return {
        "reason": answer.reason.value,
        "tokens": answer.tokens,
        "text": answer.text,
        "skeleton": answer.skeleton,
        "branches": [
            [one.point.title, one.tokens, one.reason and one.reason.value] for one in answer.branches
        ],
        "counted": [figures.mode, figures.prompt_tokens, figures.completion_tokens, figures.merged_tokens],
    }


def lines() -> str:
    """What `specsot infer --json` prints, each branch's text put together; without times and steps."""
    said = io.StringIO()
    words = [
        "infer",
        QUESTION,
        "--json",
        "--demo=small",
        "--mode=sot",
        "--max-new-tokens=128",
        "--dtype=fp32",
        "--seed=3",
        "--drafter=none",
    ]
    with redirect_stdout(said), redirect_stderr(io.StringIO()):
        assert main(words) == 0
    return "".join(
        f"{json.dumps(event, ensure_ascii=False)}\n" for event in joined(said.getvalue().splitlines())
    )


TOLD_APART = ("number", "request", "forecast")


def joined(printed: list[str]) -> Iterator[Any]:
    """Texts that came in pieces, whole, in order of their branches; then all that came once."""
    texts: dict[str, str] = {}
    rest: list[Any] = []
    for event in map(json.loads, printed):
        if "text" in event and event["event"] != "finished":
            name = f"{event['event']} {event.get('branch', '')} {' '.join(sorted(event))}"
            texts[name] = texts.get(name, "") + event["text"]
        else:
            rest.append({name: value for name, value in event.items() if name not in TOLD_APART})
    yield texts
    for event in sorted(rest, key=lambda event: (event["event"], event.get("branch", 0))):
        statistics = event.get("statistics", {})
        for name in statistics.keys() - {
            "mode",
            "prompt_tokens",
            "completion_tokens",
            "merged_tokens",
            "branches",
        }:
            statistics[name] = type(statistics[name]).__name__
        yield event
