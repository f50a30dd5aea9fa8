"""Turns of a planned request and their wording (English and Chinese) for models not trained to plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from specsot.core.skeleton import MAX_TITLE_BYTES, PlanRules, Point

SAMPLE_POINT = Point(id=1, length=1, title="-")  # stands for any, to see what is around one

# What a template might change, or look for, in words that it should leave alone.
_SLOT_PROBE = (
    "Words <a> & \"b\" 'c' \\n {d} {{ e }} {% f %} \u4f60\n\n  <think> </think> <tool_call> [INST] #1\n- ok."
)


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """A whole prompt in tokens, of which the first `shared` are also the prefix's first ones."""

    tokens: tuple[int, ...]
    shared: int

    @property
    def suffix(self) -> tuple[int, ...]:
        return self.tokens[self.shared :]


class Conversation(Protocol):
    """The planned turns of one request.

    asked: tokens of a direct answer's prompt to the same messages.
    behind: characters that are tokenised for each branch, beside its own words.
    """

    prefix: tuple[int, ...]
    skeleton: PromptTurn
    asked: int
    behind: int

    def branch(
        self, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
    ) -> PromptTurn:
        """The turn that writes `point` in about `length` tokens; `parents` are what it builds on."""
        ...


def shared_length(left: Sequence[int], right: Sequence[int], known: int = 0) -> int:
    """How many first tokens are the same. known: so many are, that much is certain."""
    end = min(len(left), len(right))
    for place in range(known, end):
        if left[place] != right[place]:
            return place
    return end


def turn_from(prefix: Sequence[int], tokens: tuple[int, ...], known: int = 0) -> PromptTurn:
    """A turn that shares what it can with the prefix, but keeps a token of its own to answer from."""
    return PromptTurn(tokens, min(shared_length(prefix, tokens, known), len(tokens) - 1))


@dataclass(frozen=True, slots=True)
class TurnSlot:
    """Where in a rendering the words of its last turn stand, so that others can be put there: before, words,
    after.
    """

    before: str
    after: str

    def fill(self, words: str) -> str:
        return self.before + words + self.after


def find_slot(render: Callable[[str], str], mark: Callable[[str], str]) -> TurnSlot | None:
    """mark: words as they stand in a rendering. None where they stand there twice, or in other words."""
    odd, plain = mark(_SLOT_PROBE), "Write."
    before, found, after = render(_SLOT_PROBE).partition(odd)
    place = TurnSlot(before, after)
    return place if found and odd not in after and render(plain) == place.fill(plain) else None


def shared_text(left: str, right: str) -> int:
    """How many first characters are the same."""
    low, high = 0, min(len(left), len(right))
    while low < high:  # a slice is compared at memory's speed, a character at Python's
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA = re.compile(r"[\u3040-\u30ff]")
_LETTER = re.compile(r"[^\W\d_]")


@dataclass(frozen=True, slots=True)
class Wording:
    """The instructions in one language; the braces are filled in below."""

    choose: str
    plan: str
    grammar: str
    branch: str
    parent: str


ENGLISH = Wording(
    choose=(
        "First decide how the request above is best answered.\n"
        "If a short or indivisible answer is best, write exactly this form:\n"
        "[DIRECT]\nthe whole answer\n[END]\n"
        "If the answer is long and has parts that can be written independently, write a plan, "
        "exactly in this form:\n"
    ),
    plan=(
        "Plan the answer to the request above, do not write it yet. Cut it into parts that can be written "
        "independently. Write the plan exactly in this form:\n"
    ),
    grammar=(
        "[PLAN]\n1.<120><None>[-]Where the idea comes from\n2.<150><None>[-]How it works\n"
        "3.<80><None>[1,2]What follows from both\n[END]\n"
        "Each line: the number, a dot, <length of the part in tokens>, <tool>, [numbers of earlier parts "
        "that must be read first, or -], and a title of at most {bytes} bytes; no spaces between these. "
        "Tools: {tools}. At most {points} lines, most plans have 3 to 6; prefer [-]. "
        "Write titles in the language of the request. Begin at once with the marker, and write nothing "
        "after [END]."
    ),
    branch=(
        'The answer follows this plan:\n{plan}\n{parents}Write only part {id}, "{title}", in about {length} '
        "tokens. Write its text alone: no heading, no introduction, nothing that belongs to the other parts."
    ),
    parent="Part {id}, {title}, is already written:\n{text}\n\n",
)

CHINESE = Wording(
    choose=(
        "请先判断怎样回答上面的请求最好。\n"
        "如果适合简短回答或内容不可拆分，请严格按以下格式书写：\n"
        "[DIRECT]\n完整的回答\n[END]\n"
        "如果回答较长，并且各部分可以独立书写，请严格按以下格式写出提纲：\n"
    ),
    plan="请为上面的请求列出回答的提纲，先不要写正文。把回答拆成可以独立书写的部分，严格按以下格式：\n",
    grammar=(
        "[PLAN]\n1.<120><None>[-]由来\n2.<150><None>[-]工作原理\n3.<80><None>[1,2]由此得到的结论\n[END]\n"
        "每行依次为：序号、英文句点、<该部分的长度（token 数）>、<工具>、"
        "[需要先读的前面部分的序号，没有则写 -]、"
        "标题（不超过 {bytes} 字节）；各项之间不加空格。可用工具：{tools}。最多 {points} 行，通常 3 到 6 行；"
        "尽量写 [-]。标题使用提问的语言。直接以标记开头，[END] 之后不写任何内容。"
    ),
    branch=(
        "回答按照以下提纲：\n{plan}\n{parents}请只写第 {id} 部分“{title}”，大约 {length} 个 token。"
        "只写这一部分的正文：不要标题，不要开场白，不要写其他部分的内容。"
    ),
    parent="第 {id} 部分“{title}”已经写好：\n{text}\n\n",
)


def choose_wording(question: str) -> Wording:
    """Chinese for a question that is mostly Han script (kana makes it Japanese), English otherwise."""
    letters = len(_LETTER.findall(question))
    chinese = len(_HAN.findall(question)) * 3 > letters and not _KANA.search(question)
    return CHINESE if letters and chinese else ENGLISH


def plan_instruction(wording: Wording, rules: PlanRules) -> str:
    """The skeleton turn: what a plan looks like, and whether a direct answer is allowed instead."""
    grammar = wording.grammar.format(
        bytes=MAX_TITLE_BYTES, tools=", ".join(("None", *rules.tools)), points=rules.max_points
    )
    return (wording.choose if rules.direct else wording.plan) + grammar


def branch_instruction(
    wording: Wording, point: Point, points: Sequence[Point], parents: Sequence[tuple[Point, str]], length: int
) -> str:
    """A branch turn: the plan, the texts it builds on, and which point to write."""
    return wording.branch.format(
        plan="".join(f"{other.id}. {other.title}\n" for other in points),
        parents="".join(
            wording.parent.format(id=parent.id, title=parent.title, text=text) for parent, text in parents
        ),
        id=point.id,
        title=point.title,
        length=length,
    )
