"""Requests whose heads keep different rows: what is refused and why, what they are charged, the endpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specsot.checkpoint.config import read_heads, read_importance, write_heads
from specsot.core.frames import Open
from specsot.core.pages import max_held_pages
from specsot.errors import InvalidRequest, ModelError
from specsot.params import (
    MAX_TOKENS,
    Ask,
    HeadImportance,
    HeadPruning,
    HeadWindows,
    Limits,
    Pruning,
    Window,
)
from specsot_app.core.ask import ask_of
from specsot_master.core.ring.admission import answer_prefix, grant_answer, own_pages
from specsot_master.core.ring.ring_state import EngineConfig, RingState
from specsot_master.http.openai_requests import chat_asks
from specsot_master.http.openai_schemas import ChatBody
from specsot_model.core.kv_plan import policy_of
from tests.master.letters import DIRECT, SAYS
from tests.master.stage import Stage

RING = RingState(epoch=1, pages=400, page_rows=8, slots=3, max_positions=3000, rows=16)


def ask(**policy: Pruning | bool) -> Ask:
    return Ask(tokens=(1, 2, 3), mode="direct", limits=Limits(max_new_tokens=2000), **policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [{"pruning": Pruning()}, {"head_aware": True}], ids=str)
@pytest.mark.parametrize("mode", ["auto", "sot"])
def test_who_plans_is_refused_with_the_reason(mode: str, policy: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=f"got {mode}: branches fork their prefix") as refused:
        Ask(prompt="Why?", mode=mode, **policy)  # type: ignore[arg-type]
    assert refused.value.field == "mode"


@pytest.mark.parametrize("other", [{"pruning": Pruning()}, {"head_aware": True}], ids=str)
def test_a_window_goes_with_no_other_policy(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"window and {next(iter(other))} are given"):
        Ask(prompt="Why?", mode="direct", window=Window(), **other)


async def test_heads_prune_by_importance_where_both_are_asked_for() -> None:
    importance = HeadImportance(((0.0, 1.0),))
    config = EngineConfig(model="demo", heads=HeadWindows((((4, 64),) * 2,)), importance=importance)
    stage = Stage(SAYS, config=config)
    asked = replace(DIRECT, pruning=Pruning(0.7, 32, 1), head_aware=True)
    await stage.answer(asked)
    opened = [order.opening for order in stage.ring.orders if isinstance(order, Open)][-1]
    assert (opened.pruning, opened.importance, opened.heads) == (asked.pruning, importance, None)
    assert policy_of(opened) == HeadPruning(0.7, 32, 1, importance.layers)


async def test_pruning_by_an_importance_that_was_not_measured_is_refused() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", heads=HeadWindows((((4, 64),),))))
    with pytest.raises(InvalidRequest, match="no importance was measured of the heads") as refused:
        await stage.answer(replace(DIRECT, pruning=Pruning(), head_aware=True))
    assert refused.value.field == "head_aware"


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"keep_ratio": 0}, r"keep_ratio must be in \(0, 1\], got 0"),
        ({"keep_ratio": 1.5}, "keep_ratio"),
        ({"keep_ratio": float("nan")}, "keep_ratio"),
        ({"prune_every": 15}, r"prune_every must be whole, in \[16, 1048576\], got 15"),
        ({"skip_layers": -1}, "skip_layers"),
    ],
)
def test_impossible_numbers_are_refused(numbers: dict[str, float], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Pruning(**numbers)  # type: ignore[arg-type]


def test_only_what_no_layer_keeps_is_not_charged() -> None:
    most = max_held_pages(Pruning(0.5, 64, 0), RING.rows, RING.page_rows)
    assert grant_answer(3, ask(pruning=Pruning(0.5, 64, 0)), RING) == most
    for policy in (Pruning(0.5, 64, 2), Pruning(1, 64, 0)):
        assert grant_answer(3, ask(pruning=policy), RING) == own_pages(2003, 0, RING)
    assert grant_answer(3, ask(head_aware=True), RING) == own_pages(2003, 0, RING)
    with pytest.raises(InvalidRequest, match="context length is 3000"):
        grant_answer(1001, ask(pruning=Pruning(0.5, 64, 0)), RING)


@pytest.mark.parametrize("policy", [{"pruning": Pruning()}, {"head_aware": True}], ids=str)
def test_nothing_is_shared_with_other_requests(policy: dict[str, object]) -> None:
    assert answer_prefix(tuple(range(200)), ask(**policy), RING).tokens == ()  # type: ignore[arg-type]
    assert answer_prefix(tuple(range(200)), ask(), RING).tokens


async def test_the_ring_receives_the_policy() -> None:
    stage = Stage(SAYS)
    asked = replace(DIRECT, pruning=Pruning(0.7, 32, 1))
    await stage.answer(replace(asked, pruning=None))  # leaves a beginning that others could fork
    await stage.answer(asked)
    opened = [order.opening for order in stage.ring.orders if isinstance(order, Open)][-1]
    assert (opened.pruning, opened.fork) == (asked.pruning, None)


async def test_heads_that_were_not_measured_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="nothing was measured of the heads"):
        await Stage(SAYS).answer(replace(DIRECT, head_aware=True))


@pytest.mark.parametrize(
    "policy", [{"window": Window(4, 64)}, {"pruning": Pruning()}, {"head_aware": True}], ids=str
)
async def test_layers_that_read_every_row_refuse_them(policy: dict[str, Window | Pruning | bool]) -> None:
    measured = HeadWindows((((4, 64),),))
    stage = Stage(SAYS, config=EngineConfig(model="demo", allows_policies=False, heads=measured))
    with pytest.raises(InvalidRequest, match="gated delta layers"):
        await stage.answer(replace(DIRECT, **policy))  # type: ignore[arg-type]


async def test_layers_in_transformers_refuse_windows_alone() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", transformers=True))
    with pytest.raises(InvalidRequest, match="turns queries once only"):
        await stage.answer(replace(DIRECT, window=Window(4, 64)))
    await stage.answer(replace(DIRECT, pruning=Pruning()))


def test_endpoints_may_name_them() -> None:
    pruning = {"keep_ratio": 0.7, "skip_layers": 0}
    said = {"messages": [{"role": "user", "content": "Why?"}]}
    body = said | {"specsot": {"mode": "direct", "pruning": pruning}}
    assert chat_asks(ChatBody.model_validate(body), "direct", 2048)[0].pruning == Pruning(0.7, 50, 0)
    body = said | {"specsot": {"mode": "direct", "head_aware": True}}
    assert chat_asks(ChatBody.model_validate(body), "direct", 2048)[0].head_aware
    assert ask_of("Why?", mode="direct", prune_every=99).pruning == Pruning(0.8, 99, 2)


def test_heads_are_read_as_they_were_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    from specsot.checkpoint.config import read_config
    from tests.models import Shape, write_base

    config = read_config(base := write_base(tmp_path / "base", Shape(layers=2)))
    assert read_heads(base, config) is None
    heads = [{"class": "gathering", "sinks": 0, "recent": None}, {"class": "mixed", "sinks": 4, "recent": 64}]
    write_heads(base / "kv_heads.json", [heads, heads], {"tokens": 9})
    pairs = (0, MAX_TOKENS), (4, 64)
    assert read_heads(base, config) == HeadWindows((pairs, pairs))
    assert read_importance(base, config) is None
    measured = [{**head, "importance": 0.25} for head in heads]
    write_heads(base / "kv_heads.json", [measured, measured], {"tokens": 9})
    assert read_importance(base, config) == HeadImportance(((0.25, 0.25),) * 2)
    for broken in ([measured, heads], [measured, [{**head, "importance": 1.5} for head in heads]]):
        write_heads(base / "kv_heads.json", broken, {})
        with pytest.raises(ModelError, match="importance"):
            read_importance(base, config)
    write_heads(base / "kv_heads.json", [heads], {})
    with pytest.raises(ModelError, match="1 layers of 2 KV heads"):
        read_heads(base, config)
