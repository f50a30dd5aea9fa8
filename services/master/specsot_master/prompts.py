"""Makes a request's prompts in tokens: the shared prefix, the planning turn, one turn per point, chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_args

from specsot.checkpoint.resolving import folder_of_model
from specsot.core.list_plan import LIST_HEAD
from specsot.core.skeleton import PlanRules, Point
from specsot.errors import ModelError
from specsot.params import Ask, Message, PlanStyle
from specsot_master.chat_template import TemplateRefused
from specsot_master.core.plans.fork_plan import TAGS, find_tags
from specsot_master.core.plans.merged_answer import heading_of
from specsot_master.core.plans.prompts import (
    SAMPLE_POINT,
    Conversation,
    PromptTurn,
    TurnSlots,
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

# Characters. Shorter prompts are tokenized on the event loop, which takes a few ms; longer ones in a thread.
THREAD_CHARACTERS: Final = 16 << 10


class Prompts:
    """Makes the prompts of all requests to one model, in tokens.

    Attributes: `style` is the model's way to plan, as `--plan-style` names it: "tags", "list" or "markers".
    `listed` is set if the model is asked for a numbered list: in the style "list", and in the style "markers"
    if the model has no prompt of its own for markers, so that the master writes them. `tags` are the fork
    tags of a model that was trained to fork, else None. `threshold` is the router's measured score threshold
    for this model, or None. `wording` holds the sentences that ask for lists and points.
    """

    def __init__(self, directory: str | Path, text: Text, style: PlanStyle = "auto") -> None:
        """Read the model's own prompt parts, if its directory has any. The model plans in lists if its style
        is "list", or if it is "auto" and it has no fork tags. The router's threshold is read only if both
        sides of its score have words of a single token.

        directory: the model's directory, or a GGUF file in it.
        text: the model's tokenizer and chat template.
        style: how the model plans; "auto" takes the style of specsot.json, else fork tags if the tokenizer
            has them, else lists.

        Raises ModelError if specsot.json cannot be used, if the tokenizer has no tokens for text, or if it
        lacks the tags of a style "tags".
        """
        folder = folder_of_model(Path(directory))
        self._text = text
        self._parts = read_parts(folder)
        if not text.encode(BEGUN):
            raise ModelError(f"{folder}: its tokenizer has no tokens for text")
        if style == "auto" and self._parts:
            style = self._parts.plan_style
        self.wording = self._parts.wording if self._parts else Wording()
        self.score_words = (self._tokens_after(SEVERAL), self._tokens_after(ONE))
        self.threshold = read_threshold(folder) if all(self.score_words) else None
        tags = find_tags(text.encode, text.decode) if style in ("tags", "auto") else None
        if style == "tags" and tags is None:
            raise ModelError(f"plan style tags: the tokenizer of {folder} has no {', '.join(TAGS)}")
        self.tags = tags
        self.style = style if style != "auto" else "tags" if tags else "list"
        parts = self._parts
        trained = bool(parts and parts.skeleton_turn and parts.branch_turn)
        # The prompts of a model that writes markers itself, or None.
        self._marker_parts = parts if trained and self.style == "markers" else None
        self.listed = not tags and self._marker_parts is None

    def check_fits(self, ask: Ask, max_positions: int) -> None:
        """Raise ContextLengthExceeded if the first part of one message alone fills the context. A request
        that passes this check may still be too long; its prompts are checked once they are tokenized.

        ask: what the client asks for; its prompt and each of its messages are checked.
        max_positions: the model's context, in tokens.
        """
        for text in (ask.prompt or "", *(message.content for message in ask.messages)):
            self._text.check_fits(text, max_positions)

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of the prompt of a direct answer, as the model's chat template renders it with
        thinking off.

        messages: the conversation, oldest turn first.

        Raises TemplateRefused if the template does not take this conversation.
        """
        return self._text.encode(self._text.render(messages))

    def thinking(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of the prompt of a direct answer, with a thinking block opened if the model
        can think; else the prompt that `chat` returns. Control tokens in the messages become ordinary text.

        messages: the conversation, oldest turn first.

        Raises TemplateRefused if the template does not take this conversation.
        """
        if self._text.thinking == "never":
            return self.chat(messages)
        turns = [{"role": one.role, "content": one.content} for one in messages]
        return self._text.encode(self._text.render_turns(turns, (), with_thinking=True))

    def score(self, messages: Sequence[Message]) -> ScorePrompt:
        """Return the prompt by which the router lets the model decide whether to plan. It ends in the first
        words of an answer, and names the tokens whose probabilities count for each side. A model without a
        threshold gets the threshold 0. The beginning that the prompt ends with is BEGUN.

        messages: the conversation, oldest turn first.

        Raises TemplateRefused if the template does not take this conversation.
        """
        prompt_text = head_of_answer(self._text.render(messages), BEGUN)
        return ScorePrompt(self._text.encode(prompt_text), *self.score_words, self.threshold or 0.0)

    def _tokens_after(self, words: Sequence[str]) -> tuple[int, ...]:
        """Return the tokens of those words that are a single token after the beginning of an answer. Words
        that need several tokens, or that change the tokens before them, are left out; the result may be
        empty.

        words: continuations of BEGUN, each with its leading space.
        """
        beginning = self._text.encode(BEGUN)
        found = (self._text.encode(BEGUN + word) for word in words)
        return tuple(tokens[-1] for tokens in found if tokens[:-1] == beginning)

    def size(self, text: str) -> int:
        """Return how many tokens a text has that the master itself adds to the answer, such as a heading; 0
        for "".

        text: the characters, without any special tokens.
        """
        return len(self._text.encode(text))

    def beginnings(self, word: str) -> tuple[int, ...]:
        """Return the ids of the tokens with which a text may begin that begins with this word.

        word: the first word of a text.
        """
        return self._text.beginnings(word)

    def plan(self, messages: Sequence[Message], rules: PlanRules) -> Conversation:
        """Return the prompts of a planned answer, which all begin with one shared prefix.

        The kind of conversation depends on how the model plans: in lists, in markers with the model's own
        parts, or in markers with the shipped parts.

        messages: the conversation, oldest turn first.
        rules: the maximum number of points, and what else limits the plan.

        Raises TemplateRefused if the template does not take this conversation, and ModelError if it does not
        append turns, for a model with parts of its own.
        """
        if self._marker_parts:
            return PartsConversation(self._text, fill_skeleton(self._marker_parts, rules), messages)
        return ListConversation(self._text, messages, rules, self.wording)


def messages_of(ask: Ask) -> tuple[Message, ...]:
    """Return a request's conversation; a request with a bare prompt has a single user turn. Empty for a
    request that gives tokens in place of both.

    ask: what the client asks for, with a prompt or messages.
    """
    return ask.messages if ask.prompt is None else (Message("user", ask.prompt),)


class ListConversation:
    """The prompts of one request for a plan as a numbered list, which is asked for in plain words.

    The skeleton's prompt and all branches' prompts begin with the same tokens (`prefix`). These are computed
    once in the ring, and each branch forks them:
    # skeleton [p0 p1 p2 s0 s1], branch [p0 p1 p2 b0] -> prefix [p0 p1 p2], suffixes [s0 s1] and [b0]

    The text before a control token that all prompts share is tokenized once (`_shared_tokens`); each branch
    only tokenizes what follows. See `core/plans/prompts.py` for the attributes.
    """

    def __init__(
        self, text: Text, messages: Sequence[Message], rules: PlanRules, wording: Wording | None = None
    ) -> None:
        """Render the planning turn and a sample branch, and find the prefix that both share. If the template
        refuses a branch in the form of the wording, the default form is used. At least the last token of the
        skeleton's prompt is not part of the prefix, so that something is left to compute.

        text: the model's tokenizer and chat template.
        messages: the conversation, oldest turn first, at least one.
        rules: the maximum number of points, and what else limits the plan.
        wording: the sentences that ask for the list and for a point; None for the defaults.

        Raises TemplateRefused if the template takes the conversation in no form.
        """
        wording = wording or Wording()
        question = messages[-1].content
        self._text = text
        self._messages = tuple(messages)
        self._sentences = wording.of(question)
        self._list_words = self._ask_for_plan(rules)
        self.instructions: tuple[str, ...] | None = (self._list_words,)
        self._form: Form = wording.form
        asked = self._render(self._list_words)
        try:
            probe = self._render_branch(*self._branch_words(SAMPLE_POINT, [SAMPLE_POINT]))
        except TemplateRefused:  # Some templates refuse a further question after the answer with the list.
            self._form = DEFAULT_FORM
            probe = self._render_branch(*self._branch_words(SAMPLE_POINT, [SAMPLE_POINT]))
        probe = self._begin_answer(probe, SAMPLE_POINT)
        cut, end = text.cut(asked, shared_text(asked, probe))
        # The part of the last branch's rendering before its last control token, and the tokens of that part.
        self._last_head: tuple[str, tuple[int, ...]] = "", ()
        self._shared_head = asked[:cut]
        self._joint_token = asked[cut:end]
        self._shared_tokens = text.encode(self._shared_head) if self._shared_head else ()
        skeleton = self._tokens(head_of_answer(asked, LIST_HEAD))
        branch = self._tokens(probe)
        self._num_probed = len(probe)
        self.prefix = skeleton[
            : min(shared_length(skeleton, branch, len(self._shared_tokens)), len(skeleton) - 1)
        ]
        self.skeleton: PromptTurn = turn_from(self.prefix, skeleton, len(self._shared_tokens))
        self.answer: PromptTurn = turn_from(self.prefix, text.encode(text.render(self._messages)))
        self.sample: PromptTurn = turn_from(self.prefix, branch, len(self._shared_tokens))
        self.asked = len(self.answer.tokens)
        self.unwanted: tuple[int, ...] = text.announcing_tokens
        if len(asked) >= THREAD_CHARACTERS:
            # The conversation is encoded in a thread then, where rendering it again stops nobody.
            _ = self._slots

    @cached_property
    def _slots(self) -> TurnSlots | None:
        """The rendered prompt of a branch with places for its words, or None if every prompt has to be
        rendered as a whole. It is found when the first branch is opened, since the direct answer of a
        speculative plan does not wait for it.
        """
        # As many as `_branch_words` returns texts.
        num_places = 2 if self._form == "turns" else 1
        return find_slots(self._render_branch, self._text.mark, num_places)

    @property
    def num_branch_characters(self) -> int:
        """Number of characters that must be tokenised for each branch, in addition to its own words."""
        return self._num_probed - (len(self._shared_head) if self._slots else 0)

    def branch(
        self,
        point: Point,
        points: Sequence[Point],
        parents: Sequence[tuple[Point, str]],
        length: int,
        introduction: str = "",
    ) -> PromptTurn:
        """Return the prompt of a point's branch, or of the closing for a point without a title. In the form
        "article", in which the closing always is, the answer begins with the introduction and the heading, as
        part of the prompt.

        point: the point that the branch writes.
        points: all points of the plan, and the closing if it has one, which the prompt lists.
        parents: unused, since a list names no dependencies.
        length: unused, since a list names no lengths.
        introduction: the answer's text before the first point, which the prompt quotes, or which begins the
            branch's answer in the form "article"; "" for none.
        """
        words = self._branch_words(point, points, introduction)
        if self._slots:
            rendering = self._slots.fill(*map(self._text.mark, words))
        else:
            rendering = self._render_branch(*words)
        rendering = self._begin_answer(rendering, point, introduction)
        return turn_from(self.prefix, self._branch_tokens(rendering), len(self._shared_tokens))

    def _begin_answer(self, rendering: str, point: Point, introduction: str = "") -> str:
        """Return the rendered prompt of a branch with the beginning of its answer: the introduction and the
        heading, in the form "article" and for the closing. Other prompts are unchanged.

        rendering: the rendered prompt, up to the head of the answer.
        point: the point that the branch writes.
        introduction: the answer's text before the first point; "" for none.
        """
        if point.title and self._form != "article":
            return rendering
        head = f"{introduction.strip()}{heading_of(self._sentences.titled(point))}".lstrip()
        return head_of_answer(rendering, self._text.mark(head))

    def polish(self, text: str) -> PromptTurn:
        """Return the prompt that asks for the answer to be written anew as one text.

        text: the texts of all branches, joined.
        """
        words = self._sentences.polish.replace("{text}", text)
        return turn_from(self.prefix, self._tokens(self._render(words)), len(self._shared_tokens))

    def _ask_for_plan(self, rules: PlanRules) -> str:
        """Return the words that follow the question and ask for the plan, in the question's language. A
        question that compares things is asked for with words of its own.

        rules: the maximum number of points; if the question itself asks for this number, exactly so many are
            asked for.
        """
        question = self._messages[-1].content
        exact = points_asked(question) == rules.max_points
        return self._sentences.ask_for_list(rules.max_points, exact, compares(question))

    def _branch_words(self, point: Point, points: Sequence[Point], introduction: str = "") -> tuple[str, ...]:
        """Return the texts that a branch's prompt holds of the plan: (list, question for the point) in the
        form "turns", else a single text with both.

        point: the point that the branch writes.
        points: all points of the plan, and the closing if it has one.
        introduction: the answer's text before the first point; "" for none.
        """
        words = self._sentences.ask_for_point(self._form, point, points, introduction)
        planned = [one for one in points if one.title]
        return (write_list(planned), words) if self._form == "turns" else (words,)

    def _render_branch(self, *words: str) -> str:
        """Return the rendered prompt of a branch. In the form "turns" the list is the assistant's answer, and
        the question follows as a user turn.

        words: what `_branch_words` returns: two texts in the form "turns", else one. While slots are searched
            for, placeholders of the same number.

        Raises TemplateRefused if the template does not take these turns.
        """
        if self._form == "turns":
            written, asked = words
            first = ask_after(self._messages, self._list_words, in_last_turn=False)
            return self._text.render((*first, Message("assistant", written), Message("user", asked)))
        return self._render(*words, as_paragraph=self._form in ("outline", "article"))

    def _render(self, words: str, as_paragraph: bool = False) -> str:
        """Return the rendered conversation with these words after its last turn, up to the head of the
        answer.

        words: what the master asks for, such as a plan.
        as_paragraph: True to set the words off as a paragraph of their own; see `append_words`.

        Raises TemplateRefused if the template takes the conversation in no form.
        """
        return render_asked(self._text, self._messages, words, as_paragraph)

    def _tokens(self, rendering: str) -> tuple[int, ...]:
        """Return the tokens of a rendering. If it begins with the text that all prompts share, the tokens of
        that beginning are taken from `_shared_tokens`; otherwise all of it is tokenized.

        rendering: a rendered prompt of this conversation, with marks.
        """
        cut = len(self._shared_head)
        if (
            self._joint_token
            and rendering.startswith(self._joint_token, cut)
            and rendering.startswith(self._shared_head)
        ):
            return self._shared_tokens + self._text.encode(rendering[cut:])
        return self._text.encode(rendering)

    def _branch_tokens(self, rendering: str) -> tuple[int, ...]:
        """Return the tokens of a branch's rendering. The part before its last control token is tokenized only
        if it differs from that of the branch before: in the form "article", branches differ only after that
        token, in the beginnings of their answers.

        rendering: a rendered prompt of a branch, with marks.
        """
        cut, _ = self._text.cut(rendering, len(rendering))
        if cut <= len(self._shared_head):
            return self._tokens(rendering)
        head, tokens = self._last_head
        if rendering[:cut] != head:
            head = rendering[:cut]
            tokens = self._tokens(head)
            self._last_head = head, tokens
        return tokens + self._text.encode(rendering[cut:])


def head_of_answer(rendering: str, words: str) -> str:
    """Return a rendering whose answer begins with these words; unchanged for "". After a rendering that ends
    with ":" ("Assistant:"), a space is inserted.

    rendering: a rendered conversation that ends with the head of the assistant's turn.
    words: the first words of the answer, which are part of the prompt.
    """
    return f"{rendering} {words}" if rendering.endswith(":") else rendering + words


def ask_after(
    messages: tuple[Message, ...], words: str, as_paragraph: bool = False, in_last_turn: bool = True
) -> tuple[Message, ...]:
    """Return the conversation with these words after its last turn. They go into the last turn if it is the
    user's or if `in_last_turn` is set; else they become a user turn of their own. The conversation itself is
    not changed.

    messages: the conversation, oldest turn first, at least one.
    words: what the master asks for, such as a plan.
    as_paragraph: True to set the words off as a paragraph of their own; see `append_words`.
    in_last_turn: True to put the words into the last turn, even if it is not the user's.
    """
    last = messages[-1]
    if last.role != "user" and not in_last_turn:
        return (*messages, Message("user", words))
    return (*messages[:-1], Message(last.role, append_words(last.content, words, as_paragraph)))


def render_asked(text: Text, messages: tuple[Message, ...], words: str, as_paragraph: bool = False) -> str:
    """Return the rendered conversation with these words after its last turn: in the last turn if it is the
    user's, else in a turn of their own, unless the template refuses that. A refused conversation that ends
    with the user's turn is not tried again.

    text: the model's tokenizer and chat template.
    messages: the conversation, oldest turn first, at least one.
    words: what the master asks for, such as a plan.
    as_paragraph: True to set the words off as a paragraph of their own; see `append_words`.

    Raises TemplateRefused if the template takes the conversation in no form.
    """
    try:
        return text.render(ask_after(messages, words, as_paragraph, in_last_turn=False))
    except TemplateRefused:
        if messages[-1].role == "user":
            raise
        return text.render(ask_after(messages, words, as_paragraph))


# The file of a model's directory in which `specsot eval --router` stores the measured threshold.
ROUTER_FILE = "router.json"


def read_threshold(directory: Path) -> float | None:
    """Return the router's threshold that `specsot eval --router` measured for the model of this directory:
    the lowest score with which an answer is planned. Return None if the directory has no ROUTER_FILE, or if
    the file's threshold is null.

    directory: the model's directory.

    Raises ModelError for a file that is not readable JSON, that has no "threshold", or whose threshold is no
    number.
    """
    path = directory / ROUTER_FILE
    if not path.is_file():
        return None
    try:
        threshold = json.loads(path.read_text(encoding="utf-8"))["threshold"]
        return None if threshold is None else float(threshold)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from error


# The file of a model's directory that holds the templates of its prompts; see `PromptParts`.
PARTS_FILE = "specsot.json"


@dataclass(frozen=True, slots=True)
class PromptParts:
    """The contents of a model's specsot.json: templates of its prompts.

    The placeholders {plan}, {id}, {title}, {length} and {text} are filled in. In skeleton_turn, {points} is
    the maximum number of points, and {tools} are the names that may follow TOOL.

    skeleton_turn: The user turn that asks for the plan; "" if the file has none. Markers need it.
    branch_turn: The user turn that asks for one point; "" if the file has none. Markers need it.
    plan_style: The way to plan for which the model was trained; "auto" if the file names none.
    system: The system prompt that precedes the caller's; empty for none.
    plan_line: One line of the plan, as the branches quote it.
    parent_text: A finished point, as a point that depends on it quotes it after the plan.
    answer_prefix: The beginning of every planned answer, which is a part of the prompt; "" for none.
    wording: The sentences that ask for lists and their points.
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
    """Return the parts with {points} and {tools} of the planning turn filled in. Other placeholders stay as
    they are. The argument is not changed.

    parts: the templates of the model's prompts.
    rules: the maximum number of points of this request, and its tools; "None" is added to the tools.
    """
    tools = ", ".join((*rules.tools, "None"))
    words = parts.skeleton_turn.replace("{points}", str(rules.max_points)).replace("{tools}", tools)
    return replace(parts, skeleton_turn=words)


def read_parts(directory: Path) -> PromptParts | None:
    """Return the prompt parts of a model, or None if its directory has no specsot.json.

    directory: the model's directory.

    Raises ModelError if the file cannot be used.
    """
    path = directory / PARTS_FILE
    if not path.is_file():
        return None
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        parts = _parts_of(given)
        # Filling in a sample branch finds unknown placeholders.
        _fill_branch(parts, SAMPLE_POINT, [SAMPLE_POINT], [(SAMPLE_POINT, "")], 1)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from error
    return parts


def _parts_of(decoded: dict[str, Any]) -> PromptParts:
    """Return the prompt parts that a decoded file holds; unknown names are ignored. A file with nothing but a
    wording leaves the plan style open ("auto"). Names that are missing keep their defaults.

    decoded: the JSON object of the file.

    Raises ValueError if the plan style is none of list, markers and tags, or if markers lack skeleton_turn or
    branch_turn, and TypeError.
    """
    known = {field.name: decoded[field.name] for field in fields(PromptParts) if field.name in decoded}
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
    """The prompts of one request for a model that was trained in the language of markers, and whose directory
    holds templates of its prompts.

    All prompts begin with the rendered conversation (`prefix`), followed by one more turn:
    # prefix | user turn that asks for the plan or a point | head of the assistant's turn
    """

    # A plan in markers is asked for in the model's own words, so there are no instructions to compare with.
    instructions: tuple[str, ...] | None = None

    def __init__(self, text: Text, parts: PromptParts, messages: Sequence[Message]) -> None:
        """Render the conversation, and find the place of a further user turn in it. The model's system prompt
        precedes the caller's. The direct answer's prompt leaves it out.

        text: the model's tokenizer and chat template.
        parts: the templates of the model's prompts, with {points} and {tools} filled in.
        messages: the conversation, oldest turn first, at least one.

        Raises TemplateRefused if the template does not take the conversation, and ModelError if it does not
        append turns.
        """
        self._text = text
        self._parts = parts
        self._messages = _with_system(parts.system, tuple(messages))
        self._opening = text.render(self._messages, for_answer=False)
        self.prefix = text.encode(self._opening)
        self._slots = find_slots(self._ask, text.mark)
        self._answer_head = text.encode(self._answer(parts.skeleton_turn) + parts.answer_prefix)
        self.skeleton: PromptTurn = self._turn(parts.skeleton_turn)
        asked = len(self._ask(parts.skeleton_turn))
        self.num_branch_characters = asked - (len(self._opening) if self._slots else 0)
        self.unwanted: tuple[int, ...] = ()
        self.answer: PromptTurn = turn_from(self.prefix, text.encode(text.render(messages)))
        self.asked = len(self.answer.tokens)
        self.sample: PromptTurn = self.branch(SAMPLE_POINT, [SAMPLE_POINT], [], 1)

    def branch(
        self,
        point: Point,
        points: Sequence[Point],
        parents: Sequence[tuple[Point, str]],
        length: int,
        introduction: str = "",
    ) -> PromptTurn:
        """Return the prompt of a point's branch, with the texts of the points on which it depends.

        point: the point that the branch writes.
        points: all points of the plan, which the prompt lists.
        parents: the points on which `point` depends, each with its finished text; empty if it depends on
            none.
        length: about how many tokens the text shall have.
        introduction: unused, since a plan in markers has no introduction.
        """
        return self._turn(_fill_branch(self._parts, point, points, parents, length))

    def polish(self, text: str) -> PromptTurn:
        """Return the prompt that asks for the answer to be written anew as one text.

        text: the texts of all branches, joined.
        """
        sentences = self._parts.wording.of(self._messages[-1].content)
        return self._turn(sentences.polish.replace("{text}", text))

    def _turn(self, words: str) -> PromptTurn:
        """Return a prompt of prefix, user turn and head of the answer, each of which is tokenized separately.
        The answer's beginning, if the parts name one, is part of the prompt.

        words: the text of the user turn.

        Raises ModelError if the template does not append the turn to the conversation.
        """
        slots = self._slots
        asked = slots.fill(self._text.mark(words)) if slots else self._ask(words)
        if not asked.startswith(self._opening):
            raise _turns_not_appended()
        turn = self._text.encode(asked[len(self._opening) :])
        return PromptTurn(self.prefix + turn + self._answer_head, len(self.prefix))

    def _ask(self, words: str) -> str:
        """Return the rendered conversation with one more user turn, without the head of the answer.

        words: the text of the user turn.
        """
        return self._text.render((*self._messages, Message("user", words)), for_answer=False)

    def _answer(self, words: str) -> str:
        """Return the text that the template adds to a user turn to begin the answer; "" if it adds none. The
        answer prefix of the parts is not included.

        words: the text of a sample user turn.

        Raises ModelError if the template does not append turns to a rendered conversation.
        """
        asked = self._ask(words)
        answered = self._text.render((*self._messages, Message("user", words)))
        if not (asked.startswith(self._opening) and answered.startswith(asked)):
            raise _turns_not_appended()
        return answered[len(asked) :]


def _turns_not_appended() -> ModelError:
    """Return the error of a template that does not append turns to a rendered conversation."""
    return ModelError(f"{PARTS_FILE} needs a chat template that renders turns one after the other")


def _fill_branch(
    parts: PromptParts,
    point: Point,
    points: Sequence[Point],
    parents: Sequence[tuple[Point, str]],
    length: int,
) -> str:
    """Return the text of the user turn that asks for one point. The quoted texts follow the plan, in the
    place of {plan}.

    parts: the templates of the model's prompts.
    point: the point that the branch writes.
    points: all points of the plan, which are quoted line by line.
    parents: the points on which `point` depends, each with its finished text; empty to quote no text.
    length: about how many tokens the text shall have.

    Raises KeyError or IndexError if a template has a placeholder that is not known.
    """
    plan = "".join(parts.plan_line.format(id=other.id, title=other.title) for other in points)
    read = "".join(parts.parent_text.format(id=one.id, title=one.title, text=text) for one, text in parents)
    return parts.branch_turn.format(plan=plan + read, id=point.id, title=point.title, length=length)


def _with_system(system_prompt: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the conversation with the model's system prompt before the caller's, in a single system turn. A
    conversation without a system turn gets one. Of a joined turn, the model's prompt comes first, and a blank
    line separates both.

    system_prompt: the model's system prompt; "" returns the conversation unchanged.
    messages: the caller's conversation, at least one turn.
    """
    if not system_prompt:
        return messages
    if messages[0].role == "system":
        joined = Message("system", f"{system_prompt}\n\n{messages[0].content}")
        return (joined, *messages[1:])
    return (Message("system", system_prompt), *messages)
