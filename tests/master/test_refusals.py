"""What the conductor refuses, and how it says so.

Scripts say what is written.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from specsot.errors import InvalidRequest, NotFound, Overloaded
from specsot.params import Ask, Limits, Message, Mode, Sampling
from specsot_master.engine import Caller, EngineConfig, RingState
from specsot_master.text import Text
from tests.master.letters import COUNT, DIRECT, SAYS, finished
from tests.master.stage import BASE, Stage

pytestmark = pytest.mark.slow


def biased(*tokens: int) -> Ask:
    return Ask(prompt="Hi", sampling=Sampling(logit_bias=tuple((token, 1.0) for token in tokens)))


@pytest.mark.parametrize("mode", ["direct", "sot", "auto"])
async def test_a_token_beyond_the_models_reaches_no_worker(mode: Mode, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes((BASE / "tokenizer_config.json").read_bytes())
    stage = Stage(SAYS, text=Text(tmp_path, 8192))
    with pytest.raises(InvalidRequest, match="'<extra>' is token 8192 of the tokenizer"):
        await stage.answer(Ask(prompt="What is <extra>?", mode=mode))
    assert not stage.ring.orders
    assert finished(await stage.answer(DIRECT)).text == SAYS["What is"]
    stage.assert_clean()


@pytest.mark.parametrize(
    ("ask", "error", "complaint"),
    [
        (Ask(prompt="Hi", model="other"), NotFound, "no model named 'other' here, only 'demo'"),
        (Ask(prompt="word " * 3000, mode="direct"), InvalidRequest, "context length is 2048"),
        (Ask(prompt="word " * 3000), InvalidRequest, "context length is 2048"),
        (Ask(prompt="Hi", limits=Limits(max_new_tokens=2040)), InvalidRequest, "in the completion"),
        (Ask(prompt="Hi", mode="sot", limits=Limits(max_new_tokens=63)), InvalidRequest, "at least 64"),
        (Ask(prompt="x" * 600_000), InvalidRequest, "prompt: 600000 characters cannot fit"),
        (Ask(prompt="Hi", stop=("x" * 257,)), InvalidRequest, "stop: at most 256 characters"),
        (biased(0, 8192), InvalidRequest, "names token 8192, the model's are 0 .. 8191"),
        (biased(2**31 - 1), InvalidRequest, "names token 2147483647"),
        (Ask(tokens=(1, 8192), mode="direct"), InvalidRequest, "tokens names token 8192"),
        (Ask(tokens=(1,) * 2048, mode="direct"), InvalidRequest, "2048 tokens cannot fit"),
        (Ask(messages=(Message("boss", "Hi"),)), InvalidRequest, "roles are system, user"),
    ],
)
async def test_what_cannot_be_is_refused(ask: Ask, error: type[Exception], complaint: str) -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", vocabulary=8192))
    with pytest.raises(error, match=complaint):
        await stage.answer(ask)
    assert stage.ring.orders == []
    stage.assert_clean()


async def test_a_request_too_large_for_the_rings_memory_is_refused() -> None:
    state = RingState(epoch=1, pages=4, page_rows=64, slots=8, max_positions=2048)
    with pytest.raises(InvalidRequest, match="KV pages of 64 rows, the ring has 4"):
        await Stage(SAYS, state=state).answer(COUNT)


async def test_a_request_id_is_used_once_at_a_time() -> None:
    stage = Stage(SAYS)
    client = stage.listen(DIRECT, "mine")
    await stage.settle()
    with pytest.raises(InvalidRequest, match="already running"):
        await anext(stage.requests.generate(DIRECT, Caller("mine")))
    await stage.play(client)
    await stage.play(stage.listen(DIRECT, "mine"))


async def test_a_full_queue_says_when_to_come_back() -> None:
    stage = Stage(SAYS, config=EngineConfig(model="demo", live=1, queue=1, retry_after=2.5))
    clients = [stage.listen(DIRECT), stage.listen(DIRECT)]
    await stage.settle()
    with pytest.raises(Overloaded) as caught:
        await anext(stage.requests.generate(DIRECT))
    assert caught.value.retry_after == 2.5
    await stage.play(*clients)
    stage.assert_clean()
