"""A model that forks by tags, on a fake ring: threads side by side, joined by being read again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from specsot.core.frames import Opening
from specsot.events import BranchFinished, BranchStarted, BranchText, MergedText, Planned, Reason
from specsot.params import Ask, Limits
from specsot_master.core.fork_tags import TAGS
from specsot_master.text import Text
from tests.master.letters import finished, openings
from tests.master.stage import BASE, END_OF_TEXT, Stage, of

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
        said = next(words for end, words in self.writes.items() if asked.endswith(end))
        self.prompts_seen.append((opening, asked))
        return (*self.text.encode(said), END_OF_TEXT)


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


async def test_a_direct_answer_is_one_sequence(text: Text) -> None:
    stage = Forking({}, text=text, style="tags")
    stage.writes = {"\nassistant\n": WHOLE}
    events = await stage.answer(Ask(prompt="?", mode="direct", seed=5, skip_special_tokens=False))
    assert finished(events).text == WHOLE
    assert [one.ordinal for one in openings(stage) if one.decodes] == [0]
