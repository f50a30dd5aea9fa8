"""What travels over the endpoints: protos, bodies and answers in JSON, streams, metrics.

Answers are those of a master that answers; a field that comes and goes is seen by asking for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.contracts.promises import facts
from tests.golden.surface import descriptors, registries

WHAT = {"messages": [{"role": "user", "content": "What is it?"}], "specsot": {"mode": "direct"}}
LETTERS = {"messages": [{"role": "user", "content": "Tell me about letters."}], "seed": 5}
PLANNED = LETTERS | {"specsot": {"mode": "sot", "branches": True}}
LIKELY = {"logprobs": True, "top_logprobs": 2}
BILL = {"stream": True, "stream_options": {"include_usage": True}}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALLS: Mapping[str, tuple[str, dict[str, Any] | None]] = {
    "chat": (CHAT, WHAT),
    "chat, planned": (CHAT, PLANNED),
    "chat, with logprobs": (CHAT, WHAT | LIKELY),
    "chat, streamed": (CHAT, WHAT | BILL),
    "chat, streamed, planned": (CHAT, PLANNED | BILL),
    "chat, streamed, with logprobs": (CHAT, WHAT | LIKELY | BILL),
    "chat, refused": (CHAT, {"messages": []}),
    "completion": (TEXT, {"prompt": "What is it?"}),
    "completion, with logprobs": (TEXT, {"prompt": "What is it?", "logprobs": 2}),
    "completion, streamed": (TEXT, {"prompt": "What is it?"} | BILL),
    "generate": ("/generate", {"prompt": "What is it?", "enable_parallel": False}),
    "health": ("/health", None),
    "ping": ("/ping", None),
    "info": ("/info", None),
    "ring": ("/ring", None),
    "version": ("/version", None),
    "models": ("/v1/models", None),
    "one model": ("/v1/models/demo", None),
    "no such page": ("/nowhere", None),
}
WORDS = ("title", "description", "summary", "operationId", "tags", "example", "examples")  # for people


def protos() -> list[str]:
    """Every message, field, number and call."""
    return sorted(f"{name}: {what}" for name, what in facts(descriptors()).items())


async def http() -> dict[str, Any]:
    """What the HTTP endpoint takes and answers: as it says, and as it does."""
    from tests.http.house import served

    answers: dict[str, Any] = {}
    async with served() as house, house.client() as client:
        document = (await client.get("/openapi.json")).json()
        for name, (path, body) in CALLS.items():
            answer = await (client.get(path) if body is None else client.post(path, json=body))
            kind = answer.headers["content-type"].partition(";")[0]
            answers[name] = [f"{answer.status_code} {kind}", *shape(objects_of(answer.text, kind))]
        await house.quiet()
        figures = (await client.get("/metrics")).text
    return {"says": without_repetition(lines_of(document)), "answers": answers, "metrics": metrics(figures)}


def objects_of(text: str, kind: str) -> list[Any]:
    """One; of a stream, each."""
    if kind == "text/event-stream":
        told = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert told[-1] == "[DONE]"
        return [json.loads(one) for one in told[:-1]]
    return [json.loads(text)]


def shape(values: Iterable[Any]) -> list[str]:
    """Which keys there are, and of which types: "choices[].index: int"."""
    found: dict[str, set[str]] = {}
    for value in values:
        for path, kind in paths(value):
            found.setdefault(path, set()).add(kind)
    return [f"{path}: {' | '.join(sorted(kinds))}" for path, kinds in sorted(found.items())]


def paths(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    match value:
        case dict():
            yield path or ".", "object"
            for key, one in value.items():
                yield from paths(one, f"{path}.{key}" if path else key)
        case list():
            yield path, "list"
            for one in value:
                yield from paths(one, f"{path}[]")
        case _:
            yield path, type(value).__name__


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    """An OpenAPI document as facts, one a line, without its prose and the names of its schemas."""
    schemas = document["components"]["schemas"]

    def look(value: Any, path: str, within: tuple[str, ...]) -> Iterator[str]:
        match value:
            case {"$ref": str(name)}:
                name = name.rpartition("/")[2]
                yield from (
                    look(schemas[name], path, (*within, name)) if name not in within else [f"{path} ..."]
                )
            case dict():
                own = "properties" not in path.split(" ")[-1:]
                for key, one in value.items():
                    if not (own and key in WORDS and isinstance(one, str | list | int)):
                        yield from look(one, f"{path} {key}", within)
            case list():
                simple = [one for one in value if not isinstance(one, dict | list)]
                yield from [f"{path} = {sorted(map(str, simple))}"] if simple else []
                for one in value:
                    if isinstance(one, dict):
                        key = one.get("name", one.get("type", "") if "$ref" not in one else "")
                        yield from look(one, f"{path} [{key}]", within)
            case _:
                yield f"{path} = {value}"

    yield from look(document["paths"], "", ())


def without_repetition(lines: Iterable[str]) -> list[str]:
    """What every endpoint answers to what is wrong is said of the first one."""
    refused: set[str] = set()
    told: list[str] = []
    for line in sorted(set(lines)):
        _, kind, rest = line.partition(" responses 4XX" if " responses 4XX" in line else " responses 5XX")
        if kind + rest not in refused:
            told.append(line.strip())
        refused |= {kind + rest} if kind else set()
    return told


def metrics(page: str) -> list[str]:
    """Name, kind and labels of all that stands on a page in Prometheus' text format."""
    kinds: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(page):
        kinds[family.name] = family.type
        for sample in family.samples:
            labels.setdefault(family.name, set()).update(sample.labels)
    return [
        f"{name} {kind} {{{', '.join(sorted(labels.get(name, ())))}}}"
        for name, kind in sorted(kinds.items())
        if name.startswith("specsot")
    ]


def member_metrics() -> dict[str, list[str]]:
    from prometheus_client import generate_latest

    return {name: metrics(generate_latest(registry).decode()) for name, registry in registries().items()}
