"""The tags in which a model that was taught to fork writes: ThreadWeaver's dialect, as values.

The model writes up to `</Outlines>`. Each outline is then a thread, a sequence that is forked there and
begins with `<Thread>` and its number, up to `</Thread>`. The threads' texts are put behind what was there
before, in the order of their outlines, and the model reads all of it and writes on: `</Parallel>`, and
whatever follows, which may be a further block.

Format and procedure: github.com/facebookresearch/threadweaver at 2662232, README.md ("Inference State
Machine"); the white space is that of `AsyncBranchingController` without conclusions in
threadweaver_rl/verl/experimental/agent_loop/single_turn_agent_loop.py, as threadweaver_sft/src/simple_eval.py
has it. Blocks are not nested there: the first `</Thread>` ends a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specsot.core.skeleton import MAX_POINTS, MAX_TITLE_BYTES
from specsot.params import Ask

OUTLINES, OUTLINES_END, THREAD, THREAD_END = "<Outlines>", "</Outlines>", "<Thread>", "</Thread>"
TAGS = (OUTLINES, OUTLINES_END, THREAD, THREAD_END, "<Outline>", "</Outline>", "<Parallel>", "</Parallel>")
_OUTLINE = re.compile(r"<Outline>\s*([0-9]+(?:\.[0-9]+)*)\s*:([^<]*)")
_BLOCK_END = "\n"


@dataclass(frozen=True, slots=True)
class Outline:
    """A thread that is to be written. number: as the model wrote it."""

    number: str
    title: str


@dataclass(frozen=True, slots=True)
class ForkTags:
    """The dialect in one model's tokens. encode: text with tags to tokens. decode: tokens to text, without
    special ones if so told.
    """

    outlines_end: int
    thread_end: int
    encode: Callable[[str], tuple[int, ...]]
    decode: Callable[[Sequence[int], bool], str]

    @property
    def block_end(self) -> tuple[int, ...]:
        """What is put behind the last thread."""
        return self.encode(_BLOCK_END)

    def head(self, outline: Outline, first: bool = True) -> tuple[int, ...]:
        """What a thread's prompt ends with, and what stands before it in the answer; there only the first one
        begins a line.
        """
        return self.encode(f"{_BLOCK_END if first else ''}{THREAD}\n{outline.number}:")

    def outlines(self, written: Sequence[int]) -> tuple[Outline, ...]:
        """Those of the last block, each number once; none where they cannot be threads of one block."""
        _, begun, block = self.decode(written, False).rpartition(OUTLINES)
        named = reversed(_OUTLINE.findall(block)) if begun else ()
        found = {number: _title(words) for number, words in named}
        outlines = tuple(Outline(number, title) for number, title in reversed(found.items()))
        return outlines if 2 <= len(outlines) <= MAX_POINTS else ()


def find_tags(
    encode: Callable[[str], tuple[int, ...]], decode: Callable[[Sequence[int], bool], str]
) -> ForkTags | None:
    """None: a tag is not one token, so the model was not taught this dialect."""
    tokens = {tag: encode(tag) for tag in TAGS}
    if any(len(one) != 1 for one in tokens.values()):
        return None
    return ForkTags(tokens[OUTLINES_END][0], tokens[THREAD_END][0], encode, decode)


def may_fork(ask: Ask) -> bool:
    """Whether this request's answer may be written in threads; otherwise it is one sequence."""
    alone = (
        *(ask.form, ask.tools, ask.min_tokens, ask.polish, ask.finish_within_s is not None),
        *(ask.window, ask.pruning, ask.head_aware, ask.prompt_logprobs is not None),
        *(ask.ignore_eos, ask.stop_token_ids, ask.include_stop_str_in_output),
    )
    return ask.mode != "direct" and not any(alone)


def _title(words: str) -> str:
    line = " ".join(words.split())
    return line.encode()[:MAX_TITLE_BYTES].decode(errors="ignore")
