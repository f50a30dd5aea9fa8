r"""The words by which the router's rules tell one form of a question from another.

They are the words of the form (question words, verbs of a request, names of text kinds), not of subjects.
They are data: one file per language in `words/`, and `any.toml` for what is the same in every language (code,
figures). A further language is a further file.

A table of a file is a group. All groups of one name, from all files, are the alternatives of one expression:

    [why]
    words = ['why|how\s+come']     # whole words: \b(?:why|how\s+come)\b
    patterns = ['{many}\s+why\b']  # expressions as they are; {many} stands for the group "many"
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"
NOTHING = r"(?!)"  # no text matches
SPLIT = r"(?<=[.!?;])\s+|(?<=[。？！；])|\n+"
REFERENCE = re.compile(r"\{([a-z_]+)\}")  # a quantifier such as {0,3} has no letters


def languages() -> list[dict[str, Any]]:
    """Return the groups of every language, one dict per file, in the order of the names of the files.

    Raises TOMLDecodeError if a file is not valid TOML.
    """
    folder = files(__name__.rpartition(".")[0]) / "words"
    pages = sorted(
        (page for page in folder.iterdir() if page.name.endswith(".toml")), key=lambda page: page.name
    )
    return [tomllib.loads(page.read_text(encoding="utf-8")) for page in pages]


def expression(group: str) -> str:
    """Return one regular expression, as text, for a group of words. References to other groups in braces are
    replaced by the expressions of those groups.

    group: the name of the group in the files of words.

    Raises KeyError if no language has the group, or one that it refers to.
    """
    alternatives = list(_alternatives(group))
    if not alternatives:
        raise KeyError(group)
    joined = "|".join(alternatives)
    return "(?:" + REFERENCE.sub(lambda found: expression(found[1]), joined) + ")"


def _alternatives(group: str) -> Iterator[str]:
    """Yield the expressions of a group from all languages; nothing if no language has it. The words of a
    language are one expression, which matches them as whole words.

    group: the name of the group in the files of words.
    """
    for language in LANGUAGES:
        found = language.get(group, {})
        if "words" in found:
            yield rf"\b(?:{'|'.join(found['words'])})\b"
        yield from found.get("patterns", ())


LANGUAGES = languages()

POLITE = "^" + expression("polite")

PROGRAMMING_LANGUAGES = expression("languages")
CODE_GIVEN = expression("code_given")
CODE_ASKED = expression("code_asked")
ABOUT_LANGUAGES = expression("about_languages")
# A request for advice is answered in prose, about programs as about anything else.
ADVICE = expression("advice")
REPEATING = expression("repeating")
# Questions that compare things. A list that answers one names aspects, not what is true of a single thing.
COMPARING = expression("comparing"), expression("comparing_first")

NUMBER = expression("number")
QUANTITY = expression("quantity")
MATHS = expression("maths")

FOLLOW_UP = expression("follow_up")
PRONOUNS = expression("pronouns")

# Forms of one answer, by the reason that a decision gives: what a text contains anywhere, and what a sentence
# of it begins with.
FORMS: dict[str, tuple[str, str]] = {
    "a short answer is wanted": (expression("short_answer"), NOTHING),
    "one text is to be written": (expression("text_to_write"), expression("text_to_write_first")),
    "a form is asked for": (expression("form_wanted"), expression("form_wanted_first")),
    "a text is to be worked on": (expression("text_to_edit"), expression("text_to_edit_first")),
    "one thing is asked for": (NOTHING, expression("one_thing_first")),
}
# Forms of one answer: what the last sentence of a text begins with.
LAST_FORMS: dict[str, str] = {
    "small talk": expression("small_talk"),
    "a short fact": expression("short_fact"),
}
YES_OR_NO = expression("yes_or_no")
WHY = expression("why")
SEVERAL_REASONS = expression("several_reasons")

# "three" -> 3, in every language.
NUMBERS: dict[str, int] = {
    word: number for language in LANGUAGES for word, number in language.get("numbers", {}).items()
}
COUNT = rf"(?P<count>\d{{1,3}}|{'|'.join(NUMBERS)})"
UNIT = expression("unit")
# A request for a number of things. Figures of time, money and size do not count.
ASKED = rf"{expression('before_count')}{COUNT}(?:\s*[个种条点项本]|\s+(?!{UNIT}s?\b)(?=[^\W\d]))"

# How a sentence of an answer begins that announces what the answer then lists.
ANNOUNCING = expression("announcing")

# How a text begins that speaks of itself, and not of its subject.
OF_ITSELF = expression("of_itself")

# How a sentence begins that cannot be read without the one before it.
LEANING = expression("leaning")

# How an answer begins that speaks of the model, and not of the question's subject.
OF_THE_MODEL = expression("of_the_model")

OF_THE_ANSWER = expression("of_the_answer")
LIST = expression("list")
# How a question begins that asks for an explanation, and not for several things.
EXPLAINING = expression("explaining")
