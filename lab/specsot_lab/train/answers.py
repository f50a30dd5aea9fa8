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
# Rules for plans of a base that was not taught to plan.
LISTS = PlanRules(
    direct=False, max_points=MAX_LIST_POINTS, listed=True
)  # of a base that was not taught to plan
MAX_PREFILL_TOKENS = 131_072  # Tokens of prompts in one forward, padding included; bounds memory. Untuned.
# Steps. How often it is checked whether all sequences have ended. Untuned.
STEPS_PER_END_CHECK = 16  # steps between two looks at whether all texts have ended


class Writer:
    """Writes greedily until one of the base's end tokens, or a limit; many sequences side by side."""

    def __init__(self, decoder: Decoder, ends: Sequence[int], batch_size: int) -> None:
        """Prepare to write.

        decoder: the whole base model. ends: token ids that end an answer. batch_size: sequences that are
            written side by side.
        """
        self._decoder = decoder
        self._together = batch_size
        self._ends = torch.tensor(sorted(ends), device=decoder.device)

    def write(
        self, prompts: Sequence[Tokens], max_tokens: int, on_written: Callable[[int], object] = lambda _: None
    ) -> list[list[int]]:
        """Return the answer to each prompt, its end token included, at most `max_tokens` tokens, in the order
        of the prompts.

        A prompt that leaves no room for `max_tokens` tokens is answered with nothing.

        prompts: token ids. on_written: called with the number of prompts that have just been answered.
        """
        max_prompt_tokens = self._decoder.config.max_positions - max_tokens
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        fitting = [number for number in order if len(prompts[number]) <= max_prompt_tokens]
        written: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(fitting), self._together):
            numbers = fitting[first : first + self._together]
            for number, text in zip(
                numbers, self._write([prompts[number] for number in numbers], max_tokens)
            ):
                written[number] = text
            on_written(len(numbers))
        on_written(len(order) - len(fitting))
        return written

    @torch.inference_mode()
    def _write(self, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        """Return the answers to prompts that are written side by side; the arguments are those of `write`."""
        decoder = self._decoder
        device = self._decoder.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        page = int(lengths.max()) + max_tokens
        kv = decoder.make_kv(len(prompts), page)
        token = self._begin(prompts, lengths, kv)
        pages = torch.arange(len(prompts), device=device) * page
        written = [token]
        ended = torch.isin(token, self._ends)
        for step in range(max_tokens - 1):
            if step % STEPS_PER_END_CHECK == 0 and bool(ended.all()):
                break
            columns = min(int(page - max_tokens + step + 1), page)
            hidden, _ = decoder.forward(
                decoder.embed(token), lengths, pages + lengths, next_plan(lengths + 1, columns), kv
            )
            token = decoder.logits(hidden).argmax(-1)
            lengths = lengths + 1
            written.append(token)
            ended |= torch.isin(token, self._ends)
        return self._until_ends(torch.stack(written, 1))

    def _begin(self, prompts: Sequence[Tokens], lengths: Tensor, kv: KVPages) -> Tensor:
        """Write the prompts' KV and return the first token after each prompt, [num_prompts].

        KV of padding is overwritten by later tokens. Prompts are read in parts of MAX_PREFILL_TOKENS.

        prompts: token ids; prompt i fills page i. lengths: [num_prompts] their lengths. kv: pages for all
            prompts.
        """
        width = int(lengths.max())
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for row_number, prompt in enumerate(prompts):
            tokens[row_number, : len(prompt)] = torch.tensor(prompt)
        parts = tokens.to(self._decoder.device).split(max(1, MAX_PREFILL_TOKENS // width))
        pages = range(0, len(prompts), len(parts[0]))
        return torch.cat([self._prefill(part, first, lengths, kv) for part, first in zip(parts, pages)])

    def _prefill(self, tokens: Tensor, first: int, lengths: Tensor, kv: KVPages) -> Tensor:
        """Read prompts into the pages from `first` on; return their next tokens [batch].

        tokens: [batch, width] padded token ids. first: the first page. lengths: [num_prompts] of all prompts.
            kv: pages for all prompts.
        """
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
        """Return each sequence up to its end token. written: [num_sequences, num_steps] token ids."""
        ends = set(self._ends.tolist())
        return [_cut(text, ends) for text in written.tolist()]


def _cut(tokens: list[int], ends: set[int]) -> list[int]:
    """Return the tokens up to the first end token, which is included; all of them if there is none."""
    end_index = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: end_index + 1]


# Reports progress: called with (kind, number done, total), it returns a function that is called with further
# numbers done.
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
    options: AnswerOptions,
    report_progress: Watch,
) -> list[Row]:
    """Return rows of everything that the base writes to these questions: plans, points, and direct answers to
    some; the answers are what is learned.

    questions: plain texts; each is a group. prompts: builds prompts as the master does. text: the tokenizer.
        writer: writes the answers. options: limits, and the fraction of direct answers. report_progress:
        called for each kind of answer.
    """
    rules = LISTS if prompts.listed else PlanRules(plan_tokens=options.plan_tokens)
    turns = [prompts.plan((Message("user", question),), rules) for question in questions]
    plans = [_Asked(group, turn.skeleton.tokens) for group, turn in enumerate(turns)]
    written = _write(plans, writer, options.plan_tokens, report_progress, "plans")
    rows = _rows(plans, written)
    points = [
        _Asked(asked.group, prompt)
        for asked, plan in zip(plans, written)
        for prompt in _branches(turns[asked.group], questions[asked.group], text.decode(plan))
    ]
    rows += _rows(points, _write(points, writer, options.answer_tokens, report_progress, "points"))
    direct = [
        _Asked(group, prompts.chat((Message("user", questions[group]),)))
        for group in _spread(len(questions), options.direct)
    ]
    return rows + _rows(direct, _write(direct, writer, options.answer_tokens, report_progress, "answers"))


def _write(
    requests: Sequence[_Asked], writer: Writer, max_tokens: int, report_progress: Watch, kind: str
) -> list[list[int]]:
    """Return the answers to these requests, in their order.

    requests: prompts. writer: writes them. max_tokens: of each answer. report_progress: is told of the kind
        of answers. kind: "plans", "points" or "answers".
    """
    return writer.write(
        [request.prompt for request in requests], max_tokens, report_progress(kind, 0, len(requests))
    )


def _rows(requests: Sequence[_Asked], answers: Sequence[Sequence[int]]) -> list[Row]:
    """Return a row for each request that was answered; prompts are not learned, answers are."""
    return [
        row_of(((request.prompt, False), (answer, True)), request.group)
        for request, answer in zip(requests, answers)
        if answer
    ]


def _branches(turn: Conversation, question: str, plan: str) -> list[tuple[int, ...]]:
    """Return the prompt of every point of a plan that stands alone; one that builds on others would need
    their texts.

    turn: the conversation that asked for the plan. question: plain text. plan: as the base wrote it.
    """
    points = (
        _listed_points(plan, question, turn.instructions) if turn.instructions is not None else _points(plan)
    )
    return [turn.branch(point, points, [], point.length).tokens for point in points if not point.needs]


def _points(plan: str) -> tuple[Point, ...]:
    """Return the points of a plan in the plan language; none if it cannot be read."""
    try:
        return read_plan(plan) or ()
    except PlanError:
        return ()


def _listed_points(plan: str, question: str, excluded_titles: Sequence[str]) -> tuple[Point, ...]:
    """Return the points of a numbered list, whose first number is the end of its prompt.

    plan: the list. question: plain text. excluded_titles: titles that the prompt already names, which are no
        points.
    """
    reader = ListReader(LISTS)
    reader.feed(plan)
    reader.finish()
    return keep_points(reader.points, question, excluded_titles)


def _spread(count: int, fraction: float) -> list[int]:
    """Return evenly spaced numbers of 0 .. count - 1, as many as the fraction says: (4, 0.5) -> [0, 2]; none
    for 0.
    """
    num_chosen = round(count * fraction)
    return sorted({index * count // num_chosen for index in range(num_chosen)}) if num_chosen else []
