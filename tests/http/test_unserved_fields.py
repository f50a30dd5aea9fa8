"""Fields of other servers that would change an answer: refused by name, unless their values are idle."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from specsot_master.http.unserved_fields import FOREIGN, UNSERVED, WINDOWS_OF_PENALTIES
from tests.http.house import Served, served

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

TURNS = [{"role": "user", "content": "What is it?"}]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS},
    PLAIN: {"prompt": "What is it?"},
    RESPONSES: {"input": "What is it?"},
    MESSAGES: {"messages": TURNS, "max_tokens": 9},
}
# Fields of vLLM, llama.cpp, SGLang and Ollama with values that would change the answer.
ACTIVE: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["no"],
    "dry_multiplier": 0.8,
    "dynatemp_range": 0.5,
    "grammar": 'root ::= "yes"',
    "guided_decoding_backend": "xgrammar",
    "guided_json_schema": {},
    "guided_of_a_later_version": "x",
    "length_penalty": 0.5,
    "lora": [{"id": 0, "scale": 1}],
    "min_new_tokens": 5,
    "mirostat": 2,
    "no_repeat_ngram_size": 3,
    "options": {"temperature": 0},
    "stop_regex": "a+",
    "t_max_predict_ms": 100,
    "tfs_z": 0.9,
    "top_n_sigma": 1.0,
    "typical_p": 0.9,
    "use_beam_search": True,
    "xtc_probability": 0.5,
}
# Fields that other endpoints or other systems have under these names, and that chat completions lack.
ELSEWHERE: dict[str, Any] = {
    "enable_thinking": True,
    "instructions": "Speak French.",
    "json_mode": True,
    "max_output_tokens": 3,
    "max_length": 3,
    "num_return_sequences": 2,
    "output_format": {"type": "json_schema", "schema": {}},
    "random_seed": 7,
    "reasoning": {"effort": "high"},
    "safe_prompt": True,
    "sampler_seed": 7,
    "stop_sequences": ["x"],
    "suppress_tokens": [5],
    "system": "Speak French.",
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "enabled"},
    "thinking_budget": 5,
}
# Those of them that are fields of an endpoint of ours.
OWN: dict[str, Any] = {
    CHAT: (),
    PLAIN: (),
    RESPONSES: ("instructions", "max_output_tokens", "reasoning", "text"),
    MESSAGES: ("output_format", "stop_sequences", "system", "thinking"),
}
# Fields that chat completions serve, and that Responses and Messages do not have.
SERVED_BY_CHAT: dict[str, Any] = {
    "frequency_penalty": 1.0,
    "logit_bias": {"1": 5},
    "min_p": 0.5,
    "n": 2,
    "presence_penalty": 1.0,
    "repetition_penalty": 1.5,
    "seed": 7,
    "stop_token_ids": [1],
}


@pytest_asyncio.fixture(loop_scope="module")
async def house(shared_house: Served) -> Served:
    return shared_house


@pytest.mark.parametrize("path", BODIES)
async def test_fields_that_would_change_the_answer_are_refused_by_name(house: Served, path: str) -> None:
    foreign = SERVED_BY_CHAT if path in (RESPONSES, MESSAGES) else {}
    elsewhere = {name: value for name, value in ELSEWHERE.items() if name not in OWN[path]}
    for name, value in (ACTIVE | foreign | elsewhere).items():
        answer = await house.post(path, {**BODIES[path], name: value})
        assert answer.status_code == 400, name
        error = answer.json()["error"]
        assert (error["param"], f"{name} is not supported" in error["message"]) == (name, True)
    assert house.opened() == []


@pytest.mark.parametrize("path", BODIES)
async def test_a_window_of_penalties_is_refused_if_a_penalty_is_set(house: Served, path: str) -> None:
    for name in WINDOWS_OF_PENALTIES:
        for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            answer = await house.post(path, {**BODIES[path], name: 64, penalty: 1.5})
            assert answer.status_code == 400, name
            expected = penalty if path in (RESPONSES, MESSAGES) else name
            assert answer.json()["error"]["param"] == expected


# What SillyTavern, koboldcpp's and llama.cpp's own pages send with every request: all samplers are off.
IDLE = {
    **{name: idle[0] for name, idle in UNSERVED.items() if idle},
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_sequence_breakers": ["\n"],
    "dynatemp_exponent": 1,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "n_keep": 0,
    "repeat_last_n": 64,
    "xtc_threshold": 0.1,
}
IDLE_ELSEWHERE = IDLE | {name: idle[0] for name, idle in FOREIGN.items() if idle}


@pytest.mark.parametrize(
    ("path", "fields"), [(CHAT, IDLE), (PLAIN, IDLE), (RESPONSES, IDLE_ELSEWHERE), (MESSAGES, IDLE_ELSEWHERE)]
)
async def test_fields_that_change_nothing_are_accepted(path: str, fields: dict[str, Any]) -> None:
    async with served({"What is it": "yes"}) as house:
        body = {name: value for name, value in (fields | BODIES[path]).items() if value is not None}
        answer = await house.post(path, body)
        assert answer.status_code == 200, answer.text
