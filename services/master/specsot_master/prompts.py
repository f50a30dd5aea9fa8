"""Prompt tokens of a request: the shared prefix, the planning turn, one turn per point, plain chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from specsot.checkpoint.resolving import folder_of_model
from specsot.core.list_plan import LIST_HEAD
from specsot.core.skeleton import PlanRules, Point
from specsot.errors import ModelError
from specsot.params import Ask, Message, PlanStyle
from specsot_master.chat_template import TemplateRefused
from specsot_master.core.plans.fork_plan import TAGS, find_tags
from specsot_master.core.plans.prompts import (
    SAMPLE_POINT,
    Conversation,
    PromptTurn,
    find_slots,
    shared_length,
    shared_text,
    turn_from,
)
from specsot_master.core.plans.router import BEGUN, ONE, SEVERAL, ScorePrompt, compares, points_asked
from specsot_master.core.plans.wording import (
    DEFAULT_FORM,
    Form,
    Wording,
    append_words,
    read_wording,
    write_list,
)
from specsot_master.text import Text


class Prompts:
    """All prompts of one model. listed: it plans in numbered lists; tags: it was taught
    to fork by these; else it plans by the parts in its directory.
    threshold: of the router's score, where it was measured for this model.
    wording: how lists and their points are asked for.
    """

    def __init__(self, directory: str | Path, text: Text, style: PlanStyle = "auto") -> None:
        """Raises ModelError when the model's specsot.json cannot be used, or is missing for the style."""
        folder = folder_of_model(Path(directory))
        self._text = text
        self._parts = read_parts(folder)
        if not text.encode(BEGUN):
            raise ModelError(f"{folder}: its tokenizer has no tokens for text")
        if style == "auto" and self._parts:
            style = self._parts.plan_style
        self.wording = self._parts.wording if self._parts else Wording()
        self.score_words = (self._tokens_behind(SEVERAL), self._tokens_behind(ONE))
        self.threshold = read_threshold(folder) if all(self.score_words) else None
        tags = find_tags(text.encode, text.decode) if style in ("tags", "auto") else None
        if style == "tags" and tags is None:
            raise ModelError(f"plan style tags: the tokenizer of {folder} has no {', '.join(TAGS)}")
        self.tags = tags
        self.listed = style == "list" or (style == "auto" and not tags)

    def check_fits(self, ask: Ask, positions: int) -> None:
        """Raises ContextLengthExceeded for a text of which a part alone is longer."""
        for text in (ask.prompt or "", *(message.content for message in ask.messages)):
            self._text.check_fits(text, positions)

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A plain answer's prompt. Raises TemplateRefused."""
        return self._text.encode(self._text.render(messages))

    @property
    def style(self) -> str:
        """As `--plan-style` names it."""
        return "tags" if self.tags else "list" if self.listed else "markers"

    def thinking(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The same up to where the model begins to think, if it does. Raises TemplateRefused."""
        if self._text.thinking == "never":
            return self.chat(messages)
        turns = [{"role": one.role, "content": one.content} for one in messages]
        return self._text.encode(self._text.render_turns(turns, (), thinks=True))

    def score(self, messages: Sequence[Message]) -> ScorePrompt:
        """What the router asks the model, where there is a threshold. Raises TemplateRefused."""
        begun = head_of_answer(self._text.render(messages), BEGUN)
        return ScorePrompt(self._text.encode(begun), *self.score_words, self.threshold or 0.0)

    def _tokens_behind(self, words: Sequence[str]) -> tuple[int, ...]:
        """Of those that are one token behind the beginning of an answer."""
        begun = self._text.encode(BEGUN)
        found = (self._text.encode(BEGUN + word) for word in words)
        return tuple(tokens[-1] for tokens in found if tokens[:-1] == begun)

    def size(self, text: str) -> int:
        """Tokens of a text of ours in the answer."""
        return len(self._text.encode(text))

    def plan(self, messages: Sequence[Message], rules: PlanRules) -> Conversation:
        """A planned answer's prompts. Raises TemplateRefused."""
        if self.listed:
            return ListConversation(self._text, messages, rules, self.wording)
        if self._parts and self._parts.branch_turn:
            return PartsConversation(self._text, fill_skeleton(self._parts, rules), messages)
        return MarkersConversation(self._text, messages, rules)


def messages_of(ask: Ask) -> tuple[Message, ...]:
    """A request's conversation; a bare prompt is one user turn."""
    return ask.messages if ask.prompt is None else (Message("user", ask.prompt),)


class ListConversation:
    """The turns of one request to a model that was not taught to plan: asked as people ask."""

    # What the answer to the planning turn begins with, as a part of the prompt.
    plan_head = LIST_HEAD

    def __init__(
        self, text: Text, messages: Sequence[Message], rules: PlanRules, wording: Wording | None = None
    ) -> None:
        """Raises TemplateRefused when the template takes the conversation in no form."""
        wording = wording or Wording()
        question = messages[-1].content
        self._text = text
        self._messages = tuple(messages)
        self._sentences = wording.of(question)
        self._list_words = self._ask_for_plan(rules)
        self.told: tuple[str, ...] | None = (self._list_words,)
        self._form: Form = wording.form
        asked = self._render(self._list_words)
        try:
            self._slots = find_slots(self._render_branch, text.mark, self._num_places)
            probe = self._render_branch(*self._branch_words(SAMPLE_POINT, [SAMPLE_POINT]))
        except TemplateRefused:  # an answer followed by another question
            self._form = DEFAULT_FORM
            self._slots = find_slots(self._render_branch, text.mark)
            probe = self._render_branch(*self._branch_words(SAMPLE_POINT, [SAMPLE_POINT]))
        cut, end = text.cut(asked, shared_text(asked, probe))
        self._head = asked[:cut]
        self._joint = asked[cut:end]
        self._known = text.encode(self._head) if self._head else ()
        skeleton = self._tokens(head_of_answer(asked, self.plan_head))
        branch = self._tokens(probe)
        self.prefix = skeleton[: min(shared_length(skeleton, branch, len(self._known)), len(skeleton) - 1)]
        self.skeleton: PromptTurn = turn_from(self.prefix, skeleton, len(self._known))
        self.answer: PromptTurn = turn_from(self.prefix, text.encode(text.render(self._messages)))
        self.asked = len(self.answer.tokens)
        self.behind = len(probe) - (len(self._head) if self._slots else 0)

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        return self._branch_turn(self._branch_words(point, points))

    def _branch_turn(self, words: Sequence[str]) -> PromptTurn:
        """Return the prompt of a branch from what `_branch_words` returns."""
        if self._slots:
            rendering = self._slots.fill(*map(self._text.mark, words))
        else:
            rendering = self._render_branch(*words)
        return turn_from(self.prefix, self._tokens(rendering), len(self._known))

    def polish(self, text: str) -> PromptTurn:
        words = self._sentences.polish.replace("{text}", text)
        return turn_from(self.prefix, self._tokens(self._render(words)), len(self._known))

    def _ask_for_plan(self, rules: PlanRules) -> str:
        """Return the words that follow the question and ask for the plan."""
        question = self._messages[-1].content
        exact = points_asked(question) == rules.max_points
        return self._sentences.ask_for_list(rules.max_points, exact, compares(question))

    @property
    def _num_places(self) -> int:
        """How many texts `_branch_words` returns."""
        return 2 if self._form == "turns" else 1

    def _branch_words(self, point: Point, points: Sequence[Point]) -> tuple[str, ...]:
        """Return what a branch's prompt holds of the plan; in turns, the list is a text of its own."""
        words = self._sentences.ask_for_point(self._form, point, points)
        return (write_list(points), words) if self._form == "turns" else (words,)

    def _render_branch(self, *words: str) -> str:
        """Render the prompt of a branch from what `_branch_words` returns."""
        if self._form == "turns":
            written, asked = words
            first = ask_after(self._messages, self._list_words, joined=False)
            return self._text.render((*first, Message("assistant", written), Message("user", asked)))
        return self._render(*words, paragraph=self._form == "outline")

    def _render(self, words: str, paragraph: bool = False) -> str:
        return render_asked(self._text, self._messages, words, paragraph)

    def _tokens(self, rendering: str) -> tuple[int, ...]:
        """The text before the cut is known."""
        cut = len(self._head)
        if self._joint and rendering.startswith(self._joint, cut) and rendering.startswith(self._head):
            return self._known + self._text.encode(rendering[cut:])
        return self._text.encode(rendering)


class MarkersConversation(ListConversation):
    """The turns of one request for a plan in markers, to any chat model: it is told the language of markers.

    The words are those of the shipped MARKERS_FILE, in the format of a model's specsot.json.
    """

    plan_head = ""

    def __init__(self, text: Text, messages: Sequence[Message], rules: PlanRules) -> None:
        """Raises TemplateRefused when the template takes the conversation in no form."""
        super().__init__(text, messages, rules, Wording(form="question"))
        self.told = None

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        return self._branch_turn((_fill_branch(shipped_parts(), point, points, parents, length),))

    def _ask_for_plan(self, rules: PlanRules) -> str:
        return fill_skeleton(shipped_parts(), rules).skeleton_turn

    def _branch_words(self, point: Point, points: Sequence[Point]) -> tuple[str, ...]:
        return (_fill_branch(shipped_parts(), point, points, [], 1),)


def head_of_answer(rendering: str, words: str) -> str:
    """The prompt with these words begun in its answer; "Assistant:" is followed by a space."""
    return f"{rendering} {words}" if rendering.endswith(":") else rendering + words


def ask_after(
    messages: tuple[Message, ...], words: str, paragraph: bool = False, joined: bool = True
) -> tuple[Message, ...]:
    """Return the conversation with these words after its last turn: within a user's turn, and, unless
    `joined` is set, as a turn of their own after any other.
    """
    last = messages[-1]
    if last.role != "user" and not joined:
        return (*messages, Message("user", words))
    return (*messages[:-1], Message(last.role, append_words(last.content, words, paragraph)))


def render_asked(text: Text, messages: tuple[Message, ...], words: str, paragraph: bool = False) -> str:
    """Render the conversation with these words after its last turn; in a turn of their own after one that is
    not the user's, unless the template refuses that. paragraph: see `append_words`.
    """
    try:
        return text.render(ask_after(messages, words, paragraph, joined=False))
    except TemplateRefused:
        if messages[-1].role == "user":
            raise
        return text.render(ask_after(messages, words, paragraph))


ROUTER_FILE = "router.json"


def read_threshold(directory: Path) -> float | None:
    """What `specsot eval --router` measured for the model of this directory. Raises ModelError."""
    path = directory / ROUTER_FILE
    if not path.is_file():
        return None
    try:
        threshold = json.loads(path.read_text(encoding="utf-8"))["threshold"]
        return None if threshold is None else float(threshold)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from error


PARTS_FILE = "specsot.json"
MARKERS_FILE = Path(__file__).with_name("markers.json")


@dataclass(frozen=True, slots=True)
class PromptParts:
    """What specsot.json may say. {plan}, {id}, {title}, {length} and {text} are filled in; in skeleton_turn
    {points}, how many points a plan may have, and {tools}, the names that may stand in TOOL.

    plan_style: what the model was taught; "auto": the file says nothing of that.
    skeleton_turn, branch_turn: turns of the language of markers, which needs both.
    parent_text: how a finished point is quoted after the plan, for a point that builds on it.
    wording: how the model is asked for lists and their points.
    """

    skeleton_turn: str = ""
    branch_turn: str = ""
    plan_style: PlanStyle = "markers"
    system: str = ""
    plan_line: str = "{id}. {title}\n"
    parent_text: str = "\n{id}. {title}\n{text}\n"
    answer_prefix: str = ""
    wording: Wording = field(default_factory=Wording)


def fill_skeleton(parts: PromptParts, rules: PlanRules) -> PromptParts:
    """The parts with the rules of one request in the planning turn."""
    tools = ", ".join((*rules.tools, "None"))
    words = parts.skeleton_turn.replace("{points}", str(rules.max_points)).replace("{tools}", tools)
    return replace(parts, skeleton_turn=words)


def read_parts(directory: Path) -> PromptParts | None:
    """The parts of a model directory, None when it has none. Raises ModelError."""
    path = directory / PARTS_FILE
    return read_parts_file(path) if path.is_file() else None


@cache
def shipped_parts() -> PromptParts:
    """How any chat model is asked for a plan in markers."""
    return read_parts_file(MARKERS_FILE)


def read_parts_file(path: Path) -> PromptParts:
    """Raises ModelError."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        parts = _parts_of(given)
        _fill_branch(parts, SAMPLE_POINT, [SAMPLE_POINT], [(SAMPLE_POINT, "")], 1)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from error
    return parts


def _parts_of(given: dict[str, Any]) -> PromptParts:
    """Raises ValueError, TypeError."""
    known = {field.name: given[field.name] for field in fields(PromptParts) if field.name in given}
    if "wording" in known:
        known["wording"] = read_wording(known["wording"])
        if not known.keys() & {"plan_style", "skeleton_turn", "branch_turn"}:
            return PromptParts(**known, plan_style="auto")
    parts = PromptParts(**known)
    if parts.plan_style not in get_args(PlanStyle) or parts.plan_style == "auto":
        raise ValueError(f"plan_style is list, markers or tags, got {parts.plan_style!r}")
    if parts.plan_style == "markers" and not (parts.skeleton_turn and parts.branch_turn):
        raise ValueError("markers need skeleton_turn and branch_turn")
    return parts


class PartsConversation:
    """The turns of one request to a model with its own parts, which was taught the language of markers."""

    told: tuple[str, ...] | None = None

    def __init__(self, text: Text, parts: PromptParts, messages: Sequence[Message]) -> None:
        """Raises TemplateRefused, and ModelError for a template that these parts cannot use."""
        self._text = text
        self._parts = parts
        self._messages = _with_system(parts.system, tuple(messages))
        self._opening = text.render(self._messages, answer=False)
        self.prefix = text.encode(self._opening)
        self._place = find_slots(self._ask, text.mark)
        self._head = text.encode(self._answer(parts.skeleton_turn) + parts.answer_prefix)
        self.skeleton: PromptTurn = self._turn(parts.skeleton_turn)
        asked = len(self._ask(parts.skeleton_turn))
        self.behind = asked - (len(self._opening) if self._place else 0)
        self.answer: PromptTurn = turn_from(self.prefix, text.encode(text.render(messages)))
        self.asked = len(self.answer.tokens)

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        return self._turn(_fill_branch(self._parts, point, points, parents, length))

    def polish(self, text: str) -> PromptTurn:
        sentences = self._parts.wording.of(self._messages[-1].content)
        return self._turn(sentences.polish.replace("{text}", text))

    def _turn(self, words: str) -> PromptTurn:
        """prefix | turn | head of the answer, each tokenised alone."""
        place = self._place
        asked = place.fill(self._text.mark(words)) if place else self._ask(words)
        if not asked.startswith(self._opening):
            raise _misplaced()
        turn = self._text.encode(asked[len(self._opening) :])
        return PromptTurn(self.prefix + turn + self._head, len(self.prefix))

    def _ask(self, words: str) -> str:
        return self._text.render((*self._messages, Message("user", words)), answer=False)

    def _answer(self, words: str) -> str:
        """The head of the answer to a turn, whatever its words. Raises ModelError."""
        asked = self._ask(words)
        answered = self._text.render((*self._messages, Message("user", words)))
        if not (asked.startswith(self._opening) and answered.startswith(asked)):
            raise _misplaced()
        return answered[len(asked) :]


def _misplaced() -> ModelError:
    return ModelError(f"{PARTS_FILE} needs a chat template that renders turns one behind the other")


def _fill_branch(
    parts: PromptParts,
    point: Point,
    points: Sequence[Point],
    parents: Sequence[tuple[Point, str]],
    length: int,
) -> str:
    plan = "".join(parts.plan_line.format(id=other.id, title=other.title) for other in points)
    read = "".join(parts.parent_text.format(id=one.id, title=one.title, text=text) for one, text in parents)
    return parts.branch_turn.format(plan=plan + read, id=point.id, title=point.title, length=length)


def _with_system(system: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The model's own system words first, then those of the caller, in one turn."""
    if not system:
        return messages
    if messages[0].role == "system":
        joined = Message("system", f"{system}\n\n{messages[0].content}")
        return (joined, *messages[1:])
    return (Message("system", system), *messages)
