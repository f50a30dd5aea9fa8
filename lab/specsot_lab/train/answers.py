"""Answers that the base writes to the questions, in the prompts it has in service; many side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specsot.core.list_plan import ListReader
from specsot.core.skeleton import MAX_LIST_POINTS, PlanRules, Point, read_plan
from specsot.errors import PlanError
from specsot.params import Message
from specsot_lab.train.rows import Row, row_of
from specsot_lab.train.settings import AnswerOptions
from specsot_lab.train.unrolling import causal_plan, next_plan
from specsot_master.core.plans.guards import keep_points
from specsot_master.prompts import Conversation, Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder
from specsot_model.kv import KVPages

Tokens = Sequence[int]
LISTS = PlanRules(
    direct=False, max_points=MAX_LIST_POINTS, listed=True
)  # of a base that was not taught to plan
MAX_PREFILL_TOKENS = 131_072  # Tokens of prompts in one forward, padding included; bounds memory. Untuned.
LOOK = 16  # steps between two looks at whether all texts have ended


class Writer:
    """Writes until one of the base's ends, or a limit."""

    def __init__(self, decoder: Decoder, ends: Sequence[int], together: int) -> None:
        """together: texts side by side."""
        self._decoder = decoder
        self._together = together
        self._ends = torch.tensor(sorted(ends), device=decoder.device)

    def write(
        self, prompts: Sequence[Tokens], limit: int, done: Callable[[int], object] = lambda _: None
    ) -> list[list[int]]:
        """What each prompt is answered with, its end included, `limit` tokens at most; prompt by prompt.

        A prompt that leaves no room for `limit` tokens is answered with nothing. done: hears of prompts.
        """
        most = self._decoder.config.max_positions - limit
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        fitting = [number for number in order if len(prompts[number]) <= most]
        written: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(fitting), self._together):
            numbers = fitting[first : first + self._together]
            for number, text in zip(numbers, self._write([prompts[number] for number in numbers], limit)):
                written[number] = text
            done(len(numbers))
        done(len(order) - len(fitting))
        return written

    @torch.inference_mode()
    def _write(self, prompts: Sequence[Tokens], limit: int) -> list[list[int]]:
        decoder = self._decoder
        device = self._decoder.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        page = int(lengths.max()) + limit
        kv = decoder.make_kv(len(prompts), page)
        token = self._begin(prompts, lengths, kv)
        pages = torch.arange(len(prompts), device=device) * page
        written = [token]
        ended = torch.isin(token, self._ends)
        for step in range(limit - 1):
            if step % LOOK == 0 and bool(ended.all()):
                break
            columns = min(int(page - limit + step + 1), page)
            hidden, _ = decoder.forward(
                decoder.embed(token), lengths, pages + lengths, next_plan(lengths + 1, columns), kv
            )
            token = decoder.logits(hidden).argmax(-1)
            lengths = lengths + 1
            written.append(token)
            ended |= torch.isin(token, self._ends)
        return self._until_ends(torch.stack(written, 1))

    def _begin(self, prompts: Sequence[Tokens], lengths: Tensor, kv: KVPages) -> Tensor:
        """Write the prompts' KV and return the first token after each prompt, [prompts].

        KV of padding is overwritten by later tokens. Prompts are read in parts of MAX_PREFILL_TOKENS.
        """
        width = int(lengths.max())
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for place, prompt in enumerate(prompts):
            tokens[place, : len(prompt)] = torch.tensor(prompt)
        parts = tokens.to(self._decoder.device).split(max(1, MAX_PREFILL_TOKENS // width))
        pages = range(0, len(prompts), len(parts[0]))
        return torch.cat([self._prefill(part, first, lengths, kv) for part, first in zip(parts, pages)])

    def _prefill(self, tokens: Tensor, first: int, lengths: Tensor, kv: KVPages) -> Tensor:
        """Read prompts [batch, width] into the pages from `first` on; return their next tokens [batch]."""
        decoder = self._decoder
        device = self._decoder.device
        batch, width = tokens.shape
        positions = torch.arange(width, device=device).repeat(batch)
        slots = ((first + torch.arange(batch, device=device))[:, None] * kv.page_rows).add(positions[:width])
        entry = decoder.embed(tokens.reshape(-1))
        hidden, _ = decoder.forward(entry, positions, slots.reshape(-1), causal_plan(batch, first), kv)
        last = torch.arange(batch, device=device) * width + lengths[first : first + batch] - 1
        return decoder.logits(hidden[last]).argmax(-1)

    def _until_ends(self, written: Tensor) -> list[list[int]]:
        ends = set(self._ends.tolist())
        return [_cut(text, ends) for text in written.tolist()]


def _cut(text: list[int], ends: set[int]) -> list[int]:
    last = next((place for place, token in enumerate(text) if token in ends), len(text) - 1)
    return text[: last + 1]


Watch = Callable[[str, int, int], Callable[[int], object]]  # (what, done, total) -> hears of progress


@dataclass(frozen=True, slots=True)
class _Asked:
    """One prompt on its way to an answer, of question number `group`."""

    group: int
    prompt: tuple[int, ...]


def answer_all(
    questions: Sequence[str],
    prompts: Prompts,
    text: Text,
    writer: Writer,
    asking: AnswerOptions,
    watch: Watch,
) -> list[Row]:
    """Rows of everything the base writes to these questions; the answers are what is learned."""
    rules = LISTS if prompts.listed else PlanRules(plan_tokens=asking.plan_tokens)
    turns = [prompts.plan((Message("user", question),), rules) for question in questions]
    plans = [_Asked(group, turn.skeleton.tokens) for group, turn in enumerate(turns)]
    written = _write(plans, writer, asking.plan_tokens, watch, "plans")
    rows = _rows(plans, written)
    points = [
        _Asked(asked.group, prompt)
        for asked, plan in zip(plans, written)
        for prompt in _branches(turns[asked.group], questions[asked.group], text.decode(plan))
    ]
    rows += _rows(points, _write(points, writer, asking.answer_tokens, watch, "points"))
    direct = [
        _Asked(group, prompts.chat((Message("user", questions[group]),)))
        for group in _spread(len(questions), asking.direct)
    ]
    return rows + _rows(direct, _write(direct, writer, asking.answer_tokens, watch, "answers"))


def _write(asked: Sequence[_Asked], writer: Writer, limit: int, watch: Watch, what: str) -> list[list[int]]:
    return writer.write([one.prompt for one in asked], limit, watch(what, 0, len(asked)))


def _rows(asked: Sequence[_Asked], written: Sequence[Sequence[int]]) -> list[Row]:
    return [
        row_of(((one.prompt, False), (text, True)), one.group) for one, text in zip(asked, written) if text
    ]


def _branches(turn: Conversation, question: str, plan: str) -> list[tuple[int, ...]]:
    """The prompt of every point that stands alone; one that builds on others would need their texts."""
    points = _listed_points(plan, question, turn.told) if turn.told is not None else _points(plan)
    return [turn.branch(point, points, [], point.length).tokens for point in points if not point.needs]


def _points(plan: str) -> tuple[Point, ...]:
    try:
        return read_plan(plan) or ()
    except PlanError:
        return ()


def _listed_points(plan: str, question: str, told: Sequence[str]) -> tuple[Point, ...]:
    """Of a numbered list, behind the number that its prompt ends with."""
    reader = ListReader(LISTS)
    reader.feed(plan)
    reader.finish()
    return keep_points(reader.points, question, told)


def _spread(count: int, share: float) -> list[int]:
    """So large a share of 0 .. count - 1, evenly."""
    wanted = round(count * share)
    return sorted({place * count // wanted for place in range(wanted)}) if wanted else []
