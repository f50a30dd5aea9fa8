"""A model that forks by tags, on a fake ring: threads side by side, joined by being read again."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from specsot.core.frames import End, Open, Opening, Outcome, Result
from specsot.errors import ModelError
from specsot.events import BranchFinished, BranchStarted, BranchText, Event, MergedText, Planned, Reason
from specsot.params import Ask, Limits
from specsot_master.core.plans.fork_plan import TAGS, find_tags
from specsot_master.engine import Caller, RequestJournal
from specsot_master.journal import open_journal
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from tests.conftest import seeds
from tests.master.fake_ring import STATE, Player
from tests.master.letters import TIGHT, finished, openings
from tests.master.stage import BASE, Stage, of
from tests.master.test_repair import break_and_form
from tests.master.test_resuming import CONFIG, kept_in, reading, revived, text_of

OUTLINES = "Two ways. <Parallel>\n<Outlines>\n<Outline> 1: Sums\n<Outline> 2: Pictures\n</Outlines>"
WRITES = {
    "\nassistant\n": OUTLINES,
    "</Outlines>\n<Thread>\n1:": " Add them up.\n</Thread>",
    "</Outlines>\n<Thread>\n2:": " Draw a square.\n</Thread>",
    "</Thread>\n": "</Parallel>\nIt is nine.",
}
WHOLE = (
    f"{OUTLINES}\n<Thread>\n1: Add them up.\n</Thread><Thread>\n2: Draw a square.\n</Thread>\n"
    "</Parallel>\nIt is nine."
)
ASK = Ask(prompt="What is 3 * 3?", seed=5, skip_special_tokens=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """The demo model's, with the dialect's tokens."""
    folder = tmp_path_factory.mktemp("forks")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(Path(BASE) / name, folder)
    tokenizer = Tokenizer.from_file(str(Path(BASE) / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Text(folder)


class Forking(Stage):
    writes = WRITES

    def _script(self, opening: Opening, prompt: tuple[int, ...]) -> tuple[int, ...]:
        asked = self.text.decode(prompt, False).replace("<|im_start|>", "\n")
        said = next(words for end, words in (self.says or self.writes).items() if asked.endswith(end))
        self.prompts_seen.append((opening, asked))
        return (*self.text.encode(said), self.text.end_ids[-1])


async def test_threads_are_written_side_by_side_and_read_again(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    events = await stage.answer(ASK)
    (plan,) = of(Planned, events)
    assert [(one.id, one.title) for one in plan.points] == [(1, "Sums"), (2, "Pictures")]
    assert finished(events).text == WHOLE == "".join(one.text for one in of(MergedText, events))
    kinds = [type(one) for one in events if isinstance(one, BranchStarted | BranchFinished)]
    assert kinds == [BranchStarted, BranchStarted, BranchFinished, BranchFinished]
    bodies = ["".join(one.text for one in of(BranchText, events) if one.branch == id) for id in (1, 2)]
    assert bodies == [" Add them up.\n", " Draw a square.\n"]
    writers = [one for one in openings(stage) if one.decodes]
    assert [one.ordinal for one in writers] == [0, 1, 2, 0]
    assert writers[1].fork == writers[2].fork, "they share all that was written before"
    assert stage.prompts_seen[-1][1].endswith(WHOLE.removesuffix("</Parallel>\nIt is nine."))
    assert finished(events).statistics.mode == "sot"
    stage.assert_clean()


async def test_tags_are_special_tokens_that_clients_do_not_see(text: Text) -> None:
    events = await Forking({}, text=text, style="tags").answer(Ask(prompt="What is 3 * 3?", seed=5))
    expected = WHOLE
    for tag in TAGS:
        expected = expected.replace(tag, "")
    assert finished(events).text.split() == expected.split()


@pytest.mark.parametrize("outline", ["", "<Outline> 2 Pictures\n", "<Outline> 1: Pictures\n"])
async def test_outlines_that_are_no_two_threads_are_written_alone(text: Text, outline: str) -> None:
    stage = Forking({}, text=text, style="tags")
    begun = OUTLINES.replace("<Outline> 2: Pictures\n", outline)
    stage.writes = {"\nassistant\n": begun, "</Outlines>": "\n<Thread>\n1: Alone.\n</Thread>\nDone."}
    events = await stage.answer(ASK)
    assert finished(events).text == f"{begun}\n<Thread>\n1: Alone.\n</Thread>\nDone."
    assert not of(BranchStarted, events)
    stage.assert_clean()


async def test_a_limit_bounds_everything_and_a_cut_thread_ends_the_answer(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    stage.writes = WRITES | {"</Outlines>\n<Thread>\n2:": " on" * 400}
    limit = 200
    events = await stage.answer(Ask(prompt="?", seed=5, limits=Limits(max_new_tokens=limit)))
    assert [one.reason for one in of(BranchFinished, events)] == [Reason.STOP, Reason.LENGTH]
    assert finished(events).reason is Reason.LENGTH
    assert "Add them up." in finished(events).text
    assert finished(events).statistics.completion_tokens <= limit
    stage.assert_clean()


SECOND = "</Parallel>\nMore. <Parallel>\n<Outlines>\n<Outline> 1: Roots\n<Outline> 2: Cubes\n</Outlines>"
TWICE = {
    f"{SECOND}\n<Thread>\n1:": " Take the root.\n</Thread>",
    f"{SECOND}\n<Thread>\n2:": " Build a cube.\n</Thread>",
    " Build a cube.\n</Thread>\n": "</Parallel>\nAll say nine.",
    **WRITES,
    "</Thread>\n": SECOND,
}
BOTH = (
    f"{WHOLE.removesuffix('</Parallel>' + chr(10) + 'It is nine.')}{SECOND}\n"
    "<Thread>\n1: Take the root.\n</Thread><Thread>\n2: Build a cube.\n</Thread>\n</Parallel>\nAll say nine."
)


def threads_of(stage: Stage) -> list[Player]:
    """Those in the ring."""
    return [one for one in stage.ring.live.values() if one.opening.decodes and one.opening.ordinal]


async def until_threads(stage: Stage, written: int = 3) -> None:
    """Steps until two threads have written something."""
    while len(found := threads_of(stage)) < 2 or min(len(one.written) for one in found) < written:
        assert await stage.step()


async def test_an_answer_may_have_several_blocks(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    stage.writes = TWICE
    events = await stage.answer(ASK)
    assert finished(events).text == BOTH
    assert [[one.id for one in plan.points] for plan in of(Planned, events)] == [[1, 2], [3, 4]]
    assert text.decode(finished(events).tokens, False) == BOTH
    writers = [one for one in openings(stage) if one.decodes]
    assert [one.ordinal for one in writers] == [0, 1, 2, 0, 3, 4, 0]
    first, second = writers[1].fork, writers[4].fork
    assert first is not None
    assert second is not None
    assert second.length > first.length
    assert finished(events).statistics.branches == 4
    stage.assert_clean()


NESTED = (
    " First <Parallel>\n<Outlines>\n<Outline> 1: A\n<Outline> 2: B\n</Outlines>\n"
    "<Thread>\n1: Inside.\n</Thread>"
)


async def test_a_block_in_a_thread_is_its_text(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    stage.writes = WRITES | {"</Outlines>\n<Thread>\n1:": NESTED}
    events = await stage.answer(ASK)
    assert finished(events).text == WHOLE.replace(" Add them up.\n</Thread>", NESTED)
    assert len(of(BranchStarted, events)) == 2
    stage.assert_clean()


async def test_a_thread_without_an_outline_is_text(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    behind = "<Thread>\n3: One more.\n</Thread>\n</Parallel>\nIt is nine."
    stage.writes = WRITES | {"</Thread>\n": behind}
    events = await stage.answer(ASK)
    assert finished(events).text == WHOLE.replace("</Parallel>\nIt is nine.", behind)
    assert len(of(BranchStarted, events)) == 2
    stage.assert_clean()


def listed(count: int) -> str:
    return "".join(f"<Outline> {n}: Way {n}\n" for n in range(1, count + 1))


@pytest.mark.parametrize(
    ("begun", "behind"),
    [
        (f"{OUTLINES.removesuffix('</Outlines>')}<Thread>\n1: Sums.\n</Thread>", None),
        ("<Parallel>\n<Outline> 1: Sums\n<Outline> 2: Pictures\n</Outlines>", " Done."),
        (f"<Parallel>\n<Outlines>\n{listed(17)}</Outlines>", "\n<Thread>\n1: Alone.\n</Thread>\n</Parallel>"),
    ],
    ids=["never closed", "never opened", "too many"],
)
async def test_malformed_blocks_are_written_alone(text: Text, begun: str, behind: str | None) -> None:
    stage = Forking({}, text=text, style="tags")
    stage.writes = {"\nassistant\n": begun} | ({} if behind is None else {"</Outlines>": behind})
    events = await stage.answer(ASK)
    assert finished(events).text == begun + (behind or "")
    assert finished(events).reason is Reason.STOP
    assert not of(BranchStarted, events)
    assert finished(events).statistics.mode == "direct"
    stage.assert_clean()


async def test_more_threads_than_may_run_follow_each_other(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    begun = f"<Parallel>\n<Outlines>\n{listed(6)}</Outlines>"
    heads = {f"</Outlines>\n<Thread>\n{n}:": f" Way {n}.\n</Thread>" for n in range(1, 7)}
    stage.writes = {"\nassistant\n": begun, **heads, "</Thread>\n": "</Parallel>\nSix."}
    events = await stage.answer(replace(ASK, limits=Limits(max_parallel=2)))
    assert stage.ring.most_live == 2
    threads = "".join(f"<Thread>\n{n}: Way {n}.\n</Thread>" for n in range(1, 7))
    assert finished(events).text == f"{begun}\n{threads}\n</Parallel>\nSix."
    stage.assert_clean()


async def test_cancelling_while_threads_run_returns_their_texts_in_order(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    client = stage.listen(ASK, "mine")
    await until_threads(stage)
    assert stage.requests.cancel("mine")
    (events,) = await stage.play(client)
    end = finished(events)
    assert end.reason is Reason.CANCELLED
    assert {one.reason for one in of(BranchFinished, events)} <= {Reason.CANCELLED, Reason.STOP}
    first, second = end.text.removeprefix(f"{OUTLINES}\n<Thread>\n1:").split("<Thread>\n2:")
    assert first
    assert " Add them up.\n</Thread>".startswith(first)
    assert second
    assert " Draw a square.\n</Thread>".startswith(second)
    assert text.decode(end.tokens, False) == end.text
    stage.assert_clean()


async def test_a_stop_string_in_a_thread_ends_the_answer_after_the_threads(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    events = await stage.answer(replace(ASK, stop=("them",)))
    end = finished(events)
    assert end.text == f"{OUTLINES}\n<Thread>\n1: Add <Thread>\n2: Draw a square.\n</Thread>"
    assert (end.reason, end.stop_string) == (Reason.STOP, "them")
    stage.assert_clean()


@pytest.mark.parametrize("limit", [110, 200, 500])
async def test_a_limit_may_cut_the_conclusion(text: Text, limit: int) -> None:
    stage = Forking({}, text=text, style="tags")
    stage.writes = WRITES | {"</Thread>\n": "</Parallel>\nIt is" + " so" * 600}
    events = await stage.answer(replace(ASK, limits=Limits(max_new_tokens=limit)))
    end = finished(events)
    assert end.reason is Reason.LENGTH
    assert end.statistics.completion_tokens == len(end.tokens) == limit
    stage.assert_clean()


async def test_a_thread_that_fails_ends_the_answer_when_the_others_are_done(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    client = stage.listen(ASK)
    await until_threads(stage)
    doomed = threads_of(stage)[0].opening
    failed = Outcome(doomed.sequence, 0, (), (), End.FAILED)
    del stage.ring.live[doomed.sequence]
    stage.ring._table.close(doomed.sequence)
    stage.engine.handle(Result(1, 999, (failed,)))
    (events,) = await stage.play(client)
    reasons = {one.branch: one.reason for one in of(BranchFinished, events)}
    assert reasons == {doomed.ordinal: Reason.FAILED, 3 - doomed.ordinal: Reason.STOP}
    assert finished(events).reason is Reason.FAILED
    assert "</Parallel>" not in finished(events).text
    stage.assert_clean()


async def test_an_end_token_in_a_thread_ends_the_answer(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    stage.writes = WRITES | {"</Outlines>\n<Thread>\n1:": " Add them."}
    events = await stage.answer(ASK)
    end = finished(events)
    assert end.text == f"{OUTLINES}\n<Thread>\n1: Add them.<Thread>\n2: Draw a square.\n</Thread>"
    assert (end.reason, text.decode(end.tokens, False)) == (Reason.STOP, end.text)
    stage.assert_clean()


async def test_a_prompt_in_tokens_may_be_forked(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    asked = text.encode("<|im_start|>user\nWhat is 3 * 3?<|im_end|>\n<|im_start|>assistant\n")
    events = await stage.answer(Ask(tokens=asked, seed=5, skip_special_tokens=False))
    assert finished(events).text == WHOLE
    events = await stage.answer(Ask(tokens=asked, mode="direct", seed=5, skip_special_tokens=False))
    assert finished(events).text == OUTLINES


async def test_threads_go_on_in_the_next_ring_on_one_prefix(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    client = stage.listen(ASK)
    await until_threads(stage)
    stage.ring.orders.clear()
    await break_and_form(stage, 2)
    await stage.settle()
    opened = [one.opening for one in stage.ring.orders if isinstance(one, Open)]
    threads = [one for one in opened if one.ordinal]
    assert [one.ordinal for one in threads] == [1, 2]
    (fork,) = {one.fork for one in threads}
    assert fork is not None
    assert fork.length + len(text.encode("\n<Thread>\n1:")) == threads[0].prompt - threads[0].generated
    (events,) = await stage.play(client)
    assert finished(events).text == WHOLE == "".join(one.text for one in of(MergedText, events))
    stage.assert_clean()


@pytest.mark.parametrize("seed", seeds(12, quick=4))
async def test_rings_may_break_at_any_step(text: Text, seed: int) -> None:
    """Pages, page sizes and the drafter may be others in every new ring; clients may leave."""
    chance, epoch = random.Random(seed), 1
    state = TIGHT if seed % 2 else STATE
    stage = Forking({}, seed, text=text, style="tags", state=state)
    stage.writes = TWICE
    ask = replace(ASK, limits=Limits(max_new_tokens=300))
    clients: list[asyncio.Task[list[Event]]] = [stage.listen(ask, f"r{n}") for n in range(4)]
    leaving = clients[0]
    while not all(client.done() for client in clients):
        for _ in range(16):  # so that nobody is taken for the reason
            await stage.step()
        if chance.random() < 0.4:
            epoch += 1
            pages, rows = chance.choice([(64, 64), (40, 64), (90, 32)])
            await break_and_form(stage, epoch, pages=pages, page_rows=rows, has_drafter=chance.random() < 0.5)
        if chance.random() < 0.1:
            stage.requests.cancel("r0")
    for client in clients:
        events = client.result()
        end = finished(events)
        assert end.text == BOTH or (client is leaving and BOTH.startswith(end.text[:40]))
        assert "".join(one.text for one in of(MergedText, events)) == end.text
        check_streamed(events, whole=end.text == BOTH)
    stage.assert_clean()


def check_streamed(events: list[Event], whole: bool) -> None:
    """Each thread's text comes once and in order, whatever broke meanwhile."""
    bodies = dict.fromkeys(range(1, 5), "")
    for one in of(BranchText, events):
        assert one.offset == len(bodies[one.branch])
        bodies[one.branch] += one.text
    for id, thread in enumerate(
        (" Add them up.\n", " Draw a square.\n", " Take the root.\n", " Build a cube.\n"), 1
    ):
        assert bodies[id] == thread if whole else thread.startswith(bodies[id])


async def test_a_later_master_goes_on_from_the_journal(text: Text, tmp_path: Path) -> None:
    """In the second block: what was written before is played again from the journal."""
    config = replace(CONFIG, model="m")
    journal = open_journal(tmp_path, "m")
    notes = RequestJournal(journal, lambda: 0.0)
    first = Forking({}, text=text, style="tags", config=config, notes=notes)
    first.writes = TWICE
    kept_ask = replace(ASK, resumable=True)
    client = reading(first.requests.generate(kept_ask, Caller("mine", owner="alice")))
    while {one.opening.ordinal for one in threads_of(first)} != {3, 4}:
        assert await first.step()
    (request,) = first.engine.all_requests
    kept = await kept_in(tmp_path, journal, client)
    later = Forking({}, text=text, style="tags", config=config)
    later.writes = TWICE
    events = await revived(later, kept, request.events.position)
    assert text_of(events) == BOTH
    rest = "".join(one.event.text for one in events if isinstance(one.event, MergedText))
    assert rest
    assert BOTH.endswith(rest), "what the first master streamed is not streamed again"


def test_a_model_directory_says_what_it_was_taught(text: Text, tmp_path: Path) -> None:
    assert Prompts(tmp_path, text).style == "tags", "its tokenizer has them"
    told = tmp_path / "specsot.json"
    for style in ("list", "tags"):
        told.write_text(json.dumps({"plan_style": style}))
        assert Prompts(tmp_path, text).style == style
    assert Prompts(tmp_path, text, "list").style == "list", "who serves it decides"
    assert Prompts(tmp_path, text, "markers").style == "markers", "any model can be told that language"
    told.write_text('{"plan_style": "tags"}')
    with pytest.raises(ModelError, match="has no <Outlines>"):
        Prompts(tmp_path, Text(BASE))
    for wrong, why in (({"plan_style": "auto"}, "plan_style is list"), ({}, "markers need skeleton_turn")):
        told.write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match=why):
            Prompts(tmp_path, text)


async def test_a_direct_answer_is_one_sequence(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    stage.writes = {"\nassistant\n": WHOLE}
    events = await stage.answer(Ask(prompt="?", mode="direct", seed=5, skip_special_tokens=False))
    assert finished(events).text == WHOLE
    assert [one.ordinal for one in openings(stage) if one.decodes] == [0]


def test_an_outline_that_is_repeated_stays_where_it_was_and_keeps_its_title(text: Text) -> None:
    tags = find_tags(lambda words: text.encode(words), lambda tokens, bare: text.decode(tokens, bare))
    assert tags is not None
    lines = ((1, "Sums"), (2, "Pictures"), (1, "Again"), (3, "Words"), (2, "Again"))
    block = "".join(f"<Outline> {number}: {title}\n" for number, title in lines)
    found = tags.outlines(text.encode(f"<Parallel>\n<Outlines>\n{block}</Outlines>"))
    assert [(one.number, one.title) for one in found] == [("1", "Sums"), ("2", "Pictures"), ("3", "Words")]
