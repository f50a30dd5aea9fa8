"""Answers that the base model writes to questions, in the prompts that the master uses, many at a time."""

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

# Token ids of a prompt.
Tokens = Sequence[int]
# Rules for the plans of a base model that was not trained to plan.
LIST_RULES = PlanRules(direct=False, max_points=MAX_LIST_POINTS, listed=True)
# Tokens of prompts in one forward pass, padding included. Bounds the memory. Untuned.
MAX_PREFILL_TOKENS = 131_072
# Steps between two checks whether all sequences have ended. A check waits for the device. Untuned.
STEPS_PER_END_CHECK = 16


class Writer:
    """Writes answers greedily, many sequences at a time. A sequence ends with one of the base model's end
    tokens, or at a limit.
    """

    def __init__(self, decoder: Decoder, ends: Sequence[int], batch_size: int) -> None:
        """Prepare to write; nothing is allocated yet.

        decoder: The base model with all of its layers.
        ends: Token ids that end an answer.
        batch_size: Maximum number of sequences that are written at a time.

        Sequences that reach no end token are limited by `write`.
        """
        self._decoder = decoder
        self._batch_size = batch_size
        self._ends = torch.tensor(sorted(ends), device=decoder.device)

    def write(
        self, prompts: Sequence[Tokens], max_tokens: int, on_written: Callable[[int], object] = lambda _: None
    ) -> list[list[int]]:
        """Return the answer to each prompt, in the order of the prompts. An answer includes its end token,
        unless it reached the limit first.

        A prompt that leaves no room for `max_tokens` tokens in the model's context is answered with an empty
        list.

        prompts: Token ids of each prompt.
        max_tokens: Maximum number of tokens of an answer.
        on_written: Called after each batch with the number of prompts that were answered in it, and last with
            the number of prompts that were too long.

        An answer has at least one token unless its prompt was too long. Shorter prompts are answered first,
        so that prompts of similar length share a batch. `on_written` is called last with 0 if no prompt was
        too long.
        """
        max_prompt_tokens = self._decoder.config.max_positions - max_tokens
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        fitting = [number for number in order if len(prompts[number]) <= max_prompt_tokens]
        written: list[list[int]] = [[] for _ in prompts]
        for first in range(0, len(fitting), self._batch_size):
            numbers = fitting[first : first + self._batch_size]
            for number, answer in zip(
                numbers, self._write([prompts[number] for number in numbers], max_tokens)
            ):
                written[number] = answer
            on_written(len(numbers))
        on_written(len(order) - len(fitting))
        return written

    @torch.inference_mode()
    def _write(self, prompts: Sequence[Tokens], max_tokens: int) -> list[list[int]]:
        """Return the answers to prompts that are written as one batch, in their order.

        prompts: Token ids of each prompt, at least one.
        max_tokens: Maximum number of tokens of an answer.

        Each sequence gets a KV page for the longest prompt and `max_tokens` tokens. Writing stops early when
        all sequences have ended, which is checked every STEPS_PER_END_CHECK steps.
        """
        decoder = self._decoder
        device = self._decoder.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        page = int(lengths.max()) + max_tokens
        kv = decoder.make_kv(len(prompts), page)
        token = self._prefill_all(prompts, lengths, kv)
        pages = torch.arange(len(prompts), device=device) * page
        written = [token]
        ended = torch.isin(token, self._ends)
        for step in range(max_tokens - 1):
            if step % STEPS_PER_END_CHECK == 0 and bool(ended.all()):
                break
            columns = min(int(page - max_tokens + step + 1), page)
            hidden, _ = decoder.forward(
                decoder.embed(token),
                lengths,
                pages + lengths,
                next_plan(lengths + 1, columns),
                kv,
                tokens=token,
            )
            token = decoder.logits(hidden).argmax(-1)
            lengths = lengths + 1
            written.append(token)
            ended |= torch.isin(token, self._ends)
        return self._until_ends(torch.stack(written, 1))

    def _prefill_all(self, prompts: Sequence[Tokens], lengths: Tensor, kv: KVPages) -> Tensor:
        """Write the KV of all prompts, and return the first token after each prompt, [num_prompts].

        Prompts are read in parts of at most MAX_PREFILL_TOKENS, or one by one if they are longer. The KV of
        padding is overwritten by later tokens.

        prompts: Token ids of each prompt; prompt i fills page i.
        lengths: [num_prompts] number of tokens of each prompt.
        kv: KV cache with a page for each prompt.

        The longest prompt must have at least one token.
        """
        width = int(lengths.max())
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for row_number, prompt in enumerate(prompts):
            tokens[row_number, : len(prompt)] = torch.tensor(prompt)
        parts = tokens.to(self._decoder.device).split(max(1, MAX_PREFILL_TOKENS // width))
        pages = range(0, len(prompts), len(parts[0]))
        return torch.cat([self._prefill(part, first, lengths, kv) for part, first in zip(parts, pages)])

    def _prefill(self, tokens: Tensor, first_page: int, lengths: Tensor, kv: KVPages) -> Tensor:
        """Write the KV of some prompts, and return the first token after each of them, [batch].

        tokens: [batch, width] token ids, padded at the end.
        first_page: Page of the first of these prompts; the others fill the following pages.
        lengths: [num_prompts] number of tokens of all prompts, also of those in other parts.
        kv: KV cache with a page for each prompt.

        The first token is the most probable one.
        """
        decoder = self._decoder
        device = self._decoder.device
        batch, width = tokens.shape
        positions = torch.arange(width, device=device).repeat(batch)
        slots = ((first_page + torch.arange(batch, device=device))[:, None] * kv.page_rows).add(
            positions[:width]
        )
        tokens = tokens.reshape(-1)
        plan = causal_plan(batch, first_page)
        hidden, _ = decoder.forward(
            decoder.embed(tokens), positions, slots.reshape(-1), plan, kv, tokens=tokens
        )
        last = torch.arange(batch, device=device) * width + lengths[first_page : first_page + batch] - 1
        return decoder.logits(hidden[last]).argmax(-1)

    def _until_ends(self, written: Tensor) -> list[list[int]]:
        """Return each sequence up to its end token, which is included.

        written: [num_sequences, num_steps] token ids; those after an end token mean nothing.
        """
        ends = set(self._ends.tolist())
        return [_until_first_end(tokens, ends) for tokens in written.tolist()]


def _until_first_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Return the tokens up to the first end token, which is included; all tokens if there is none.

    tokens: Token ids of one answer.
    ends: The end tokens.
    """
    end_index = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: end_index + 1]


# Starts to report progress. It is called with (kind of answers, number done, total number), and returns a
# function that is called with each further number of answers that are done.
ReportProgress = Callable[[str, int, int], Callable[[int], object]]


@dataclass(frozen=True, slots=True)
class _Request:
    """One prompt that is to be answered.

    group: Number of the question to which the prompt belongs.
    prompt: Token ids of the prompt.
    """

    group: int
    prompt: tuple[int, ...]


def answer_all(
    questions: Sequence[str],
    prompts: Prompts,
    text: Text,
    writer: Writer,
    options: AnswerOptions,
    report_progress: ReportProgress,
) -> list[Row]:
    """Return rows of everything that the base model writes to these questions: plans, the points of the
    plans, and direct answers to some questions. The tokens of the answers are marked as learned. A request
    that got no answer has no row.

    questions: The questions. The number of a question is the group of its rows.
    prompts: Builds the prompts as the master does.
    text: The tokenizer.
    writer: Writes the answers.
    options: The limits, and the fraction of questions that are answered directly, too.
    report_progress: Called once for each kind of answers: "plans", "points" and "answers".

    A base model that was not trained to plan is asked for a numbered list; its points are those that the
    master would keep. Points that build on other points are not written. The prompts of answers are not
    learned. The rows of plans come first, then those of points, then those of direct answers to evenly spread
    questions.
    """
    rules = LIST_RULES if prompts.listed else PlanRules(plan_tokens=options.plan_tokens)
    turns = [prompts.plan((Message("user", question),), rules) for question in questions]
    plans = [_Request(group, turn.skeleton.tokens) for group, turn in enumerate(turns)]
    written = _write(plans, writer, options.plan_tokens, report_progress, "plans")
    rows = _rows(plans, written)
    points = [
        _Request(request.group, prompt)
        for request, plan in zip(plans, written)
        for prompt in _branches(turns[request.group], questions[request.group], text.decode(plan))
    ]
    rows += _rows(points, _write(points, writer, options.answer_tokens, report_progress, "points"))
    direct = [
        _Request(group, prompts.chat((Message("user", questions[group]),)))
        for group in _spread_indexes(len(questions), options.direct)
    ]
    return rows + _rows(direct, _write(direct, writer, options.answer_tokens, report_progress, "answers"))


def _write(
    requests: Sequence[_Request], writer: Writer, max_tokens: int, report_progress: ReportProgress, kind: str
) -> list[list[int]]:
    """Return the answers to these requests, in their order; an empty list for a prompt that is too long.

    requests: The prompts.
    writer: Writes the answers.
    max_tokens: Maximum number of tokens of an answer.
    report_progress: Called with the kind and the number of answers.
    kind: What progress is reported as: "plans", "points" or "answers".
    """
    return writer.write(
        [request.prompt for request in requests], max_tokens, report_progress(kind, 0, len(requests))
    )


def _rows(requests: Sequence[_Request], answers: Sequence[Sequence[int]]) -> list[Row]:
    """Return a row for each request that was answered. The answer is learned and the prompt is not.

    requests: The prompts.
    answers: Token ids of each request's answer; requests with an empty answer are left out.
    """
    return [
        row_of(((request.prompt, False), (answer, True)), request.group)
        for request, answer in zip(requests, answers)
        if answer
    ]


def _branches(turn: Conversation, question: str, plan: str) -> list[tuple[int, ...]]:
    """Return the prompt of each point of a plan, as token ids; none if the plan has no points. A point that
    builds on other points is left out, because its prompt would need their texts.

    turn: The conversation that asked for the plan.
    question: The words of the question.
    plan: The plan as the base model wrote it.
    """
    points = (
        _listed_points(plan, question, turn.instructions) if turn.instructions is not None else _points(plan)
    )
    return [turn.branch(point, points, [], point.length).tokens for point in points if not point.needs]


def _points(plan: str) -> tuple[Point, ...]:
    """Return the points of a plan in the plan language; none if it cannot be read, or is a direct answer.

    plan: The plan as the base model wrote it.
    """
    try:
        return read_plan(plan) or ()
    except PlanError:
        return ()


def _listed_points(plan: str, question: str, excluded_titles: Sequence[str]) -> tuple[Point, ...]:
    """Return the points of a numbered list that the master would keep; none if the text is no list.

    plan: The list as the base model wrote it. Its first number is the end of the prompt, and is not part of
        the text.
    question: The words of the question.
    excluded_titles: Titles that the prompt names, which are not accepted as points.

    Titles that are incomplete, or repeat an earlier title, the question or the instructions, are dropped by
    the rules of the master; the others get the ids 1, 2, and so on.
    """
    reader = ListReader(LIST_RULES)
    reader.feed(plan)
    reader.finish()
    return keep_points(reader.points, question, excluded_titles)


def _spread_indexes(count: int, fraction: float) -> list[int]:
    """Return evenly spaced numbers of 0 .. count - 1, ascending: (4, 0.5) -> [0, 2]. Return an empty list if
    the fraction amounts to no number.

    count: Number of elements to choose from.
    fraction: Fraction of the elements that is chosen, 0 to 1.
    """
    num_chosen = round(count * fraction)
    return sorted({index * count // num_chosen for index in range(num_chosen)}) if num_chosen else []
