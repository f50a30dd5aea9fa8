"""Prompts over the chat templates people use: what turns share, what the model is told.

The demo tokenizer speaks for all of them.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specsot.core.skeleton import PlanRules, Point
from specsot.errors import InvalidRequest, ModelError
from specsot.params import Ask, Message
from specsot_master.core.plans.merged_answer import heading_of
from specsot_master.core.plans.prompts import shared_length
from specsot_master.core.plans.router import compares
from specsot_master.core.plans.wording import (
    FORMS,
    LANGUAGES,
    Form,
    Language,
    Wording,
    append_words,
    language_of,
    write_list,
)
from specsot_master.prompts import (
    Conversation,
    ListConversation,
    PartsConversation,
    Prompts,
    ask_after,
    head_of_answer,
    messages_of,
    render_asked,
)
from specsot_master.text import Text
from tests.conftest import examples
from tests.master.stage import BASE, TEXT, Counted
from tests.master.test_text import directory

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}{{ m['content'] }}</s>{% endif %}"
    "{% endfor %}"
)
VICUNA = (
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }} {% endif %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}USER: {{ m['content'] }} {% elif m['role'] == 'assistant' %}"
    "ASSISTANT: {{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
GEMMA2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}"
    "{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
TEMPLATES = {"llama-3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "vicuna": VICUNA, "gemma-2": GEMMA2}

Speak = Callable[[str], tuple[Text, Prompts]]

LISTED = PlanRules(direct=False, max_points=5, listed=True)
POINTS = (Point(1, 80, "Light"), Point(2, 60, "Deep", None, (1,)))
QUESTION = "Give an overview of Stages of Sleep."


def words(text: Text, tokens: tuple[int, ...]) -> str:
    """Every token as it is written, special ones too."""
    return text._tokenizer.decode(list(tokens), skip_special_tokens=False)


def with_template(folder: Path, template: str) -> tuple[Text, Prompts]:
    text = Text(directory(folder, tokenizer_config={"bos_token": "<s>", "chat_template": template}))
    return text, Prompts(folder, text)


@pytest.fixture(scope="module")
def speak(tmp_path_factory: pytest.TempPathFactory) -> Speak:
    """with_template, once for each: neither keeps anything of what it is asked."""

    def spoken(template: str) -> tuple[Text, Prompts]:
        return with_template(tmp_path_factory.mktemp("model"), template)

    return cache(spoken)


def ask_all(prompts: Prompts, *messages: Message, rules: PlanRules | None = None) -> Conversation:
    return prompts.plan(messages or (Message("user", QUESTION),), rules or LISTED)


def ask_in(form: Form, text: Text, *messages: Message) -> ListConversation:
    return ListConversation(text, messages or (Message("user", QUESTION),), LISTED, Wording(form))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
class TestEveryTemplate:
    @pytest.mark.parametrize("form", FORMS)
    def test_the_prefix_is_what_the_turns_share(self, speak: Speak, template: str, form: Form) -> None:
        text, _ = speak(template)
        conversation = ask_in(form, text)
        branch = conversation.branch(POINTS[0], POINTS, [], 80)
        for turn in (conversation.skeleton, branch):
            assert turn.tokens[: turn.shared] == conversation.prefix[: turn.shared]
            assert turn.suffix
            assert turn.shared == len(conversation.prefix)
        assert QUESTION.rstrip(".") in words(text, conversation.prefix)

    def test_turns_are_whole_renderings(self, speak: Speak, template: str) -> None:
        text, prompts = speak(template)
        rendered = words(text, ask_all(prompts).skeleton.tokens)
        assert text.encode(rendered) == ask_all(prompts).skeleton.tokens
        head = text.render([Message("user", "x")]).partition("x")[2]
        assert rendered.endswith((f"{head}1.", f"{head} 1."))

    def test_a_plain_answer_forks_the_prefix(self, speak: Speak, template: str) -> None:
        _, prompts = speak(template)
        conversation = ask_all(prompts)
        answer = conversation.answer
        assert answer is not None
        assert answer.tokens == prompts.chat((Message("user", QUESTION),))
        assert answer.tokens[: answer.shared] == conversation.prefix[: answer.shared]
        assert answer.shared > len(conversation.prefix) // 2

    def test_a_system_turn_reaches_the_model(self, speak: Speak, template: str) -> None:
        text, prompts = speak(template)
        messages = (Message("system", "Be brief."), Message("user", QUESTION))
        assert "Be brief." in words(text, ask_all(prompts, *messages).prefix)
        assert "Be brief." in words(text, prompts.chat(messages))

    def test_a_conversation_goes_on(self, speak: Speak, template: str) -> None:
        text, prompts = speak(template)
        messages = (Message("user", "Hi"), Message("assistant", "Hello."), Message("user", QUESTION))
        prefix = words(text, ask_all(prompts, *messages).prefix)
        assert prefix.index("Hi") < prefix.index("Hello.") < prefix.index(QUESTION.rstrip("."))

    def test_a_question_in_chinese(self, speak: Speak, template: str) -> None:
        text, prompts = speak(template)
        conversation = ask_all(prompts, Message("user", "请介绍睡眠的几个阶段。"))
        assert "请介绍睡眠的几个阶段。" in words(text, conversation.prefix)
        assert "编号列表" in words(text, conversation.skeleton.suffix)
        branch = words(text, conversation.branch(POINTS[1], POINTS, [], 60).suffix)
        assert "标题" in branch
        assert branch.endswith("## 2. Deep\n")

    @pytest.mark.parametrize("form", ["outline", "turns", "article"])
    def test_a_branch_sees_all_points_and_differs_from_its_siblings_only_at_its_end(
        self, speak: Speak, template: str, form: Form
    ) -> None:
        """So that the plan's branches can share one prefix: what is their own is short."""
        text, _ = speak(template)
        conversation = ask_in(form, text)
        first, second = (conversation.branch(point, POINTS, [], 80).tokens for point in POINTS)
        assert "1. Light\n2. Deep" in words(text, first)
        common = shared_length(first, second)
        after = text.encode(text.render([Message("user", "x")]).partition("x")[2])
        title = text.encode(f" {POINTS[0].title}")
        assert len(first) - common <= len(title) + len(after) + 8


MARKERS = {
    "llama-3": ["<s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen": [],
    "mistral": ["<s>", "[INST]", "[/INST]", "</s>"],
    "vicuna": ["<s>", "</s>"],
    "chatml": [],
}
CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\nYou are a "
    "helpful AI assistant<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
    "'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = (Message("user", "Hi"), Message("assistant", "Hello."), Message("user", QUESTION))
said = st.text("ab \n<|>你🎉", max_size=20) | st.sampled_from(["<|im_end|>", "[/INST] </s>", "<|eot_id|> x"])


@cache
def taught(name: str) -> tuple[Text, Prompts]:
    """A tokenizer that has the template's markers, as models of the family do."""
    folder = Path(tempfile.mkdtemp())
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKERS[name])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = CHATML if name == "chatml" else TEMPLATES[name]
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    text = Text(folder)
    return text, Prompts(folder, text)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MARKERS)
@settings(max_examples=examples(20))
@given(question=said, answer=said, title=said)
def test_what_is_tokenised_in_parts_is_what_the_whole_is(
    name: str, form: Form, question: str, answer: str, title: str
) -> None:
    text, prompts = taught(name)
    talk = (
        Message("user", "Q " + question),
        Message("assistant", answer),
        Message("user", question + " Why?"),
    )
    point = Point(2, 10, title)
    conversation = ask_in(form, text, *talk)
    sentences = Wording().of(talk[-1].content)
    compared = compares(talk[-1].content)
    points = [Point(1, 10, "Light"), point]
    words = sentences.ask_for_point(form, point, points)
    plan_words = sentences.ask_for_list(5, False, compared)
    if form == "turns":
        listed = Message("assistant", write_list(points if title else points[:1]))
        whole = text.render((*ask_after(talk, plan_words), listed, Message("user", words)))
    else:
        whole = render_asked(text, talk, words, as_paragraph=form in ("outline", "article"))
    if form == "article" or not title:
        whole = head_of_answer(whole, text.mark(heading_of(sentences.titled(point)).lstrip()))
    assert conversation.branch(point, points, [], 10).tokens == text.encode(whole)
    plan = render_asked(text, talk, plan_words)
    assert conversation.skeleton.tokens in (text.encode(plan + "1."), text.encode(plan + " 1."))
    assert conversation.asked == len(prompts.chat(talk))


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKERS)
@settings(max_examples=examples(20))
@given(st.lists(st.text("ab \n<|>[]你🎉&'{}%", min_size=1, max_size=30), min_size=3, max_size=3))
def test_prompts_are_what_transformers_makes_of_them(name: str, contents: list[str]) -> None:
    from transformers import PreTrainedTokenizerFast

    text, prompts = taught(name)
    template = CHATML if name == "chatml" else TEMPLATES[name]
    other = PreTrainedTokenizerFast(
        tokenizer_object=text._tokenizer, chat_template=template, bos_token="<s>", eos_token="<|im_end|>"
    )
    talk = [Message(*one) for one in zip(("user", "assistant", "user"), contents)]
    theirs: Any = other.apply_chat_template(
        [{"role": one.role, "content": one.content} for one in talk],
        add_generation_prompt=True,
        return_dict=False,
        enable_thinking=False,
    )
    assert list(prompts.chat(talk)) == theirs


def test_a_branch_that_spells_a_token_the_model_does_not_have(tmp_path: Path) -> None:
    """In its title."""
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = Text(tmp_path, 8192)
    conversation = Prompts(tmp_path, text).plan(TALK, LISTED)
    odd = Point(1, 10, "An <extra> one")
    with pytest.raises(InvalidRequest, match="token 8192"):
        conversation.branch(odd, [odd], [], 10)
    with pytest.raises(InvalidRequest, match="token 8192"):
        Prompts(tmp_path, text).plan([Message("user", "<extra>")], LISTED)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MARKERS)
def test_a_branch_tokenises_what_follows_the_prefix(name: str, form: Form) -> None:
    """Where the family puts an instruction into the last user turn, that is behind it, too."""
    text, _ = taught(name)
    talk = (Message("user", "Hi " * 30_000), Message("assistant", "Hello."), Message("user", QUESTION))
    counted = Counted(text)
    conversation = ListConversation(counted, talk, LISTED, Wording(form))
    counted.work = 0
    conversation.branch(POINTS[0], POINTS, [], 80)
    assert counted.work < 1000
    assert conversation.num_branch_characters < 1000


def test_a_demo_branch_renders_nothing_anew() -> None:
    counted = Counted(TEXT)
    conversation = Prompts(BASE, counted).plan((Message("user", "Hi " * 30_000),), PlanRules())
    counted.work = 0
    conversation.branch(POINTS[0], POINTS, [], 80)
    assert counted.work < 300
    assert conversation.num_branch_characters < 300


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<|im_start|>{{ m['content'] | upper }}<|im_end|>{% endfor %}",
        "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}{{ messages[-1]['content'] }}",
        "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    ],
    ids=["changes words", "repeats words", "has no markers"],
)
def test_whole_renderings_where_nothing_can_be_left_out(tmp_path: Path, template: str) -> None:
    text, prompts = with_template(tmp_path, template)
    conversation = prompts.plan(TALK, LISTED)
    told = Wording().of(QUESTION).ask_for_point("article", POINTS[0], POINTS)
    turn = conversation.branch(POINTS[0], POINTS, [], 80)
    whole = render_asked(text, TALK, told, as_paragraph=True)
    assert turn.tokens == text.encode(head_of_answer(whole, text.mark("## 1. Light\n")))
    assert turn.tokens[: turn.shared] == conversation.prefix[: turn.shared]


def test_the_instruction_follows_the_question_in_its_own_turn(speak: Speak) -> None:
    text, prompts = speak(QWEN)
    conversation = ask_all(prompts)
    plan = words(text, conversation.skeleton.tokens)
    assert f"{QUESTION} Answer with a short numbered list of at most 5 points" in plan
    assert plan.count("<|im_start|>user") == 1
    branch = words(text, conversation.branch(POINTS[1], POINTS, [], 60).tokens)
    assert f"{QUESTION}\n\nAnswer with these headings" in branch
    assert "without lists:\n1. Light\n2. Deep" in branch
    assert branch.endswith("## 2. Deep\n")
    branch = words(text, conversation.branch(POINTS[1], POINTS, [], 60, "Sleep heals.").tokens)
    assert branch.endswith("Sleep heals.\n\n## 2. Deep\n")
    branch = words(text, ask_in("outline", text).branch(POINTS[1], POINTS, [], 60).tokens)
    assert f"{QUESTION}\n\nThe answer has these points:\n1. Light\n2. Deep\n\nWrite only" in branch
    branch = words(text, ask_in("question", text).branch(POINTS[1], POINTS, [], 60).tokens)
    assert f'{QUESTION} Tell me about "Deep" in two or three sentences.' in branch


def test_in_turns_style_the_point_is_requested_after_the_list(speak: Speak) -> None:
    text, _ = speak(QWEN)
    conversation = ask_in("turns", text)
    branch = words(text, conversation.branch(POINTS[1], POINTS, [], 60).tokens)
    plan = words(text, conversation.skeleton.tokens)
    head = plan.removesuffix("<think>\n\n</think>\n\n1.")
    assert branch.startswith(head)
    assert "1. Light\n2. Deep<|im_end|>\n<|im_start|>user\nNow write the text" in branch
    assert 'Point 2: "Deep"<|im_end|>' in branch


def test_a_template_without_a_second_question_is_asked_in_one_turn(tmp_path: Path) -> None:
    """Some templates take one exchange."""
    single = (
        "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}"
    )
    text, _ = with_template(tmp_path, single)
    branch = words(text, ask_in("turns", text).branch(POINTS[1], POINTS, [], 60).tokens)
    assert "Answer with these headings" in branch


def test_an_instruction_starts_a_new_paragraph_after_a_question_that_ends_with_text() -> None:
    assert append_words("Why?", "Say it.") == "Why? Say it."
    assert append_words("Why?", "Say it.", paragraph=True) == "Why?\n\nSay it."
    assert append_words("Name these\n- a.", "Say it.") == "Name these\n- a.\n\nSay it."
    assert append_words("exercise", "Say it.") == "exercise\n\nSay it."


def test_after_a_turn_that_is_not_the_users_the_instruction_is_its_own_turn(speak: Speak) -> None:
    text, prompts = speak(QWEN)
    talk = (Message("user", QUESTION), Message("assistant", "It has four."))
    assert words(text, ask_all(prompts, *talk).skeleton.tokens).count("<|im_start|>user") == 2


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_model_without_a_prompt_for_markers_is_asked_for_a_list(tmp_path: Path, template: str) -> None:
    """The master writes the markers. A wording of the model's own is used."""
    text, _ = with_template(tmp_path, template)
    (tmp_path / "specsot.json").write_text('{"wording": {"form": "question"}}')
    prompts = Prompts(tmp_path, text, "markers")
    assert (prompts.style, prompts.listed) == ("markers", True)
    ours = ask_all(prompts)
    listed = ask_all(Prompts(tmp_path, text, "list"))
    assert ours.skeleton == listed.skeleton
    assert ours.instructions == listed.instructions
    branches = [one.branch(POINTS[1], POINTS, [], 60) for one in (ours, listed)]
    assert branches[0] == branches[1]
    assert "[PLAN]" not in words(text, ours.skeleton.tokens)


def test_the_words_of_the_model_itself_come_before_ours(tmp_path: Path) -> None:
    assert Prompts(BASE, TEXT, "list").listed
    prompts = Prompts(BASE, TEXT, "markers")
    assert (prompts.style, prompts.listed) == ("markers", False)
    conversation = ask_all(prompts)
    assert "Write the plan." in words(TEXT, conversation.skeleton.tokens)
    assert conversation.instructions is None, "its plan is no list"


def test_the_prompt_of_a_model_that_writes_markers_gives_the_limits_of_the_plan(tmp_path: Path) -> None:
    text, _ = with_template(tmp_path, QWEN)
    turns = {"skeleton_turn": "At most {points} points; tools: {tools}.", "branch_turn": "{plan}{title}"}
    (tmp_path / "specsot.json").write_text(json.dumps(turns))
    conversation = ask_all(Prompts(tmp_path, text), rules=PlanRules(tools=("Search",), max_points=4))
    assert isinstance(conversation, PartsConversation)
    assert "At most 4 points; tools: Search, None." in words(text, conversation.skeleton.tokens)


@pytest.mark.parametrize(
    ("question", "language"),
    [
        ("请解释光合作用", "zh"),
        ("用 Python 写一个排序算法，并解释复杂度", "zh"),
        ("Was sind die Vorteile von Sport?", "de"),
        ("Nenne mir Tipps für ein Vorstellungsgespräch.", "de"),
        ("Wie lerne ich schnell Spanisch?", "de"),
        ("¿Cuáles son los beneficios del ejercicio?", "es"),
        ("Explica las causas de la Revolución Francesa", "es"),
        ("Geht es los?", "de"),
        ("Es regnet, was tun?", "de"),
        ("Was ist in Los Angeles los?", "de"),
        ("Es importante dormir bien.", "es"),
        ("¿Qué ofrece Los Ángeles?", "es"),
        ("Los Angeles offers great beaches:", "en"),
        ("El Niño effects", "en"),
        ("Die Hard has several memorable scenes:", "en"),
        ("Explain 光合作用 in simple terms, please", "en"),
        ("What does the German word über mean, and how is it used?", "en"),
        ("Give me tips for a trip to El Salvador and Los Angeles.", "en"),
        ("Photosynthesis", "en"),
        ("光合成について説明してください", "en"),
        ("12 + 30", "en"),
        ("", "en"),
    ],
)
def test_the_language_follows_the_question(question: str, language: Language) -> None:
    assert language_of(question) == language


@pytest.mark.parametrize(
    ("text", "unclear", "language"),
    [
        ("Los Angeles:", "de", "de"),
        ("Los Angeles offers great beaches:", "zh", "zh"),
        ("Python, JavaScript:", "zh", "zh"),
        ("Hier sind die Vorteile:", "es", "de"),
        ("Here are the advantages:", "de", "en"),
        ("Das Boot, the film", "de", "de"),
        ("Das Boot, the film", "en", "en"),
        ("以下是几点建议：", "en", "zh"),
    ],
)
def test_a_text_without_clear_evidence_has_the_expected_language(
    text: str, unclear: Language, language: Language
) -> None:
    assert language_of(text, unclear) == language


class TestTheDemoModel:
    text = TEXT
    prompts = Prompts(BASE, text)

    def said(self, tokens: tuple[int, ...]) -> str:
        return words(self.text, tokens)

    def test_prompts_are_those_it_was_trained_on(self) -> None:
        conversation = ask_all(self.prompts)
        head = "<|im_start|>assistant\n"
        assert self.said(conversation.prefix) == (
            "<|endoftext|><|im_start|>system\nPlan first, then write each point.<|im_end|>\n"
            f"<|im_start|>user\n{QUESTION}<|im_end|>\n"
        )
        assert self.said(conversation.skeleton.suffix) == (
            f"<|im_start|>user\nWrite the plan.<|im_end|>\n{head}"
        )
        assert self.said(conversation.branch(POINTS[0], POINTS, [], 80).suffix) == (
            "<|im_start|>user\nPlan:\n1. Light\n2. Deep\n\nWrite point 1: Light\n"
            f"About 80 tokens.<|im_end|>\n{head}"
        )
        assert self.said(self.prompts.chat(messages_of(Ask(prompt=QUESTION)))) == (
            f"<|endoftext|><|im_start|>user\n{QUESTION}<|im_end|>\n{head}"
        )

    def test_parents_follow_the_plan(self) -> None:
        turn = ask_all(self.prompts).branch(POINTS[1], POINTS, [(POINTS[0], "It is.")], 60)
        assert "2. Deep\n\n1. Light\nIt is.\n\nWrite point 2: Deep" in self.said(turn.suffix)

    def test_braces_in_a_title_are_only_text(self) -> None:
        odd = Point(1, 10, "A {plan} of {0}")
        turn = ask_all(self.prompts).branch(odd, [odd], [(odd, "{id}")], 10)
        assert "Write point 1: A {plan} of {0}" in self.said(turn.suffix)

    def test_the_callers_system_prompt_follows_the_built_in_one(self) -> None:
        conversation = ask_all(self.prompts, Message("system", "Be brief."), Message("user", "Why?"))
        assert "each point.\n\nBe brief.<|im_end|>" in self.said(conversation.prefix)


@pytest.mark.parametrize(
    "parts",
    ["{", '{"skeleton_turn": "Plan."}', '{"skeleton_turn": "Plan.", "branch_turn": "{nothing}"}', "[]"],
)
def test_broken_parts_are_one_clear_line(tmp_path: Path, parts: str) -> None:
    (tmp_path / "specsot.json").write_text(parts, encoding="utf-8")
    with pytest.raises(ModelError, match=r"specsot\.json"):
        Prompts(tmp_path, TEXT)


@pytest.mark.parametrize(
    ("wording", "message"),
    [
        ('"turns"', "wording is an object"),
        ('{"form": "letter"}', "wording.form is question, outline, turns, article, got 'letter'"),
        ('{"from": "turns"}', "not 'from'"),
        ('{"sentences": {"fr": {}}}', "not 'fr'"),
        ('{"sentences": {"en": {"outlines": ""}}}', "not 'outlines'"),
        ('{"sentences": {"en": {"outline": "About {title}."}}}', "outline has no {plan}"),
        ('{"sentences": {"en": {"question": "{title} {count}"}}}', "question has {count}"),
        ('{"sentences": {"en": {"question": 1}}}', "question is a text"),
    ],
)
def test_a_broken_wording_is_one_clear_line(tmp_path: Path, wording: str, message: str) -> None:
    (tmp_path / "specsot.json").write_text(f'{{"wording": {wording}}}', encoding="utf-8")
    with pytest.raises(ModelError, match=re.escape(message)):
        Prompts(tmp_path, TEXT)


def test_a_model_says_in_which_words_it_is_asked(tmp_path: Path) -> None:
    german = {"question": "Schreibe über {title}."}
    wording = {"form": "question", "sentences": {"de": german}, "measured": {"question": {"words": 50}}}
    (tmp_path / "specsot.json").write_text(json.dumps({"wording": wording}), encoding="utf-8")
    text, prompts = with_template(tmp_path, QWEN)
    assert prompts.listed, "it says nothing of how plans are written"

    def asked(question: str) -> str:
        conversation = ask_all(prompts, Message("user", question))
        return words(text, conversation.branch(POINTS[1], POINTS, [], 60).tokens)

    assert "Wie schläft man?\nSchreibe über Deep." in asked("Wie schläft man?").replace("? ", "?\n")
    assert 'Tell me about "Deep" in two or three sentences.' in asked(QUESTION)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_no_sentence_makes_a_model_number_its_sentences(form: Form, language: Language) -> None:
    """Asked for "zwei oder drei Sätze", "dos o tres frases", models write "Erster Satz: ..."."""
    asked = Wording().sentences[language].ask_for_point(form, POINTS[1], POINTS)
    assert "Deep" in asked
    if language != "en":
        assert not re.search(r"zwei|drei|Sätz|dos o tres|frases|两三|句", asked)


def test_a_comparison_is_asked_for_aspects(speak: Speak) -> None:
    _, prompts = speak(QWEN)
    for question, asked in (
        ("Compare tea and coffee.", "only the names of the aspects"),
        ("Was ist der Unterschied zwischen Wetter und Klima?", "Namen der Merkmale"),
        ("¿Cuál es la diferencia entre TCP y UDP?", "nombres de los aspectos"),
        ("比较一下电动汽车和汽油车。", "比较的方面"),
    ):
        told = prompts.plan((Message("user", question),), LISTED).instructions
        assert told is not None
        assert asked in told[0]


CLOSED = (*POINTS, Point(3, 9, ""))


@pytest.mark.parametrize("form", FORMS)
def test_the_closing_is_written_below_a_last_heading_in_every_form(speak: Speak, form: Form) -> None:
    """Below a heading "Conclusion", models list the titles; asked for the last sentence, they announce it."""
    text, _ = speak(QWEN)
    told = words(text, ask_in(form, text).branch(CLOSED[-1], CLOSED, [], 60, "Sleep heals.").tokens)
    assert "Answer with these headings" in told
    assert "without lists:\n1. Light\n2. Deep\n3. A final piece of advice" in told
    assert told.endswith("Sleep heals.\n\n## 3. A final piece of advice\n")


@pytest.mark.parametrize("form", FORMS)
def test_the_points_of_an_article_know_of_the_closing(speak: Speak, form: Form) -> None:
    """So that all branches of an article share the whole list."""
    text, _ = speak(QWEN)
    told = words(text, ask_in(form, text).branch(CLOSED[1], CLOSED, [], 60, "Sleep heals.").tokens)
    assert ("2. Deep\n3. A final piece of advice" in told) == (form == "article")
    assert "advice" not in told or form == "article"


def test_parts_need_a_template_that_puts_turns_after_each_other(tmp_path: Path) -> None:
    (tmp_path / "specsot.json").write_text(
        json.dumps({"skeleton_turn": "Plan.", "branch_turn": "{id}"}), encoding="utf-8"
    )
    _, prompts = with_template(tmp_path, "{{ messages[-1]['content'] }}{{ messages[0]['content'] }}")
    with pytest.raises(ModelError, match="one after the other"):
        ask_all(prompts)


def test_a_list_is_asked_for_as_many_points_as_the_question_asks_for(speak: Speak) -> None:
    _, prompts = speak(TEMPLATES["llama-3"])
    for question, asked in (
        ("Name five rivers.", "list of 5 points,"),
        ("Why rivers?", "list of at most 5 points,"),
    ):
        told = prompts.plan((Message("user", question),), LISTED).instructions
        assert told is not None
        assert asked in told[0]


@pytest.mark.slow
def test_the_branches_of_an_article_tokenise_the_text_before_their_answers_once() -> None:
    counted = Counted(taught("qwen")[0])
    talk = [Message("user", "Hi " * 300 + QUESTION)]
    conversation = ListConversation(counted, talk, LISTED, Wording("article"))
    works = list[int]()
    for point in POINTS[:2]:
        counted.work = 0
        conversation.branch(point, POINTS, [], 80)
        works.append(counted.work)
    assert works[1] < works[0] / 2
