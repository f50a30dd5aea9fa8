"""Derives the form in which a model writes calls from its chat template.

The template shows the form by rendering past calls. Calls of made-up functions are rendered, their names and
arguments are found in the text, and the text around them gives the marks of the form. A form counts only if
it reads the rendered calls as the same calls.

    <tool_call>{"name": "qxlookup", "arguments": {...}}</tool_call>
        -> layout "object", openers ("<tool_call>",), closers ("</tool_call>",)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, Final, Protocol, cast

from specsot.errors import InvalidRequest
from specsot_master.core.dialects.tool_calls.arguments import Json, JsonRewriter, as_json
from specsot_master.core.dialects.tool_calls.forms import (
    HERMES,
    ArgumentTexts,
    CallForm,
    CallTexts,
    Hole,
    Mark,
    Marks,
    ParameterForm,
    is_distinctive,
)
from specsot_master.core.dialects.tool_calls.harmony import HARMONY, HARMONY_MARK
from specsot_master.core.dialects.tool_calls.reading import ToolReader

# Names of the made-up functions. No template contains them.
NAMES: Final = ("qxlookup", "qxupdate")
# Names of their arguments.
KEYS: Final = ("kxalpha", "kxbeta")
# Values of these arguments.
VALUES: Final = ("vxone", "vxtwo")
# Ids of calls. They have nine letters and digits, as Mistral's templates want them.
IDS: Final = ("callx0001", "callx0002", "callx0003")
# The text of the user's turn.
QUESTION: Final = "uxquestion"
# The text of an answer, before its calls if it has any.
CONTENT: Final = "cxcontent"
# What a function returned.
RESULT: Final = "rxresult"
MAX_CLOSERS: Final = (
    4  # Marks after a call that may close it; what follows belongs to the next turn. Untuned.
)

# Llama 3 writes this mark before calls, though its template shows it for built-in functions only.
PYTHON_TAG: Final = "<|python_tag|>"

# Stands for the ordinal of a call in rendered text.
_ORDINAL: Final = "\x00"  # Stands for the ordinal of a call.
# Stands for the id of a call in rendered text.
_ID: Final = "\x01"  # Stands for its id.
# The hole of marks for which each of these two characters stands.
_HOLES: Final[Mapping[str, Mark]] = {_ORDINAL: Hole.NUMBER, _ID: Hole.WORD}
# One mark: a hole, a tag, a word in brackets, a bracket, or a run of other characters without white space.
_MARK = re.compile(r"[\x00\x01]|<[^<>\x00\x01]*>?|\[[A-Z_/]+\]|\[|[^\s<\[\x00\x01]+")
# Hermes' words, with which a prompt asks for calls.
_INSTRUCTION = re.compile(r"<tool_call>\s*\{+\s*\"name\"")
# The beginning of a call's arguments as Python writes them.
_PYTHON_CALL = re.compile(r"\(\s*" + KEYS[0] + r"\s*=")


class Render(Protocol):
    """A function that renders a conversation, and the functions it offers, by a chat template."""

    def __call__(
        self, turns: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], answer: bool
    ) -> str:
        """Return the rendered text of a conversation.

        turns: the turns in OpenAI's format, with `tool_calls` in them.
        functions: the functions that are offered, in OpenAI's format.
        answer: True if the text shall end where the model's answer begins.

        Raises InvalidRequest if the template refuses the conversation.
        """


def form_of_template(source: str, render: Render) -> CallForm | None:
    """Return the form in which a model with this template writes calls, or None if the template offers tools
    and does not show the form. A template without a place for tools always gets a form: the one that it
    renders calls in, if it also shows results, else HERMES. Templates with the mark of Harmony get HARMONY. A
    derived form without openers gets the opener PYTHON_TAG if the template contains that mark.

    source: the text of the template that renders conversations with tools.
    render: renders a conversation by this template.
    """
    if not offers_functions(source):
        # The prompt then describes tools in words, and asks for calls as the template writes them, or in
        # Hermes' form if the template does not show both calls and results.
        form = derive(render)
        return form if form is not None and _shows_results(render, form) else HERMES
    if HARMONY_MARK in source:
        return HARMONY
    form = derive(render)
    if form and not form.openers and PYTHON_TAG in source:
        return replace(form, openers=(PYTHON_TAG,))
    return form


def offers_functions(source: str) -> bool:
    """Return True if a template has a place for the functions that a request offers.

    source: the text of the template.
    """
    return re.search(r"\btools\b", source) is not None


def derive(render: Render) -> CallForm | None:
    """Return the form in which a template renders calls, or None if it renders none, or none that can be read
    back. The calls' arguments are rendered as objects, and if no readable form comes of that, as the text of
    JSON; a form found the second way has `arguments_as_text`. If neither gives a form, HERMES is returned if
    the rendered prompt asks for calls in Hermes' words.

    render: renders a conversation by the template.
    """
    for as_text in (False, True):
        try:
            probe = _Probe(render, as_text)
            form = _form_of(probe)
            if form is not None and _reads_back(form, probe):
                return replace(form, arguments_as_text=as_text, texts=_texts_of(form, probe))
        except (InvalidRequest, _Absent):
            continue
    return _instructed_form(render)


def _instructed_form(render: Render) -> CallForm | None:
    """Return Hermes' form if the template does not render calls but asks the model for them in Hermes' words;
    else None. Return None also if the template refuses the conversation.

    render: renders a conversation by the template.
    """
    try:
        prompt = render([{"role": "user", "content": QUESTION}], _functions(), True)
    except InvalidRequest:
        return None
    return HERMES if _INSTRUCTION.search(prompt) else None


def _shows_results(render: Render, form: CallForm) -> bool:
    """Return True if the template writes what a function returned, after a call without text (content None).
    Return False if the template refuses the conversation, or if its text contains "None", which is how the
    missing content would show.

    render: renders a conversation by the template.
    form: how the template writes calls; only `arguments_as_text` is used.
    """
    arguments = as_json(TWO) if form.arguments_as_text else TWO
    call = {"id": IDS[0], "type": "function", "function": {"name": NAMES[0], "arguments": arguments}}
    turns: list[Json] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": IDS[0], "content": RESULT},
    ]
    try:
        text = render(turns, (), True)
    except InvalidRequest:
        return False
    return RESULT in text and "None" not in text


def example_call(render: Render, form: CallForm) -> str:
    """Return a call as the template writes it, with words where its name, and an argument, stand.

    render: renders a conversation by the template.
    form: how the template writes calls; only `arguments_as_text` is used.

    Raises InvalidRequest if the template refuses the call. Raises _Absent if the template does not render the
    question.
    """
    write = cut_answers(render, form.arguments_as_text)
    return write([("function-name", {"argument-name": "argument-value"})])


def cut_answers(
    render: Render, arguments_as_text: bool = False
) -> Callable[[Sequence[tuple[str, Json]]], str]:
    """Return a function from calls, as (name, arguments), to the text that a model writes when it makes them.
    The returned function takes at most as many calls as there are IDS, and raises InvalidRequest if the
    template refuses the calls.

    render: renders a conversation by the template.
    arguments_as_text: True if the template wants arguments as the text of JSON.
    """
    return _Probe(render, arguments_as_text).answer


class _Absent(Exception):
    """Raised if a template does not render what was looked for in its text."""


class _Probe:
    """Renders answers that make calls, and cuts out of the text what the model itself would have written."""

    def __init__(self, render: Render, as_text: bool) -> None:
        """Render conversations without calls, to know how answers begin and end. The prompt up to the answer,
        the header before an answer's content and the end of an answer are kept for later comparisons.

        render: renders a conversation by the template.
        as_text: True if the template gets arguments as the text of JSON.

        Raises InvalidRequest if the template refuses one of these conversations, and _Absent if it does not
        render the question.
        """
        self._render = render
        self._as_text = as_text
        user = {"role": "user", "content": QUESTION}
        self._user: Json = user
        self._named: list[str] = []  # The functions that this answer calls.
        self._prompt = _after(render([user], _functions(), True), QUESTION)
        plain = _after(
            render([user, {"role": "assistant", "content": CONTENT}], _functions(), False), QUESTION
        )
        self._header, _, end = plain.partition(CONTENT)
        self._end = end.strip()

    def ends_with(self, mark: Mark) -> bool:
        """Return True if answers without calls end with a mark.

        mark: the mark; a hole never ends an answer.
        """
        return isinstance(mark, str) and self._end.startswith(mark)

    def without_turn_end(self, text: str) -> str:
        """Return the text without the end of a turn, if answers without calls end with the same; else
        unchanged.

        text: the end of a rendered answer with calls.
        """
        return text.removesuffix(self._end) if self._end else text

    def answer(self, calls: Sequence[tuple[str, Json]], content: str = "") -> str:
        """Return the model's answer that makes some calls, as the template repeats it in a conversation.
        Calls beyond the number of IDS are left out. The text has neither the header of the answer nor the
        marks that end it.

        calls: the name and the arguments of each call, at most as many as there are IDS.
        content: the text before the calls; "" for none.

        Raises InvalidRequest if the template refuses the calls, and _Absent if it does not render the
        question.
        """
        self._named = [name for name, _ in calls]
        past_calls = [
            {
                "id": id,
                "type": "function",
                "function": {"name": name, "arguments": self._arguments(arguments)},
            }
            for id, (name, arguments) in zip(IDS, calls)
        ]
        turns = [self._user, {"role": "assistant", "content": content, "tool_calls": past_calls}]
        text = _after(self._render(turns, _functions(), False), QUESTION)
        return self._without_end(self._without_header(text, content))

    def _arguments(self, arguments: Json) -> Json | str:
        """Return the arguments as the template wants them: an object, or the text of JSON.

        arguments: the arguments as an object.
        """
        return as_json(arguments) if self._as_text else arguments

    def _without_header(self, text: str, content: str) -> str:
        """Return the text without what precedes the model's own words. If the header is not found, what the
        text has in common with other answers is cut off, up to the last whole mark. Of two headers that fit,
        the longer one is cut off. If none fits and the content is found, the text begins with the content.

        text: the rendered conversation after the question.
        content: the text before the calls; "" for none.
        """
        heads = [head for head in (self._prompt, self._header) if text.startswith(head)]
        if heads:
            return text[len(max(heads, key=len)) :]
        if content and content in text:
            return text[text.index(content) :]
        common = max(_common(text, self._prompt), _common(text, self._header))
        while common and text[common - 1] not in ">]\n":
            common -= 1
        return text[common:]

    def _without_end(self, text: str) -> str:
        """Return the text up to the first mark with which answers end, if no call follows that mark; the
        whole text if there is no such mark. The mark must stand after the content and after the last name of
        a called function, and only marks that cannot be prose count. White space at the end is removed.

        text: the rendered answer, from the model's own words on.
        """
        called = max(0, *(text.rfind(one) for one in (CONTENT, *self._named)))
        marks = (one for one in _marks(self._end) if isinstance(one, str) and is_distinctive(one))
        places = [text.find(mark, called) for mark in marks]
        return text[: min((place for place in places if place >= 0), default=len(text))].rstrip()


def _after(text: str, mark: str) -> str:
    """Return the text after the last occurrence of a mark; "" if the text ends with it.

    text: the rendered conversation.
    mark: the text to look for.

    Raises _Absent if it does not occur.
    """
    place = text.rfind(mark)
    if place < 0:
        raise _Absent(mark)
    return text[place + len(mark) :]


def _common(left: str, right: str) -> int:
    """Return how many first characters of two texts are the same; 0 if one is empty.

    left: the first text.
    right: the second text.
    """
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right)))


def _functions() -> list[Json]:
    """Return the made-up functions in OpenAI's format; each has two arguments of text, one object and one
    integer, of which none is required.
    """
    types = {**dict.fromkeys(KEYS, "string"), "other": "object", "count": "integer"}
    properties = {key: {"type": kind, "description": "a value"} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": []}
    return [{"name": name, "description": "a function", "parameters": parameters} for name in NAMES]


# The arguments of a rendered call: two, which are text.
TWO: Final[Json] = dict(zip(KEYS, VALUES))


def _form_of(probe: _Probe) -> CallForm | None:
    """Return the form of calls that a template shows, or None if it shows none, or if answers end with the
    mark that would begin a call. The layouts are tried in the order "object", "named", "python",
    "parameters", and the first that fits is taken. If the template writes a call in another place after text,
    the rendering with the shorter text before the name is used.

    probe: renders calls by the template.

    Raises InvalidRequest if the template refuses a call, and _Absent if it does not render the question.
    """
    text = min(_first_calls(probe), key=lambda text: len(text.partition(NAMES[0])[0].strip()))
    text = text.replace(IDS[0], _ID)
    # The text after the name of a second call; "" if the template renders one call at most.
    _, name, rest = _two_calls(probe).rpartition(NAMES[1])
    second = name and rest
    form = _object_form(text) or _named_form(text, second) or _python_form(text)
    form = form or _parameter_form(text, second, probe)
    if form is None or (form.openers and probe.ends_with(form.openers[0])):
        # Answers end with the mark that would begin a call, so no call can follow.
        return None
    return form


def _first_calls(probe: _Probe) -> Iterator[str]:
    """Yield one call as rendered alone, and as rendered after text, which a template may write in other
    places. The second is left out if the template does not show it. It is also left out if the text does not
    come first.

    probe: renders calls by the template.

    Raises InvalidRequest if the template refuses a call, and _Absent if it does not render the question.
    """
    yield probe.answer([(NAMES[0], TWO)])
    text = probe.answer([(NAMES[0], TWO)], CONTENT)
    if text.startswith(CONTENT) and NAMES[0] in text:
        yield text[len(CONTENT) :]


def _marks(text: str) -> Marks:
    """Return the marks of a text without the white space between them; () for a text without marks.

    text: text between the parts of a call, with the characters of _HOLES for ordinals and ids.
    """
    return tuple(_HOLES.get(one, one) for one in _MARK.findall(text))


def _closers(text: str, skip: int = 0) -> tuple[str, ...]:
    """Return the marks after a call, each once and at most MAX_CLOSERS; () for a text without marks. Holes
    are not counted as closers.

    text: what follows the arguments.
    skip: how many first marks are left out, because they belong to the last argument; 0 for none.
    """
    found = (one.rstrip() for one in _MARK.findall(text)[skip:])
    return tuple(dict.fromkeys(one for one in found if one not in _HOLES))[:MAX_CLOSERS]


def _objects(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield every place at which a JSON object or list begins, the place at which it ends, and its value;
    nested ones too. Nothing is yielded for a text without any. Text in braces or brackets that is no JSON is
    passed over. Positions are characters.

    text: any text.
    """
    for found in re.finditer(r"[{\[]", text):
        at = found.start()
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(text, at)
        except ValueError:
            continue
        yield at, end, value


def _object_form(text: str) -> CallForm | None:
    """Return the form if name and arguments are members of one JSON object, else None. The object may be
    alone in a list. It counts if one of its members is the made-up name and another the arguments, as an
    object or as the text of JSON; the first such object is taken.

    text: one call as the template writes it.
    """
    for at, end, value in _objects(text):
        call = value[0] if isinstance(value, list) and len(cast("list[Any]", value)) == 1 else value
        if not isinstance(call, dict):
            continue
        members = cast(Json, call)
        name = next((key for key, one in members.items() if one == NAMES[0]), None)
        key = next((key for key, one in members.items() if one == TWO or one == as_json(TWO)), None)
        if name is None or key is None:
            continue
        before, after = text[:at], text[end:]
        return CallForm(
            "object",
            openers=_marks(before),
            closers=_closers(after),
            head=_object_head(before.lstrip(), text[at:end]),
            object_head="" if _ID in before else before.lstrip(),
            is_list=isinstance(value, list),
            name_key=name,
            arguments_key=key,
        )
    return None


def _object_head(before: str, written: str) -> tuple[str, str]:
    """Return how a forced call begins: the text up to its name, and the text from there to its arguments.
    Both are empty if that text is not the same for every call. That is so if the object does not begin with
    the name, if the arguments come before it or are no object, or if an id precedes them.

    before: the text before the object.
    written: the text of the object.
    """
    opening, found, rest = written.partition(NAMES[0])
    between, brace, _ = rest.partition("{")
    usable = found and brace and KEYS[0] not in opening and _ID not in opening + before
    return (before + opening, between) if usable else ("", "")


def _named_form(text: str, second: str) -> CallForm | None:
    """Return the form if a JSON object of arguments follows the name, else None. The arguments may be strict
    JSON, or an object whose strings have delimiters of their own (the form's `quote`). Return None also if
    the text does not contain the name.

    text: one call as the template writes it.
    second: the text after the name of a second call, or "".
    """
    before, name, rest = text.rpartition(NAMES[0])
    if not name:
        return None
    quote = ""
    found = next(((at, end) for at, end, value in _objects(rest) if value == TWO), None)
    if found is None:
        found, quote = _quoted_object(rest)
    if found is None:
        return None
    at, end = found
    middle = _with_ordinals(rest[:at], second)
    return CallForm("named", _marks(before), _marks(middle), _closers(rest[end:]), quote=quote)


def _quoted_object(rest: str) -> tuple[tuple[int, int] | None, str]:
    """Return where an object whose strings have delimiters of their own begins and ends, and that delimiter;
    (None, "") if there is no such object. The positions are characters of `rest`. Return (None, "") also if
    the object found does not have the arguments TWO.

    rest: the text after the name of the call.
    """
    shape = re.search(rf"\{{\s*{KEYS[0]}\s*:\s*(\S+){VALUES[0]}\1", rest)
    if shape is None:
        return None, ""
    rewriter = JsonRewriter(quote=shape[1])
    written = rewriter.feed(rest[shape.start() :], last=True)
    if json.loads(written) != TWO:
        return None, ""
    return (shape.start(), len(rest) - len(rewriter.rest)), shape[1]


def _with_ordinals(first: str, second: str) -> str:
    """Return the text after the first call's name, in which the call's ordinal is marked as a hole. A number
    is a hole if the two texts are the same but for it. If they differ elsewhere, `first` is returned
    unchanged.

    first ":0<|args|>", second ":1<|args|>" -> ":\\x00<|args|>"

    first: the text after the first call's name.
    second: the text after the second call's name; "" returns `first` unchanged.
    """
    one, other = re.split(r"(\d+)", first), re.split(r"(\d+)", second)[: len(re.split(r"(\d+)", first))]
    if not second or one[:-1:2] != other[:-1:2]:
        return first
    parts = [_ORDINAL if n % 2 and one[n] != other[n] else one[n] for n in range(len(one))]
    return "".join(parts)


def _python_form(text: str) -> CallForm | None:
    """Return the form if a call is written as in Python, else None. Return None also if the name is missing,
    if no first argument follows it in parentheses, or if no parenthesis closes the call.

    text: one call as the template writes it.
    """
    before, name, rest = text.rpartition(NAMES[0])
    if not name or not _PYTHON_CALL.match(rest):
        return None
    end = rest.find(")", rest.find(VALUES[1]))
    return CallForm("python", _marks(before), closers=_closers(rest[end + 1 :])) if end >= 0 else None


def _parameter_form(text: str, second: str, probe: _Probe) -> CallForm | None:
    """Return the form if each argument has marks of its own, else None. Return None also if the text does not
    contain the name and both arguments in order, or if the marks before the second argument do not repeat
    those before the first after at least one other mark. The openers of an argument are what a call without
    arguments lacks.

    text: one call as the template writes it.
    second: the text after the name of a second call, or "".
    probe: renders further calls by the template.

    Raises InvalidRequest if the template refuses a call without arguments.
    """
    before, name, rest = text.rpartition(NAMES[0])
    parts = re.fullmatch(
        rf"(.*?){KEYS[0]}(.*?){VALUES[0]}(.*?){KEYS[1]}(.*?){VALUES[1]}(.*)", rest, re.DOTALL
    )
    if not name or parts is None:
        return None
    opening, middle, between, _, after = parts.groups()
    opening = _with_ordinals(opening, second)
    bare = _with_ordinals(probe.answer([(NAMES[0], {})]).rpartition(NAMES[0])[2], second)
    first, none = _marks(opening), _marks(bare)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, none)))
    begin = first[shared:]
    ends = _marks(between)
    if not begin or ends[-len(begin) :] != begin or len(ends) == len(begin):
        return None
    end = ends[: -len(begin)]
    closers = _closers(after, skip=len(end) if _marks(after)[: len(end)] == end else 0)
    text_middle, others = _middles_by_type(probe, _marks(middle))
    parameter = ParameterForm(
        begin,
        _marks(middle),
        end,
        before_value=middle[len(middle.rstrip()) :],
        after_value=between[: len(between) - len(between.lstrip())],
        text_middle=text_middle,
        other_middles=others,
    )
    return CallForm("parameters", _marks(before), first[:shared], closers, parameter)


def _texts_of(form: CallForm, probe: _Probe) -> CallTexts | None:
    """Return the exact text of calls in a form, or None if the form is an "object", which needs none. What
    differs between one call and two calls belongs to `between` and `end`. `between` is None if the template
    renders one call at most; then all text after the arguments is the closing. The end of the turn is removed
    from the end.

    form: how the template writes calls.
    probe: renders calls by the template.

    Raises _Absent if the arguments are not found in the rendered text, and InvalidRequest if the template
    refuses a call.
    """
    if form.layout == "object":
        return None
    before, _, rest = probe.answer([(NAMES[0], TWO)]).replace(IDS[0], _ID).partition(NAMES[0])
    two = _two_calls(probe)
    middle, named_again, second = two.partition(NAMES[0])[2].partition(NAMES[1])
    opening, arguments, after = _split_arguments(form, _with_ordinals(rest, second), probe)
    between = None
    closing, end = after, ""
    if named_again:
        _, _, after_first = _split_arguments(form, _with_ordinals(middle, second), probe)
        closing = _whole_marks(after[: _common(after, after_first)])
        between = after_first[len(closing) :]
        end = after[len(closing) :]
    end = probe.without_turn_end(end)
    return CallTexts(
        _literal(before),
        _literal(opening),
        _literal(closing),
        None if between is None else _literal(between),
        _literal(end),
        arguments,
    )


def _two_calls(probe: _Probe) -> str:
    """Return the text of two calls, in which ids are marked as holes; "" if the template refuses two calls.
    If the template renders only one call, the text holds that one.

    probe: renders calls by the template.

    Raises _Absent if the template does not render the question.
    """
    try:
        text = probe.answer([(NAMES[0], TWO), (NAMES[1], TWO)])
    except InvalidRequest:
        return ""
    return text.replace(IDS[0], _ID).replace(IDS[1], _ID)


def _literal(text: str) -> Marks:
    r"""Return a text as marks that keep its white space; () for "".

    "f\x00 g" -> ("f", Hole.NUMBER, " g")

    text: the text, with the characters of _HOLES for ordinals and ids.
    """
    return tuple(_HOLES.get(part, part) for part in re.split(r"([\x00\x01])", text) if part)


def _whole_marks(text: str) -> str:
    r"""Return the text without a mark at its end that has no end: "</f>\n<" -> "</f>\n". The marks are those
    in <> and in [].

    text: a part of a rendered call; it is returned unchanged if its last mark is whole.
    """
    for opening, closing in ("<>", "[]"):
        if text.rfind(opening) > text.rfind(closing):
            text = text[: text.rfind(opening)]
    return text


def _split_arguments(form: CallForm, rest: str, probe: _Probe) -> tuple[str, ArgumentTexts | None, str]:
    """Return the text from a call's name to its arguments, how the arguments are written, and the text after
    them. The second is None for arguments that are an object of JSON. Text that the template shares between
    two arguments and the end of the call is the end of an argument.

    form: how the template writes calls; not an "object".
    rest: the text after the name of a call with the arguments TWO.
    probe: renders further calls by the template, to learn how values are written that are no text.

    Raises _Absent if the arguments are not found.
    """
    if form.layout == "named" and not form.quote:
        found = next(((at, end) for at, end, value in _objects(rest) if value == TWO), None)
        if found is None:
            raise _Absent(KEYS[0])
        return rest[: found[0]], None, rest[found[1] :]
    quote = form.quote or ('"' if form.layout == "python" else "")
    values = [re.escape(quote + value + quote) for value in VALUES]
    parts = re.fullmatch(f"(.*?){KEYS[0]}(.*?){values[0]}(.*?){KEYS[1]}(.*?){values[1]}(.*)", rest, re.DOTALL)
    if parts is None:
        raise _Absent(KEYS[0])
    opening, middle, inner, _, after = parts.groups()
    begin = other = ""
    if form.parameter is not None and isinstance(mark := form.parameter.begin[0], str):
        begin = opening[opening.rfind(mark) :]
        other = next(_other_middles(probe), middle) if form.parameter.text_middle else middle
    inner = inner.removesuffix(begin)
    end = _whole_marks(inner[: _common(inner, after)])
    return (
        opening.removesuffix(begin),
        ArgumentTexts(
            begin,
            middle,
            end,
            between=inner[len(end) :],
            other_middle=other if form.parameter and other != middle else None,
            quote=None if form.layout == "python" else form.quote,
        ),
        after[len(end) :],
    )


# Values of every JSON type but text.
OTHERS: Final[tuple[Any, ...]] = (3, True, None, {"a": 1}, [1])


def _middles_by_type(probe: _Probe, middle: Marks) -> tuple[Marks, tuple[Marks, ...]]:
    """Return the marks between key and value for text, and the different marks for other types. Both are
    empty if the marks do not distinguish text from other types. Both are empty, too, if the template shows
    none of the other values, or writes one of them with the same marks as text.

    probe: renders calls by the template.
    middle: the marks between key and value if the value is text.
    """
    found = [_marks(text) for text in _other_middles(probe)]
    return (middle, tuple(dict.fromkeys(found))) if found and middle not in found else ((), ())


def _other_middles(probe: _Probe) -> Iterator[str]:
    """Yield the text between key and value for values that are no text, one per value of OTHERS. A value that
    the template refuses or does not show is left out. Nothing is yielded if the template shows none.

    probe: renders calls by the template.

    Raises _Absent if the template does not render the question.
    """
    for value in OTHERS:
        try:
            text = probe.answer([(NAMES[0], {KEYS[0]: value, KEYS[1]: VALUES[1]})])
        except InvalidRequest:
            continue
        parts = re.search(rf"{KEYS[0]}(.*?){re.escape(_shown(value))}", text, re.DOTALL)
        if parts:
            yield parts[1]


def _shown(value: Any) -> str:
    """Return the beginning of a value as a template writes it. Only the beginning is needed, as templates
    write the inside of objects in different ways: {"a": 1} -> "{", True -> "true".

    value: a JSON value that is not text; of an object or a list only the bracket is returned.
    """
    return json.dumps(value)[0] if isinstance(value, (dict, list)) else json.dumps(value)


# Calls that a derived form has to read back, as (name, arguments): white space, braces and quotes in text,
# line breaks, no arguments, and nested values.
CHECKS: Final[tuple[tuple[tuple[str, Json], ...], ...]] = (
    ((NAMES[0], {KEYS[0]: "vx one", KEYS[1]: "{vx} two's"}),),
    ((NAMES[0], {KEYS[0]: "vx\none\n\ntwo"}),),
    ((NAMES[1], {}),),
    ((NAMES[1], {"other": {"a": [1, "b", {"c": None}]}, "count": 3}),),
)
# An answer of two calls, which a derived form has to read back too.
TWO_CALLS: Final = ((NAMES[0], TWO), (NAMES[1], {KEYS[1]: VALUES[1]}))


def _reads_back(form: CallForm, probe: _Probe) -> bool:
    """Return True if a form reads every rendered call as the call that was rendered. A template that renders
    one call at most need not show two. For such a template it is enough that the first of two calls is read;
    it is also enough that the template refuses two calls. Return False if any call is read differently.

    form: the form in question.
    probe: renders calls by the template.

    Raises InvalidRequest if the template refuses one of the CHECKS.
    """
    if not all(_read(form, probe.answer(calls)) == list(calls) for calls in CHECKS):
        return False
    try:
        text = probe.answer(TWO_CALLS)
    except InvalidRequest:
        return True  # The template renders one call at most.
    found = _read(form, text)
    return found == list(TWO_CALLS) or (NAMES[1] not in text and found == list(TWO_CALLS[:1]))


def _read(form: CallForm, text: str) -> list[tuple[str, Any]] | None:
    """Return the calls in a text as (name, arguments), an empty list if it has none, or None if the text has
    other content.

    form: how calls are written.
    text: the text of an answer.

    Raises ValueError if a call's arguments are no JSON.
    """
    schemas = {one["name"]: cast(Json, one["parameters"]) for one in _functions()}
    content, deltas = ToolReader(form, schemas).feed(text, last=True)
    if content.strip():
        return None
    found: dict[int, tuple[str, str]] = {}
    for one in deltas:
        name, arguments = found.get(one.index, ("", ""))
        found[one.index] = (name + (one.name or ""), arguments + one.arguments)
    return [(name, json.loads(arguments)) for name, arguments in found.values()]
