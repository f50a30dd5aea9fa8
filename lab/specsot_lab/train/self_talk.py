"""Training rows of a chat model's own answers to questions that the model asks itself. Needs a GPU.

    python -m specsot_lab.train.self_talk MODEL rows.npz --data asked.jsonl --keep-away prompts.jsonl
    specsot train --model MODEL --output HEAD --data rows.npz ...

A chat model that reads its template up to the point where a user's turn begins writes a question. At a
temperature of 0.85 these questions cover what the model was tuned on. The model answers each question
greedily, is asked a second question in some conversations, and writes plans and their points with the prompts
that the master uses. A question that shares OVERLAP_WORDS consecutive words with a prompt of `--keep-away` is
dropped, so that a head is never measured on what it learned from. Several processes with different seeds
write several files, and `specsot train` reads them all.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from torch import Tensor

from specsot.checkpoint.fingerprint import fingerprint
from specsot.checkpoint.resolving import resolve_model
from specsot.params import Message
from specsot_lab.train.answers import Writer, answer_all
from specsot_lab.train.rows import Row, row_of, save
from specsot_lab.train.settings import AnswerOptions
from specsot_lab.train.text_files import read_questions, rows_of
from specsot_master.prompts import Prompts
from specsot_master.text import Text
from specsot_model.decoder import Decoder

# Every second question begins with one of these; the model begins the others as it likes.
STARTS: Final = """Write a Python function|Write a function|def |Solve|A store|A farmer|If|How many|How much
Calculate|Explain|What is|What are|Why|How do I|How can I|Describe|Compare|Write a story|Write a poem
Write an email|Compose|Imagine|Pretend|You are|Act as|Give me|List|Summarize|Rewrite|Translate|Edit
Extract|Classify|Can you|Could you|Please|Tell me|I need|I want|My|In|Design|Create|Develop|Draft
Suggest|Which|Who|Is it|Does|Should|Discuss|Analyze|Evaluate|Plan|Outline|Find|Identify|Complete|Given
Suppose|The following|Help me
Was sind|Wie kann ich|Erkläre|Nenne|¿Cómo|¿Qué|Explica|Escribe|请|如何|什么是|为什么"""
TEMPERATURE: Final = 0.85  # Of made-up questions. Untuned.
OVERLAP_WORDS: Final = 13  # Words in a row shared with a held-out prompt. Precedent: GPT-3's overlap rule.
MAX_QUESTION_WORDS: Final = 140  # Longer questions are mostly loops. Untuned.
MAX_QUESTION_CHARACTERS: Final = 900  # The same, for languages without spaces. Untuned.
QUESTION_TOKENS: Final = 160  # A made-up question that has not ended by then is dropped. Untuned.
SECOND_QUESTION_TOKENS: Final = 64  # The same, for a second question. Untuned.
QUESTION_PLACEHOLDER: Final = "QQQQ"  # Stands for a question while its place in the template is found.


@dataclass(frozen=True, slots=True)
class Amounts:
    """How many conversations of each kind are written, and their limits.

    max_made_up: Number of questions that the model is made to ask itself; unusable ones are dropped.
    max_given: Maximum number of questions from `--data` files.
    max_second_questions: Maximum number of conversations with a second question.
    max_planned: Maximum number of questions that are answered by a plan and its points.
    answer_tokens: Maximum number of tokens of a first answer.
    second_answer_tokens: Maximum number of tokens of a second answer.
    batch_size: Number of sequences that are written at a time.
    """

    max_made_up: int
    max_given: int
    max_second_questions: int
    max_planned: int
    answer_tokens: int
    second_answer_tokens: int
    batch_size: int


class SamplingDecoder:
    """A decoder whose largest logit is that of a token sampled from their softmax at a temperature (Gumbel
    trick). With it, a `Writer` samples.

    inner: The decoder.
    temperature: The temperature, above 0.
    """

    def __init__(self, inner: Decoder, temperature: float) -> None:
        """Store the arguments. Nothing is copied, so both decoders share their layers and KV.

        inner: The decoder.
        temperature: The temperature, above 0.
        """
        self._inner = inner
        self._temperature = temperature

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner decoder.

        name: Name of the attribute.
        """
        return getattr(self._inner, name)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return perturbed logits, [num_rows, vocab_size]. Their argmax is distributed as samples of the
        softmax are.

        hidden: [num_rows, hidden_size] hidden states after the last layer.
        """
        logits = self._inner.logits(hidden).float() / self._temperature
        return logits - torch.log(torch.empty_like(logits).exponential_())


class SelfTalk:
    """A chat model that writes the turns of the user and of the assistant.

    model: Directory or file of the model.
    device: Torch device. On "cpu" the model computes in fp32, elsewhere in bf16.
    amounts: How many conversations of each kind are written.
    seed: Seed of the choice of the questions' first words. Sampling uses torch's own seed.
    """

    def __init__(self, model: Path, device: str, amounts: Amounts, seed: int) -> None:
        """Load the model, and make one writer that answers greedily and one that samples questions at
        TEMPERATURE.

        model: Directory or file of the model.
        device: Torch device. On "cpu" the model computes in fp32, elsewhere in bf16.
        amounts: How many conversations of each kind are written.
        seed: Seed of the choice of the questions' first words.

        Raises ModelError if the model cannot be loaded.
        """
        self.text = Text(model)
        self.amounts = amounts
        self._random = Random(seed)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        decoder = Decoder.load(model, None, dtype, device)
        self.answers = Writer(decoder, self.text.end_ids, amounts.batch_size)
        sampling: Any = SamplingDecoder(decoder, TEMPERATURE)
        self._questions = Writer(sampling, self.text.end_ids, amounts.batch_size)
        self._ends = set(self.text.end_ids)

    def questions(self) -> Iterator[str]:
        """Yield the questions that the model asked itself. A question that reached its limit of tokens is
        left out.

        Every second question begins with a start that is chosen from STARTS, which is part of the question.
        White space around a question is removed; an empty question may be yielded.
        """
        starts = STARTS.replace("\n", "|").split("|")
        question_starts = [
            self._random.choice(starts) if number % 2 == 0 else ""
            for number in range(self.amounts.max_made_up)
        ]
        prompts = [self.text.encode(self._before_question(()) + start) for start in question_starts]
        for start, written in zip(question_starts, self._questions.write(prompts, QUESTION_TOKENS)):
            if self.has_ended(written):
                yield (start + self._decode(written)).strip()

    def second_questions(self, conversations: Sequence[tuple[Message, ...]]) -> list[str | None]:
        """Return the next question of the user in each conversation; None for a question that reached its
        limit of tokens.

        conversations: The messages of each conversation, which end with an answer.

        White space around a question is removed, so that a question may be empty. Without conversations the
        list is empty.
        """
        prompts = [self.text.encode(self._before_question(messages)) for messages in conversations]
        written = self._questions.write(prompts, SECOND_QUESTION_TOKENS)
        return [self._decode(ids).strip() if self.has_ended(ids) else None for ids in written]

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a conversation that the assistant is to continue.

        messages: The messages, which end with a question.
        """
        return tuple(self.text.encode(self.text.render(messages)))

    def has_ended(self, ids: Sequence[int]) -> bool:
        """Return True if the last token is an end token; False without tokens.

        ids: Token ids that the model wrote.
        """
        return bool(ids) and ids[-1] in self._ends

    def answer_text(self, ids: Sequence[int]) -> str:
        """Return the text of an answer, without end tokens and without white space around it.

        ids: Token ids of the answer.
        """
        return self._decode(ids).strip()

    def _decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without end tokens.

        ids: Token ids that the model wrote.
        """
        return self.text.decode([token for token in ids if token not in self._ends])

    def _before_question(self, messages: tuple[Message, ...]) -> str:
        """Return the text of the chat template up to where the user's next question begins.

        messages: The messages of the conversation so far; empty for a first question.
        """
        rendered = self.text.render((*messages, Message("user", QUESTION_PLACEHOLDER)))
        return rendered[: rendered.rindex(QUESTION_PLACEHOLDER)]


def words(text: str) -> list[str]:
    """Return the words of a text in lower case and in order. In scripts without spaces, each character is a
    word.

    text: Any text; without words the list is empty.
    """
    return re.findall(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+", text.lower())


def word_runs(text: str) -> set[str]:
    """Return all runs of OVERLAP_WORDS consecutive words of a text, each as one string. A shorter text is one
    run.

    text: Any text.
    """
    all_words = words(text)
    return {
        " ".join(all_words[index : index + OVERLAP_WORDS])
        for index in range(len(all_words) - OVERLAP_WORDS + 1)
    } or {" ".join(all_words)}


def usable_questions(questions: Iterable[str], held_out: set[str]) -> list[str]:
    """Return each usable question once, in order. A question is dropped if it has fewer than three words, is
    too long, contains the beginning of a special token, or shares a run of words with a held-out prompt.

    questions: The questions.
    held_out: The `word_runs` of all held-out prompts.

    The limits are MAX_QUESTION_WORDS words and MAX_QUESTION_CHARACTERS characters; the beginning of a special
    token is "<|".
    """
    chosen: dict[str, None] = {}
    for question in questions:
        count = len(words(question))
        has_usual_size = 3 <= count <= MAX_QUESTION_WORDS and len(question) <= MAX_QUESTION_CHARACTERS
        if has_usual_size and "<|" not in question and held_out.isdisjoint(word_runs(question)):
            chosen[question] = None
    return list(chosen)


def write_rows(
    chat_model: SelfTalk, model: Path, other_questions: Sequence[str], held_out: set[str], seed: int
) -> list[Row]:
    """Return rows of first answers, second answers and plans. All rows of a conversation have the same group.

    chat_model: The model that asks and answers.
    model: Directory or file of the model, for the prompts of plans.
    other_questions: Questions from `--data` files, in any order.
    held_out: The `word_runs` of all prompts that must not be asked.
    seed: Seed of the choice of questions and conversations.

    Own questions come first; given questions that repeat one of these are left out, and at most `max_given`
    of the rest are considered. The number of a question is the group of its rows.
    """
    amounts = chat_model.amounts
    random = Random(seed)
    own_questions = usable_questions(chat_model.questions(), held_out)
    given_questions = [question for question in other_questions if question not in set(own_questions)]
    random.shuffle(given_questions)
    questions = own_questions + usable_questions(given_questions[: amounts.max_given], held_out)
    prompts = [chat_model.prompt([Message("user", question)]) for question in questions]
    answers = chat_model.answers.write(prompts, amounts.answer_tokens)
    rows = _rows(prompts, answers, range(len(questions)))
    rows += _second_answers(chat_model, questions, prompts, answers, held_out, random)
    return rows + _plans(chat_model, model, questions, random)


def _second_answers(
    chat_model: SelfTalk,
    questions: Sequence[str],
    prompts: Sequence[tuple[int, ...]],
    answers: Sequence[Sequence[int]],
    held_out: set[str],
    random: Random,
) -> list[Row]:
    """Return rows of answers to the second question of conversations, in the group of the first question.
    Conversations are chosen from those whose first answer ended, and which are shorter than the limit of an
    answer.

    chat_model: The model that asks and answers.
    questions: The first questions.
    prompts: Token ids of the first prompts.
    answers: Token ids of the first answers.
    held_out: The `word_runs` of all prompts that must not be asked.
    random: Chooses the conversations.

    At most `max_second_questions` conversations are chosen. Second questions that have no end, fewer than two
    words, or a run of words of a held-out prompt are left out, and so are empty answers.
    """
    ended = [
        number
        for number, answer in enumerate(answers)
        if chat_model.has_ended(answer)
        and len(prompts[number]) + len(answer) < chat_model.amounts.answer_tokens
    ]
    random.shuffle(ended)
    ended = ended[: chat_model.amounts.max_second_questions]
    conversations = [
        (Message("user", questions[number]), Message("assistant", chat_model.answer_text(answers[number])))
        for number in ended
    ]
    requests = [
        (number, chat_model.prompt([*messages, Message("user", question)]))
        for number, messages, question in zip(
            ended, conversations, chat_model.second_questions(conversations)
        )
        if question and len(words(question)) >= 2 and held_out.isdisjoint(word_runs(question))
    ]
    second_prompts = [prompt for _, prompt in requests]
    second_answers = chat_model.answers.write(second_prompts, chat_model.amounts.second_answer_tokens)
    return _rows(second_prompts, second_answers, [number for number, _ in requests])


def _plans(chat_model: SelfTalk, model: Path, questions: Sequence[str], random: Random) -> list[Row]:
    """Return rows of plans and of their points, in the group of their question. Questions are chosen from
    those of at most 40 words; without any the list is empty.

    chat_model: The model that plans and writes.
    model: Directory or file of the model, for the prompts.
    questions: All questions.
    random: Chooses the questions.

    At most `max_planned` questions are chosen, at random. Rows have the answers learned, and the prompts not.
    """
    short_numbers = [number for number, question in enumerate(questions) if len(words(question)) <= 40]
    random.shuffle(short_numbers)
    planned_numbers = short_numbers[: chat_model.amounts.max_planned]
    if not planned_numbers:
        return []
    answer_options = AnswerOptions(
        0.0, plan_tokens=96, answer_tokens=224, together=chat_model.amounts.batch_size
    )
    planned_questions = [questions[number] for number in planned_numbers]
    rows = answer_all(
        planned_questions,
        Prompts(model, chat_model.text),
        chat_model.text,
        chat_model.answers,
        answer_options,
        _report_nothing,
    )
    return [Row(row.tokens, row.learned, planned_numbers[row.group]) for row in rows]


def _report_nothing(what: str, done: int, total: int) -> Callable[[int], object]:
    """Return a function that ignores progress; see `ReportProgress`.

    what: Kind of the answers.
    done: Number of answers that are done.
    total: Number of all answers.
    """
    return lambda more: None


def _read_all(files: Sequence[Path]) -> list[str]:
    """Return the questions of all files, in order.

    files: JSON lines, or text with one question on each line.
    """
    return [question for file in files for question in read_questions(file, ("{}",))]


def _rows(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], groups: Iterable[int]
) -> list[Row]:
    """Return a row for each prompt that was answered. The answer is learned and the prompt is not.

    prompts: Token ids of each prompt.
    answers: Token ids of each answer; prompts with an empty answer are left out.
    groups: Number of each prompt's group.

    The lists are read in parallel, up to the shortest.
    """
    return [
        row_of(((prompt, False), (ids, True)), group)
        for prompt, ids, group in zip(prompts, answers, groups)
        if ids
    ]


def main() -> None:
    """Read the command line, write the rows, and print how many there are.

    MODEL and the file to write are required; all other options have defaults. Questions of the model's own
    come first, then those of --data; conversations of --answers are added as they are. An existing file is
    replaced. The process exits with status 0, with 2 for an unknown option or a missing argument, and with a
    traceback if a model or file cannot be read.
    """
    reader = argparse.ArgumentParser(
        description="Write rows of a chat model's own answers, for `specsot train`."
    )
    reader.add_argument("model")
    reader.add_argument("rows", type=Path, help="File to write, such as rows.npz.")
    reader.add_argument("--data", type=Path, nargs="*", default=[], help="Questions of others, JSON lines.")
    reader.add_argument(
        "--answers", type=Path, nargs="*", default=[], help="Conversations to add as they are."
    )
    reader.add_argument(
        "--keep-away", type=Path, nargs="*", default=[], help="Prompts that heads are measured on."
    )
    reader.add_argument("--device", default="cuda")
    reader.add_argument("--seed", type=int, default=0)
    reader.add_argument("--made-up", type=int, default=44_000)
    reader.add_argument("--given", type=int, default=14_000)
    reader.add_argument("--again", type=int, default=9_000)
    reader.add_argument("--planned", type=int, default=4_000)
    reader.add_argument("--answer-tokens", type=int, default=384)
    reader.add_argument("--second-tokens", type=int, default=256)
    reader.add_argument("--together", type=int, default=2048, help="Sequences in one batch.")
    options = reader.parse_args()

    model = resolve_model(options.model)
    started = time.monotonic()
    torch.manual_seed(options.seed)
    amounts = Amounts(
        options.made_up,
        options.given,
        options.again,
        options.planned,
        options.answer_tokens,
        options.second_tokens,
        options.together,
    )
    chat_model = SelfTalk(model, options.device, amounts, options.seed)
    held_out = set(chain.from_iterable(map(word_runs, _read_all(options.keep_away))))
    rows = write_rows(chat_model, model, _read_all(options.data), held_out, options.seed)
    for file in options.answers:
        rows += rows_of(file, chat_model.text, 512, 1 + max(row.group for row in rows))
    save(rows, options.rows, {"model": fingerprint(model)})
    learned = sum(int(row.learned.sum()) for row in rows)
    print(f"{len(rows)} rows, {learned} tokens to learn, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
