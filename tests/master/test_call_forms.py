"""Call forms derived from published templates: what a template renders as calls is read as the same calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsot_master.chat_template import ChatTemplate
from specsot_master.core.dialects.tool_calls.deriving import Render, cut_answers, derive, form_of_template
from specsot_master.core.dialects.tool_calls.forms import HERMES, CallForm
from specsot_master.core.dialects.tool_calls.reading import ToolReader
from tests.conftest import examples

TEMPLATES = Path(__file__).parent / "templates"
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}

# Minimal templates of the shapes of models whose own templates are not kept here.
_TOOLS = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
_TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
_END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def shaped(call: str, before: str = "", after: str = "", between: str = "") -> str:
    """A template that writes a turn's calls `c` after its text, `f` being the function of each."""
    body = f"{{% set f = c.function %}}{call}{{{{ '' if loop.last else {between!r} }}}}"
    calls = f"{before}{{% for c in m.tool_calls %}}{body}{{% endfor %}}{after}"
    return f"{_TOOLS}{_TURNS}{{% if m.tool_calls %}}{calls}{{% endif %}}{_END}"


_GEMMA = """{% macro value(v) %}
{%- if v is string %}<|"|>{{ v }}<|"|>
{%- elif v is mapping %}{{ '{' }}
{%- for k, x in v.items() %}{{ k }}:{{ value(x) }}{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}
{%- elif v is iterable %}[
{%- for x in v %}{{ value(x) }}{{ '' if loop.last else ',' }}{% endfor %}]
{%- else %}{{ v | tojson }}{% endif %}
{%- endmacro %}"""
_ONE_ONLY = "{% if m.tool_calls | length != 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
_PYTHON = (
    "{% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}"
)
_COHERE = '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": '
SHAPES = {
    "Llama 3": shaped(
        "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}{{ '}' }}",
        _ONE_ONLY,
    ),
    "LFM2.5": shaped(f"{{{{ f.name }}}}({_PYTHON})", "<|calls_start|>[", "]<|calls_end|>", ", "),
    "Gemma 4": _GEMMA + shaped("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>"),
    "Command R7B": shaped(
        _COHERE + "{{ f.arguments | tojson }}{{ '}' }}", "<|START_ACTION|>[\n", "\n]<|END_ACTION|>", ",\n"
    ),
    "arguments as text": shaped("{{ '<call>' + f.name + ' ' + f.arguments + '</call>' }}"),
    "Nemotron": shaped(
        "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}", "<TOOLCALL>[", "]</TOOLCALL>", ", "
    ),
}
PUBLISHED = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
HARMONY = "openai-gpt-oss-120b"  # Its messages have a reader of their own.
DERIVED = [name for name in (*PUBLISHED, *SHAPES) if name != HARMONY]


@cache
def render_of(source: str) -> Render:
    """The function that renders by a template, which is compiled once."""
    template = ChatTemplate(source, NAMES)

    def render(
        turns: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], answer: bool
    ) -> str:
        tools = [{"type": "function", "function": one} for one in functions]
        return template.render_turns(turns, answer, tools=tools)

    return render


def source_of(name: str) -> str:
    return SHAPES[name] if name in SHAPES else (TEMPLATES / f"{name}.jinja").read_text()


@lru_cache(maxsize=64)
def form_of(name: str) -> CallForm:
    form = derive(render_of(source_of(name)))
    assert form is not None
    return form


# One template of each form: what hangs on the form alone is tested once.
DIFFERENT = [*{form_of(name): name for name in reversed(DERIVED)}.values()][::-1]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "other_text": {"type": ["string", "null"]},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "nested": {"type": "object"},
        "list": {"type": "array", "items": {"type": "string"}},
    },
}
FUNCTIONS = {"get_weather": SCHEMA, "set-level.v2": SCHEMA, "now": {"type": "object", "properties": {}}}
DIFFICULT = (
    "plain", "", "two\nlines", 'a "quoted" word', "it's", "C:\\users\\new", "{x: [1]}", "a <b> & </b>",
    "ü 日本 👍", "tab\tand more", "3", "true", "null", "```json\n{}\n```",
)  # fmt: skip


def read(form: CallForm, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls of a text that comes in pieces of this size."""
    reader = ToolReader(form, FUNCTIONS)
    content, calls = "", dict[int, list[str]]()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for n, piece in enumerate([*pieces, ""]):
        said, deltas = reader.feed(piece, last=n == len(pieces))
        content += said
        for one in deltas:
            told = calls.setdefault(one.index, ["", ""])
            told[0] += one.name or ""
            told[1] += one.arguments
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.slow
def test_a_form_is_derived_from_each_template() -> None:
    assert len([name for name in PUBLISHED if name != HARMONY]) >= 25
    assert {form_of(name).layout for name in DERIVED} == {"object", "named", "parameters", "python"}


@pytest.mark.parametrize("name", DERIVED)
def test_rendered_calls_are_read_as_the_same_calls_in_pieces_of_any_size(name: str) -> None:
    form, cut = form_of(name), cut_answers(render_of(source_of(name)), form_of(name).arguments_as_text)
    for text in DIFFICULT:
        arguments = {"text": text, "count": 3, "share": 0.5, "flag": True, "list": ["a", "b c"]}
        calls = [("get_weather", arguments)]
        for size in (1, 7, 1000):
            assert read(form, cut(calls), size) == ("", calls), (text, cut(calls))


@pytest.mark.parametrize("name", DERIVED)
def test_several_calls_calls_without_arguments_and_text_before_them(name: str) -> None:
    form, cut = form_of(name), cut_answers(render_of(source_of(name)), form_of(name).arguments_as_text)
    one = ("get_weather", {"text": "Paris", "nested": {"a": [1, {"b": None}]}})
    two = [one, ("now", {}), ("set-level.v2", {"count": 2})]
    for calls in ([("now", {})], [one], two):
        if len(calls) > 1 and name == "Llama 3":
            continue  # Its template renders one call at most.
        for size in (1, 5, 1000):
            assert read(form, cut(calls), size) == ("", calls)
            content, found = read(form, f"I will look.\n\n{cut(calls)}", size)
            assert (content, found) == ("I will look.", calls)


@cache
def difficult_calls(name: str) -> list[str]:
    """A call with each difficult text, as the template writes it: rendering takes most of the time."""
    cut = cut_answers(render_of(source_of(name)), form_of(name).arguments_as_text)
    return [cut([("get_weather", {"text": text, "count": 1})]) for text in DIFFICULT]


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
@settings(max_examples=examples(25), deadline=None)
@given(data=st.data())
def test_any_answer_cut_anywhere_is_read_alike_in_any_pieces(name: str, data: st.DataObject) -> None:
    """Calls, prose and broken calls in any order: nothing raises, and arguments are always JSON objects."""
    form, text = form_of(name), st.sampled_from(DIFFICULT)
    call = st.sampled_from(difficult_calls(name))
    broken = st.builds(lambda said, at: said[: at % (len(said) + 1)], call, st.integers(0, 400))
    parts = data.draw(st.lists(st.one_of(call, broken, text, st.text(max_size=8)), max_size=5))
    answer = "\n".join(parts)
    sizes = data.draw(st.integers(1, 9))
    whole = read(form, answer, 10**6)
    assert read(form, answer, sizes) == whole
    assert all(isinstance(arguments, dict) for _, arguments in whole[1])


@pytest.mark.parametrize("name", DIFFERENT)
def test_prose_about_the_marks_stays_as_it_is(name: str) -> None:
    form = form_of(name)
    marks = [one for one in (*form.openers, *form.closers) if isinstance(one, str)]
    prose = " ".join(["Use the", *marks, "marks,  if you like\n\nit."])
    assert read(form, prose, 1) == (prose, [])
    assert read(form, prose, 1000) == (prose, [])


def test_a_template_that_renders_no_calls_has_no_form() -> None:
    assert derive(render_of(_TOOLS + _TURNS + _END)) is None
    assert derive(render_of("{{ messages[5].content }}")) is None
    assert derive(render_of("{{ raise_exception('no') }}")) is None


def test_a_template_that_refuses_some_arguments_has_no_form() -> None:
    """It renders calls, but raises for an argument with a line break, so that calls could be lost."""
    refuses = "{% for v in c.function.arguments.values() if v is string and '\n' in v %}"
    refuses += "{{ raise_exception('one line') }}{% endfor %}"
    call = f"{refuses}<call>{{{{ c.function | tojson }}}}</call>"
    calls = f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}"
    whole = f"{_TOOLS}{_TURNS}{{% if m.tool_calls %}}{calls}{{% endif %}}{_END}"
    assert derive(render_of(whole.replace(refuses, ""))) is not None
    assert derive(render_of(whole)) is None


XML = "<tool_call>\n<function=f>\n<parameter=p>\nv\n</parameter>\n</function>\n</tool_call>"


def test_a_template_that_mentions_a_mark_is_not_taken_for_the_form_that_has_it() -> None:
    for told in (XML, "<tool_call>{name}\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>"):
        source = (
            f"{{% if tools %}}{told}{{% endif %}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
        )
        assert form_of_template(source, render_of(source)) is None
    assert form_of_template("{{ messages[0].content }}", render_of("{{ messages[0].content }}")) is HERMES


def test_a_template_without_place_for_tools_has_its_own_form_if_it_also_writes_results() -> None:
    for name in ("deepseek-ai-DeepSeek-V3.1", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"):
        assert form_of_template(source_of(name), render_of(source_of(name))) == form_of(name)
    call = "<call>{{ c.function.name }} {{ c.function.arguments }}</call>"
    calls = f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}"
    whole = f"{_TURNS}{{% if m.tool_calls %}}{calls}{{% endif %}}{_END}"
    form = form_of_template(whole, render_of(whole))
    assert form is not None
    assert form.openers == ("<call>",)
    silent = whole.replace("{{ m.content or '' }}", "{{ '' if m.role == 'tool' else m.content or '' }}")
    assert form_of_template(silent, render_of(silent)) is HERMES


def test_a_template_that_only_asks_for_hermes_calls_has_hermes_form() -> None:
    told = '{% if tools %}Write <tool_call>\n{"name": ...}\n</tool_call>. {{ tools | tojson }}{% endif %}'
    assert derive(render_of(told + _TURNS + _END)) is HERMES


def test_forced_heads_are_what_the_template_writes_before_arguments() -> None:
    heads = {
        "Qwen-Qwen2.5-7B-Instruct": '<tool_call>\n{"name": "f", "arguments": ',
        "Llama 3": '{"name": "f", "parameters": ',
    }
    for name, head in heads.items():
        assert form_of(name).forced_head("f") == head
