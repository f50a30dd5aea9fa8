"""/generate, /health, /info with the fields they have always had; /ring, /version, the figures.

Scripts say what is written.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specsot.core.frames import Outcome, Result
from specsot.core.info import PagesInfo
from specsot.members import Head
from specsot_master.core.ring.ring_state import RingState
from tests.http.house import INFO, Served, served
from tests.master.letters import ANSWER, SAYS

pytestmark = pytest.mark.timeout(60)


async def test_generate(house: Served) -> None:
    answer = (await house.post("/generate", {"prompt": "What is it?", "enable_parallel": False})).json()
    assert set(answer) == {"text", "tokens", "time_ms", "mode", "stats"}
    assert (answer["text"], answer["mode"]) == (SAYS["What is"], "eagle")
    assert answer["tokens"] == len(house.stage.text.encode(answer["text"]))
    assert answer["time_ms"] == pytest.approx(answer["stats"]["seconds"] * 1000)
    assert answer["stats"]["finish_reason"] == "stop"


async def test_generate_plans_unless_another_mode_is_given(house: Served) -> None:
    answer = (await house.post("/generate", {"prompt": "Letters?"})).json()
    assert (answer["text"], answer["mode"]) == (ANSWER, "specsot")
    assert answer["tokens"] == len(house.stage.text.encode(ANSWER))
    skeleton = house.opened()[0]
    assert skeleton.plan is not None
    assert skeleton.plan.direct
    assert skeleton.sampling.top_p == 1.0


async def test_generates_fields_arrive(house: Served) -> None:
    body = {
        "prompt": "Count.",
        "max_new_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.75,
        "enable_parallel": False,
        "use_semantic_constraint": False,
    }
    answer = (await house.post("/generate", body)).json()
    assert (answer["tokens"], answer["stats"]["finish_reason"]) == (7, "length")
    sampling = house.opened()[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud83d"}, "prompt"),
        ({"prompt": "a", "top_p": 2}, "top_p"),
        ({"prompt": "a", "max_new_tokens": 0}, "max_new_tokens"),
        ({"prompt": "a", "max_new_tokens": "many"}, "max_new_tokens"),
        ({"prompt": "a", "enable_parallel": "yes"}, "enable_parallel"),
    ],
)
async def test_what_generate_refuses(house: Served, body: dict[str, object], param: str) -> None:
    import json

    async with house.client() as client:
        headers = {"content-type": "application/json"}
        answer = await client.post("/generate", content=json.dumps(body).encode(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_generates_limit_of_minus_1_is_none(house: Served) -> None:
    await house.post("/generate", {"prompt": "What is it?", "max_new_tokens": -1, "enable_parallel": False})
    assert house.opened()[0].limit == 512


SMALL_KV = RingState(epoch=1, pages=3, page_rows=64, slots=8, max_positions=2048)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": "What is it?"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is it?"}]}),
        ("/v1/completions", {"prompt": "What is it?"}),
        ("/v1/responses", {"input": "What is it?"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "What is it?"}], "max_tokens": 4096}),
    ],
)
async def test_every_endpoint_answers_within_little_kv_memory(path: str, body: dict[str, Any]) -> None:
    async with served({"What is": "word " * 400}, state=SMALL_KV) as house:
        house.standing.info = replace(house.standing.info, pages=PagesInfo(3, 3, 64))
        answer = await house.post(path, body)
        assert answer.status_code == 200, answer.text
        (opening,) = house.opened()
        assert opening.limit == 16 if path == "/v1/completions" else opening.limit < 3 * 64


async def test_health(house: Served) -> None:
    answer = await house.get("/health")
    assert answer.status_code == 200
    assert set(answer.json()) == {"status", "model_loaded", "gpu_memory_mb"}
    assert (answer.json()["status"], answer.json()["model_loaded"]) == ("healthy", True)
    assert answer.json()["gpu_memory_mb"] >= 0


async def test_health_without_a_ring_and_with_one_that_hangs(house: Served) -> None:
    house.standing.healthy = False
    answer = await house.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "stuck")
    house.standing.info = replace(INFO, ready=False)
    answer = await house.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "waiting")
    assert answer.json()["model_loaded"] is False


async def test_info(house: Served) -> None:
    answer = (await house.get("/info")).json()
    assert answer == {"base_model": "demo", "eagle_model": "d0", "use_eagle3": True, "max_seq_len": 2048}
    house.standing.head = Head((8,), 384)
    assert (await house.get("/info")).json()["use_eagle3"] is False
    house.standing.head = None
    house.standing.info = replace(INFO, members=INFO.members[:2])
    answer = (await house.get("/info")).json()
    assert (answer["eagle_model"], answer["use_eagle3"]) == (None, False)


async def test_the_ring_and_the_version(house: Served) -> None:
    told = (await house.get("/ring")).json()
    assert [member["kind"] for member in told["members"]] == ["worker", "worker", "drafter"]
    assert told["members"][1]["layers"] == {"first": 4, "last": 8}
    assert told["steps"]["stages"] == [0.012, 0.015]
    assert (await house.get("/version")).json() == {"version": INFO.version}


async def test_the_documents_are_there_and_fetch_nothing(house: Served) -> None:
    told = (await house.get("/openapi.json")).json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/generate"} <= set(told["paths"])
    assert (await house.get("/docs")).status_code == 404


async def figures(house: Served) -> dict[str, float]:
    """Every sample by name, labels but the usual ones in brackets."""
    answer = await house.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            more = [v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine", "le")]
            if "le" not in sample.labels:
                found[sample.name + (f"[{','.join(more)}]" if more else "")] = sample.value
                if sample.name.startswith("specsot:") and not sample.name.startswith("specsot:gpu"):
                    assert sample.labels["model_name"] == "demo"
                    assert sample.labels["engine"] == "0"
    return found


async def test_figures_of_requests(house: Served) -> None:
    await house.post("/generate", {"prompt": "Letters?"})
    await house.post("/generate", {"prompt": "Count.", "max_new_tokens": 7, "enable_parallel": False})
    await house.post("/generate", {"prompt": "a", "top_p": 5})
    await house.quiet()
    told = await figures(house)
    assert told["specsot:request_success_total[stop]"] == 1
    assert told["specsot:request_success_total[length]"] == 1
    assert told["specsot:time_to_first_token_seconds_count"] == 2
    assert told["specsot:e2e_request_latency_seconds_count"] == 2
    assert told["specsot:request_queue_time_seconds_count"] == 2
    assert told["specsot:inter_token_latency_seconds_count"] > 10
    assert told["specsot:sot_points_per_request_sum"] == 3
    assert told["specsot:request_generation_tokens_sum"] > 7
    assert told["specsot:prompt_tokens_total"] == told["specsot:prefix_cache_queries_total"] > 10
    assert told["specsot:generation_tokens_total"] == 25
    assert (told["specsot:num_requests_running"], told["specsot:num_requests_waiting"]) == (0, 0)
    assert told["specsot:sot_branch_active"] == 0
    assert told["specsot:kv_cache_usage_perc"] == pytest.approx(1 - 60 / 64)
    assert told["specsot:ring_ready"] == 1


async def test_figures_of_steps(house: Served) -> None:
    outcomes = (Outcome(1, 0, (), (5,)), Outcome(2, 1, (0, 2, 3), (5, 6, 7)), Outcome(3, 4, (0,), (9,)))
    house.metrics.on_result(Result(1, 1, outcomes, (0.1, 0.2), 9, drafts=1, drafted=4))
    told = await figures(house)
    assert told["specsot:steps_total"] == 10
    assert told["specsot:iteration_tokens_total_sum"] == 5
    assert told["specsot:spec_decode_num_drafts_total"] == 1
    assert told["specsot:spec_decode_num_draft_tokens_total"] == 4
    assert told["specsot:spec_decode_num_accepted_tokens_total"] == 2
    assert told["specsot:spec_decode_num_accepted_tokens_per_pos_total[0]"] == 1
    assert told["specsot:spec_decode_num_accepted_tokens_per_pos_total[1]"] == 1
    assert told["specsot:stage_seconds_sum[1]"] == pytest.approx(0.2)


async def test_a_failed_request_is_counted_too(house: Served) -> None:
    house.going.clear()
    asking = asyncio.create_task(house.post("/generate", {"prompt": "a"}, headers={"x-request-timeout": "5"}))
    await house.asked()
    house.stage.time.advance(1000)
    assert (await asking).status_code == 504
    house.going.set()
    assert (await figures(house))["specsot:request_failure_total[timed_out]"] == 1
