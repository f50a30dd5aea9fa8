"""The words in which a model that was not taught to plan is asked for a list, and for the text of one point.

A `Wording` is a property of the model: its form says how a branch is asked, its sentences say so in each
language. A model's `specsot.json` may choose the form and replace sentences; the defaults are here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from string import Formatter
from typing import Final, Literal, cast, get_args

from specsot.core.skeleton import Point
from specsot_master.core.plans.answer_forms import ANSWER_FORMS, UsualLengths
from specsot_master.core.plans.router import compares

# How the text of one point is asked for.
# question: the question, then the title. The branch does not see the other points.
# outline: one turn with the question, all points, and the title of the point that is to be written.
# turns: the list as it was asked for and written, then a turn that asks for the text of one point.
# article: one turn with the question and all points, and an answer that begins with the introduction and the
# heading of the point, which the branch continues.
Form = Literal["question", "outline", "turns", "article"]
FORMS: tuple[Form, ...] = get_args(Form)
DEFAULT_FORM: Form = "article"

# Tokens. A first paragraph of so many tokens is taken for the whole direct answer. Chosen by measurement: in
# 58 direct answers of Qwen2.5-Coder-1.5B-Instruct, the longest first paragraph that others follow has 101.
PARAGRAPH_TOKENS: Final = 112

Language = Literal["en", "zh", "de", "es"]
LANGUAGES: tuple[Language, ...] = get_args(Language)

# What a question that is planned asks for: the comparison of things, or anything else.
QuestionKind = Literal["list", "comparison"]
QUESTION_KINDS: tuple[QuestionKind, ...] = get_args(QuestionKind)
# The usual lengths of direct answers to questions of each kind.
LengthsByKind = Mapping[QuestionKind, UsualLengths]
# Tokens. The usual lengths of direct answers to questions that are planned. Chosen by measurement:
# 155 direct answers of Qwen2.5-Coder-1.5B-Instruct (lab/results/direct-lengths.json). Two of the numbers are
# higher than in that file, after direct answers to other questions: 410 instead of 350 for Spanish lists with
# titles (lab/results/raw/blind-reading.json), and 260 instead of 190 for plain Chinese lists, of which six
# more had from 178 to 350 tokens, 290 in the mean (lab/results/raw/blind-reading-2.json). What the direct
# answer has begun with says no more: with the numbers of tokens of its first two lines as well, lengths of 52
# answers were predicted no better.
ANSWER_TOKENS: Final[Mapping[Language, LengthsByKind]] = {
    "en": {"list": UsualLengths(280, 310), "comparison": UsualLengths(260, 430)},
    "zh": {"list": UsualLengths(260, 260), "comparison": UsualLengths(220, 370)},
    "de": {"list": UsualLengths(310, 490), "comparison": UsualLengths(590, 590)},
    "es": {"list": UsualLengths(320, 410), "comparison": UsualLengths(430, 430)},
}


@dataclass(frozen=True, slots=True)
class Sentences:
    """The sentences with which a model is asked for a plan and its points, in one language.

    `{points}` is `at_most` or `exactly`, in which `{count}` is the number of points. `{plan}` is the numbered
    list, `{id}` and `{title}` are those of one point. In `outline` and `turns`, everything that differs
    between the branches of a plan is at the end, so that the branches share the longest prompt prefix.
    """

    # Follows the question and asks for the list.
    plan: str
    # Takes the place of `plan` where the question compares things: the points are then aspects.
    aspects: str
    # Stands for `{points}` if the list may have fewer points.
    at_most: str
    # Stands for `{points}` if the question itself asks for so many points.
    exactly: str
    # Asks for the text of a point in the form "question".
    question: str
    # Asks for the text of a point in the form "outline".
    outline: str
    # Asks for the text of a point in the form "turns".
    turns: str
    # Asks for the text of a point in the form "article", and for the closing in every form.
    article: str
    # Precedes what asks for the text of a point, if the answer has an introduction already.
    introduced: str
    # The last heading, below which the closing is written. Readers do not see it. Asked for advice, a model
    # names what the points do not; asked for a conclusion, it lists their titles.
    conclusion: str
    # Asks for the texts of all points as one text, `{text}`.
    polish: str

    def ask_for_list(self, count: int, exact: bool, compares: bool = False) -> str:
        """Return the words that ask for a list of points.

        count: how many points, or the most points.
        exact: True if the question itself asks for `count` points.
        compares: True if the question compares things, so that the points are aspects.
        """
        points = (self.exactly if exact else self.at_most).format(count=count)
        return (self.aspects if compares else self.plan).format(points=points)

    def ask_for_point(self, form: Form, point: Point, points: Sequence[Point], introduction: str = "") -> str:
        """Return the words that ask for the text of one point of a plan, or for the closing if the point has
        no title. The closing is asked for in the form "article", whatever the form; there it is the last
        heading, of which the other branches know. An introduction is quoted in the forms "outline" and
        "turns".

        form: how the model is asked for points.
        point: the point that is to be written.
        points: all points of the plan, which some forms list, and the closing if the plan has one.
        introduction: the text before the first point; "" if there is none.
        """
        way = form if point.title else "article"
        words: str = getattr(self, way)
        listed = [self.titled(one) for one in points if one.title or way == "article"]
        asked = words.format(plan=write_list(listed), id=point.id, title=point.title).strip()
        # A branch of an article has the introduction in its answer.
        if not introduction or way in ("question", "article"):
            return asked
        return f"{self.introduced.format(introduction=introduction.strip())}\n\n{asked}"

    def titled(self, point: Point) -> Point:
        """Return the point; the closing, which has no title, with the one below which it is written.

        point: a point of a plan, or its closing.
        """
        return point if point.title else replace(point, title=self.conclusion)


def write_list(points: Sequence[Point]) -> str:
    r"""Return the numbered list of a plan, as the model writes it: "1. Light\n2. Deep"; "" for no points.

    No white space is around it, which some templates take away.

    points: the points of the plan.
    """
    return "\n".join(f"{point.id}. {point.title}" for point in points).strip()


ENGLISH = Sentences(
    plan="Answer with a short numbered list of {points}, each 2 to 4 words.",
    aspects=(
        "Answer with a short numbered list of {points}: only the names of the aspects in which they are to "
        "be compared, each 1 to 4 words."
    ),
    at_most="at most {count} points",
    exactly="{count} points",
    question='Tell me about "{title}" in two or three sentences.',
    outline=(
        "The answer has these points:\n{plan}\n\n"
        "Write only the text below one of these headings: two or three sentences about this point alone, "
        'without an introduction and without the other points.\n\nHeading: "{title}"'
    ),
    turns=(
        "Now write the text for one point of the list, in two or three sentences. "
        'Say nothing about the other points.\n\nPoint {id}: "{title}"'
    ),
    article=(
        "Answer with these headings. Below each, write one sentence with a concrete detail or example, "
        "without lists:\n{plan}"
    ),
    introduced="The answer begins with this paragraph:\n{introduction}",
    conclusion="A final piece of advice",
    polish=(
        "Write one clear answer from these notes, without headings and without saying anything twice:\n\n"
        "{text}"
    ),
)
# "in zwei oder drei Sätzen" and "en dos o tres frases" make models number their sentences ("Erster Satz:",
# "Hier sind zwei Sätze"), so that German and Spanish ask for a short paragraph. Chinese names its length.
# Below "Ein letzter Rat" or "Empfehlung", Qwen2.5-Coder-1.5B-Instruct wrote about these words ("Ein letzter
# Rat ist eine der häufigsten Ursachen von Stress."), so that German has a conclusion.
GERMAN = Sentences(
    plan="Antworte mit einer kurzen nummerierten Liste von {points} mit je 1 bis 4 Wörtern.",
    aspects=(
        "Antworte mit einer kurzen nummerierten Liste von {points}: nur den Namen der Merkmale, "
        "die zu vergleichen sind, mit je 1 bis 4 Wörtern."
    ),
    at_most="höchstens {count} Punkten",
    exactly="{count} Punkten",
    question="Erzähle mir in einem kurzen Absatz von „{title}“.",
    outline=(
        "Die Antwort hat diese Punkte:\n{plan}\n\n"
        "Schreibe nur den Text unter einer dieser Überschriften: einen kurzen Absatz nur zu diesem Punkt, "
        "ohne Einleitung und ohne die anderen Punkte.\n\nÜberschrift: „{title}“"
    ),
    turns=(
        "Schreibe nun den Text zu einem Punkt der Liste, als kurzen Absatz. "
        "Sage nichts zu den anderen Punkten.\n\nPunkt {id}: „{title}“"
    ),
    article=(
        "Antworte mit diesen Überschriften und schreibe unter jede einen kurzen Absatz mit Einzelheiten, "
        "ohne Listen:\n{plan}"
    ),
    introduced="Die Antwort beginnt mit diesem Absatz:\n{introduction}",
    conclusion="Fazit",
    polish=(
        "Schreibe aus diesen Notizen eine Antwort am Stück, ohne Überschriften und Wiederholungen:\n\n{text}"
    ),
)
SPANISH = Sentences(
    plan="Responde con una lista numerada breve de {points}, de 1 a 4 palabras cada uno.",
    aspects=(
        "Responde con una lista numerada breve de {points}: solo los nombres de los aspectos que se deben "
        "comparar, de 1 a 4 palabras cada uno."
    ),
    at_most="{count} puntos como máximo",
    exactly="{count} puntos",
    question="Háblame de «{title}» en un párrafo breve.",
    outline=(
        "La respuesta tiene estos puntos:\n{plan}\n\n"
        "Escribe solo el texto que va bajo uno de estos títulos: un párrafo breve sobre ese punto, "
        "sin introducción y sin los demás puntos.\n\nTítulo: «{title}»"
    ),
    turns=(
        "Escribe ahora el texto de un punto de la lista, en un párrafo breve. "
        "No digas nada de los demás puntos.\n\nPunto {id}: «{title}»"
    ),
    article=(
        "Responde con estos títulos y escribe debajo de cada uno un párrafo breve y concreto, sin listas:\n"
        "{plan}"
    ),
    introduced="La respuesta empieza con este párrafo:\n{introduction}",
    conclusion="Un último consejo",
    polish="Escribe con estas notas una respuesta coherente, sin títulos ni repeticiones:\n\n{text}",
)
CHINESE = Sentences(
    plan="请用简短的编号列表回答，{points}，每点不超过 8 个字。",
    aspects="请用简短的编号列表，只列出要比较的方面的名称，{points}，每点不超过 8 个字。",
    at_most="最多 {count} 点",
    exactly="{count} 点",
    question="请用不超过 60 个字介绍“{title}”。",
    outline=(
        "回答包含以下要点：\n{plan}\n\n"
        "请只写其中一个标题下的正文：用不超过 60 个字只谈这一点，不要写引言，也不要谈其他要点。\n\n"
        "标题：“{title}”"
    ),
    turns="现在请写列表中一个要点的正文，不超过 60 个字，不要谈其他要点。\n\n要点 {id}：“{title}”",
    article="请用以下标题回答，每个标题下写一段约 60 个字的具体说明，举出细节或例子，不要用列表：\n{plan}",
    introduced="回答以这一段开头：\n{introduction}",
    conclusion="最后的建议",
    polish="请把下面的笔记写成一篇连贯的回答，不要标题，不要重复：\n\n{text}",
)
DEFAULT_SENTENCES: Mapping[Language, Sentences] = {
    "en": ENGLISH,
    "zh": CHINESE,
    "de": GERMAN,
    "es": SPANISH,
}

# What a sentence that a model brings along must hold, and what it may hold.
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "plan": ("points",),
    "aspects": ("points",),
    "at_most": ("count",),
    "exactly": ("count",),
    "question": ("title",),
    "outline": ("plan", "title"),
    "turns": ("title",),
    "article": ("plan",),
    "introduced": ("introduction",),
    "conclusion": (),
    "polish": ("text",),
}
_ALLOWED: Mapping[str, tuple[str, ...]] = {
    **_REQUIRED,
    **dict.fromkeys(FORMS, ("plan", "id", "title")),
}


@dataclass(frozen=True, slots=True)
class Wording:
    """How one model is asked for plans and their points, and how long its answers are.

    form: how a branch is asked.
    answer_tokens: the usual lengths of the model's direct answers to questions that are planned, by the
        language and kind of the question and the form of the answer. Planned answers aim at them.
    paragraph_tokens: a direct answer whose first paragraph has so many tokens is taken for a single
        paragraph, which is not planned; None for a model that answers in long paragraphs.
    sentences: the sentences of every language.
    """

    form: Form = DEFAULT_FORM
    answer_tokens: Mapping[Language, LengthsByKind] = field(default_factory=lambda: ANSWER_TOKENS)
    paragraph_tokens: int | None = PARAGRAPH_TOKENS
    sentences: Mapping[Language, Sentences] = field(default_factory=lambda: DEFAULT_SENTENCES)

    def of(self, question: str) -> Sentences:
        """Return the sentences of the question's language, English for languages without any.

        question: the text that the client asks.
        """
        return self.sentences[language_of(question)]

    def lengths_of(self, question: str) -> UsualLengths:
        """Return the usual lengths of direct answers to questions of this language and kind.

        question: the text that the client asks.
        """
        return self.answer_tokens[language_of(question)][kind_of(question)]


def read_wording(given: object) -> Wording:
    """Return the wording of a model's `specsot.json`: `{"form": ..., "sentences": {"en": {"outline": ...}}}`.
    What the value leaves out is the default; "measured" is for readers. Sentences of a language that the
    value leaves out are the defaults.

    given: the decoded JSON value.

    Raises ValueError, which names the key, for a value that is no object, for unknown keys, forms and
    languages, for a number of tokens that is not at least 1, and for a sentence whose places are missing or
    unknown.
    """
    wanted = _object("wording", given, ("form", "answer_tokens", "paragraph_tokens", "sentences", "measured"))
    form = wanted.get("form", DEFAULT_FORM)
    if form not in FORMS:
        raise ValueError(f"wording.form is {', '.join(FORMS)}, got {form!r}")
    tokens = _read_lengths(wanted.get("answer_tokens", {}))
    paragraph = wanted.get("paragraph_tokens", PARAGRAPH_TOKENS)
    if paragraph is not None and (not isinstance(paragraph, int) or paragraph < 1):
        raise ValueError(f"wording.paragraph_tokens is a number of tokens or null, got {paragraph!r}")
    sentences = dict(DEFAULT_SENTENCES)
    changed = _object("wording.sentences", wanted.get("sentences", {}), LANGUAGES)
    for language, texts in changed.items():
        place = f"wording.sentences.{language}"
        sentences[cast("Language", language)] = _changed(
            place, DEFAULT_SENTENCES[cast("Language", language)], texts
        )
    return Wording(form, tokens, paragraph, sentences)


def _read_lengths(given: object) -> Mapping[Language, LengthsByKind]:
    """Return the usual lengths of answers of a `specsot.json`:
    `{"en": {"list": {"plain": 280, "titled": 310}}}`. What the value leaves out has the default lengths.

    given: the decoded JSON value.

    Raises ValueError, which names the key, for a value that is no object, for unknown languages, kinds of
    questions and forms, and for a number of tokens that is not at least 1.
    """
    place = "wording.answer_tokens"
    lengths = {language: dict(by_kind) for language, by_kind in ANSWER_TOKENS.items()}
    for language, by_kind in _object(place, given, LANGUAGES).items():
        for kind, by_form in _object(f"{place}.{language}", by_kind, QUESTION_KINDS).items():
            found = _object(f"{place}.{language}.{kind}", by_form, ANSWER_FORMS)
            for form, tokens in found.items():
                if not isinstance(tokens, int) or tokens < 1:
                    raise ValueError(
                        f"{place}.{language}.{kind}.{form} is a number of tokens, got {tokens!r}"
                    )
            known = lengths[cast("Language", language)]
            default = known[cast("QuestionKind", kind)]
            known[cast("QuestionKind", kind)] = replace(default, **cast("dict[str, int]", found))
    return lengths


def _changed(place: str, sentences: Sentences, given: object) -> Sentences:
    """Return the sentences with those replaced that the file holds. All other sentences stay.

    place: where the value stands in the file, for errors.
    sentences: the default sentences of the language.
    given: the decoded JSON value.

    Raises ValueError if the value is no object of known sentences, or if a sentence is invalid.
    """
    texts = _object(place, given, tuple(one.name for one in fields(Sentences)))
    for name, text in texts.items():
        _check_places(f"{place}.{name}", name, text)
    return replace(sentences, **cast("dict[str, str]", texts))


def _check_places(place: str, name: str, text: object) -> None:
    """Check that a sentence is text with all required placeholders and no unknown ones; return nothing if it
    is. "conclusion" has no placeholder.

    place: where the sentence stands in the file, for errors.
    name: its name in `Sentences`.
    text: the decoded JSON value.

    Raises ValueError, which names the sentence, if it is not; and the ValueError of a text whose braces do
    not match.
    """
    if not isinstance(text, str):
        raise ValueError(f"{place} is a text, got {text!r}")
    found = [part for _, part, _, _ in Formatter().parse(text) if part is not None]
    if missing := [part for part in _REQUIRED[name] if part not in found]:
        raise ValueError(f"{place} has no {{{missing[0]}}}")
    if unknown := [part for part in found if part not in _ALLOWED[name]]:
        raise ValueError(f"{place} has {{{unknown[0]}}}, which stands for nothing here")


def _object(place: str, given: object, keys: Sequence[str]) -> dict[str, object]:
    """Return a value as an object. Its members are copied.

    place: where the value stands in the file, for errors.
    given: the decoded JSON value.
    keys: the members that the object may have.

    Raises ValueError if it is no object, or has another member.
    """
    if not isinstance(given, dict):
        raise ValueError(f"{place} is an object, got {given!r}")
    found = cast("dict[str, object]", dict(cast("dict[str, object]", given)))
    if unknown := [key for key in found if key not in keys]:
        raise ValueError(f"{place} has {', '.join(keys)}, not {unknown[0]!r}")
    return found


# Words that a question, or the first sentence of an answer, can hardly do without. A word that is common in
# several languages is in the list of each: "es" and "los" are German and Spanish.
_ENGLISH: Final = """
the of is are what which how why to and for my me you your with give tell explain write list has have can
some several many here there it its this these that but on by from as or be not should do does such their
they we our when if where was
"""
_GERMAN: Final = """
der die das den dem des und ist sind war ein eine einem einen einer eines wie was welche welchen welcher
welches welchem warum wozu ich man es mir mit für über nicht bitte gib nenne beim zum zur vom von aus auf
gegen oder wenn wer wann wo worauf woran wodurch soll sollte sollten kann kannst können wird werden gibt
geht los tun hat haben auch bei durch im um viele schreib schreibe beschreib beschreibe erklär erkläre zähle
vergleich vergleiche dein deine dich dir zwei drei vier fünf sechs sieben acht neun zehn zwölf tipps
vorteile nachteile gründe unterschiede zu sie ihr ihre ihren ihrer ihres ihrem ihnen sich hier einige
folgende folgenden folgender folgendes folgendem
"""
_SPANISH: Final = """
el la los las un una de en y que se lo su sus al del qué cómo cuáles cuál por para con sobre hay más como
son es mi me tu yo esta este entre algunos algunas varios varias dame dime hazlo explica explícame compara
enumera menciona nombra recomienda sugiere escribe traduce buenas gracias tres cuatro cinco seis siete ocho
nueve diez doce consejos ventajas razones maneras diferencias puedes puede aquí tienes siguientes debes
importante importantes bien beneficios
"""
# Chinese is told by its script.
_COMMON_WORDS: Final[Mapping[Language, frozenset[str]]] = {
    "en": frozenset(_ENGLISH.split()),
    "de": frozenset(_GERMAN.split()),
    "es": frozenset(_SPANISH.split()),
}
# Common words of one language that texts in others have as well, as parts of names ("Charles de Gaulle")
# or as rarer words ("die", "con").
_FOREIGN: Final = """
el la las un de del en al lo se su y des von war hat die den man con son
"""
# Words that give one point of evidence instead of two.
_WEAK_WORDS: Final = frozenset(_FOREIGN.split()) | {
    word
    for words in _COMMON_WORDS.values()
    for word in words
    if sum(word in others for others in _COMMON_WORDS.values()) > 1
}
# Points of evidence. At least so many tell a language: those of one word that no other language has, or of
# two weak words. Untuned.
_CLEAR_EVIDENCE: Final = 2
_WORD = re.compile(r"[^\W\d_]+")
# Names that begin with a Spanish word, such as "Los Angeles" and "El Niño". Spanish nouns have small letters.
_SPANISH_NAME = re.compile(r"\b(?:[Ee]l|[Ll]a|[Ll]os|[Ll]as|[Dd]el?)\s+[A-ZÁÉÍÓÚÑ]\w*")
# Characters that only one language has, each with its points of evidence. An "ñ" may be a part of a name.
_CHARACTERS: Final[Mapping[Language, Mapping[str, int]]] = {"de": {"ß": 2}, "es": {"¿": 2, "¡": 2, "ñ": 1}}
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA = re.compile(r"[\u3040-\u30ff]")
_LETTER = re.compile(r"[^\W\d_]")


def language_of(text: str, unclear: Language = "en") -> Language:
    """Return the language of a text as far as it can be told from its script and from common words. Return
    `unclear` if it cannot.

    The language is Chinese if more than a third of the letters are Han script and no letter is kana, which
    Japanese has. Otherwise it is the language with the most points of evidence, if these are at least
    _CLEAR_EVIDENCE and more than those of `unclear`. A common word gives two points, and one if texts
    in other languages have it as well. A tie between German and Spanish is German.

        "Los Angeles offers beaches" -> no point, because "los" is a part of a name -> unclear
        "Geht es los?" -> four points for German, two for Spanish -> "de"

    text: a question of the client, or the introduction of an answer.
    unclear: the language of a text without clear evidence.
    """
    letters = len(_LETTER.findall(text))
    if letters and len(_HAN.findall(text)) * 3 > letters and not _KANA.search(text):
        return "zh"
    points = _points_of_evidence(_SPANISH_NAME.sub(" ", text).lower())
    best = max(points, key=points.__getitem__)
    is_clear = points[best] >= _CLEAR_EVIDENCE and points[best] > points.get(unclear, 0)
    return best if is_clear else unclear


def _points_of_evidence(text: str) -> dict[Language, int]:
    """Return the points of evidence for each language but Chinese, see `language_of`. A word counts once,
    however often the text has it.

    text: the text, in lower case and without Spanish names.
    """
    words = set(_WORD.findall(text))
    points: dict[Language, int] = {}
    for language, common in _COMMON_WORDS.items():
        found = words & common
        points[language] = 2 * len(found) - len(found & _WEAK_WORDS)
        points[language] += sum(each for one, each in _CHARACTERS.get(language, {}).items() if one in text)
    return points


def kind_of(question: str) -> QuestionKind:
    """Return what a question that is planned asks for.

    question: the text that the client asks.
    """
    return "comparison" if compares(question) else "list"


def append_words(question: str, words: str, paragraph: bool = False) -> str:
    """Return the question followed by words of ours. White space at the end of the question is dropped.

    The words continue the question's line if the question is one sentence on one line. Otherwise they are a
    paragraph of their own, so that the model does not take them for a part of a text that the question brings
    along.

    question: the text that the client asks.
    words: what the master asks for, such as a plan.
    paragraph: True to make the words a paragraph of their own in any case.
    """
    sentence = question.rstrip().endswith((".", "?", "!", "。", "？", "！")) and "\n" not in question.strip()
    return question.rstrip() + (" " if sentence and not paragraph else "\n\n") + words
