"""The conductor end to end where the model's score decides: a sequence of one token, then the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specsot.params import Ask, Limits
from specsot_master.engine import Caller, RequestJournal
from specsot_master.journal import open_journal
from tests.master.letters import finished, openings
from tests.master.stage import Stage
from tests.master.test_repair import break_and_form
from tests.master.test_resuming import CONFIG, kept_in, read, reading, revived, text_of

pytestmark = pytest.mark.slow

# The fake ring finds a token's neighbours likely, too: " are" is among its chances, the others are not.
SAYS = {
    "Here": " are",
    "numbered list": " Alpha\n2. Beta\n3. Gamma\n4. Delta",
    "## 1. Alpha": "A.",
    "## 2. Beta": "B.",
    "## 3. Gamma": "C.",
    "## 4. Delta": "D.",
    "Letters": "It is so.\n\nJust so.",
}
ASK = Ask("Letters of ours", seed=5, constraint=False, limits=Limits(max_new_tokens=300))
DIRECT = SAYS["Letters"]
PLANNED = f"It is so.\n\n## 1. Alpha\nA.\n\n## 2. Beta\nB.\n\n## 3. Gamma\nC.\n\n## 4. Delta\nD.\n\n{DIRECT}"


@pytest.mark.parametrize(
    ("threshold", "text", "reason"), [(0.0, PLANNED, "planned: score "), (1.0, DIRECT, "direct: score ")]
)
async def test_the_score_is_one_token_that_counts_and_forks_what_follows(
    threshold: float, text: str, reason: str
) -> None:
    stage = Stage(SAYS, threshold=threshold)
    events = await stage.answer(replace(ASK, logprobs=1))
    told, (score, first, *_) = finished(events), [one for one in openings(stage) if one.decodes]
    assert told.text == text
    assert told.statistics.decision.startswith(reason)
    assert (score.limit, score.logprobs, first.logprobs) == (1, 20, 1)
    assert score.fork
    assert first.fork
    assert score.fork.sequence == first.fork.sequence, "the question is computed once"
    assert abs(score.fork.length - first.fork.length) < 3
    assert told.statistics.plan_tokens >= 1
    assert {name for name in told.statistics.phases if not name.endswith("_prefill")} == {
        "queue",
        "decision",
        *(("skeleton", "branches") if text is PLANNED else ("direct",)),
    }
    stage.assert_clean()


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize(("threshold", "text"), [(0.0, PLANNED), (1.0, DIRECT)])
async def test_a_ring_that_breaks_around_the_score_changes_nothing(
    steps: int, threshold: float, text: str
) -> None:
    stage = Stage(SAYS, threshold=threshold)
    client = stage.listen(ASK)
    for _ in range(steps):
        await stage.step()
    await break_and_form(stage, 2)
    (events,) = await stage.play(client)
    assert finished(events).text == text
    stage.assert_clean()


@pytest.mark.parametrize("steps", [0, 2, 3])
async def test_a_scored_request_goes_on_after_a_restart(tmp_path: Path, steps: int) -> None:
    journal = open_journal(tmp_path, "m")
    stage = Stage(SAYS, config=CONFIG, notes=RequestJournal(journal, lambda: 0.0), threshold=0.0)
    client = reading(stage.requests.generate(replace(ASK, resumable=True), Caller("mine", owner="alice")))
    for _ in range(steps):
        await stage.step()
    await stage.settle()
    kept = await kept_in(tmp_path, journal, client)
    second = Stage(SAYS, config=CONFIG, threshold=0.0)
    events = await revived(second, kept)
    assert text_of(events) == PLANNED
    other = Stage(SAYS, config=CONFIG, threshold=1.0)
    await other.engine.revive([kept])
    with pytest.raises(Exception, match="words its prompts differently now"):
        await read(other.requests.generate(None, Caller("mine", owner="alice"), 0))


@pytest.mark.parametrize("steps", [1, 4, 6, 8])
async def test_a_list_that_became_a_plain_answer_goes_on_after_a_restart(tmp_path: Path, steps: int) -> None:
    says = SAYS | {"numbered list": " Only this", "Letters": "Just so, and no other way."}
    journal = open_journal(tmp_path, "m")
    stage = Stage(says, seed=2, config=CONFIG, notes=RequestJournal(journal), threshold=0.0, burst=1)
    ask = replace(ASK, mode="sot", resumable=True)
    client = reading(stage.requests.generate(ask, Caller("mine", owner="alice")))
    for _ in range(steps):
        await stage.step()
    kept = await kept_in(tmp_path, journal, client)
    second = Stage(says, config=CONFIG, threshold=0.0)
    events = await revived(second, kept)
    assert text_of(events) == "Just so, and no other way."
