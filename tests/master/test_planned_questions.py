"""Mode auto plans lists, and none of the questions that must not be planned, in the four languages.

The questions were written after the rules. One of the 120 was decided wrongly then, "How would you translate
...", and the rule was mended.
"""

from __future__ import annotations

import pytest

from specsot.params import Ask, Message
from specsot_master.core.plans.router import decide
from specsot_master.core.plans.wording import language_of

LISTS = {
    "en": (
        "What are the advantages of keeping bees?",
        "How can I get my dog to stop barking?",
        "What should I think about before adopting a cat?",
        "Name ten exercises that need no equipment.",
        "Compare tents and camper vans for a summer holiday.",
        "What are the main parts of a bicycle, and what do they do?",
        "How do hospitals prevent infections?",
        "Give me some ideas for a school science fair.",
        "What are typical reasons for a power cut?",
        "How do I plan a garden for a small balcony?",
        "Explain how a bill becomes a law.",
        "What are the differences between a crypto wallet and a bank account?",
        "Which habits help people to stay focused at work?",
        "What could a library do to reach more teenagers?",
        "Discuss the effects of tourism on small islands.",
        "Twelve ways to use leftover rice",
    ),
    "de": (
        "Welche Nachteile haben Elektroautos?",
        "Wie plane ich eine Fahrradtour an die Ostsee?",
        "Was muss ich beim Kauf eines Laptops beachten?",
        "Nenne zwölf Berufe mit guten Aussichten.",
        "Vergleiche Gasheizung und Wärmepumpe.",
        "Wie entsteht ein Gewitter, und welche Gefahren bringt es mit sich?",
        "Was sind typische Anzeichen für Stress bei Hunden?",
        "Erkläre die Aufgaben der Europäischen Union.",
    ),
    "es": (
        "¿Qué desventajas tienen los coches eléctricos?",
        "¿Cómo preparo un viaje en bicicleta por la costa?",
        "¿Qué debo mirar antes de comprar un portátil?",
        "Nombra diez plantas fáciles de cuidar.",
        "Compara la calefacción de gas con la bomba de calor.",
        "¿Cuáles son las señales de estrés en un perro?",
        "Explica las funciones de la Unión Europea.",
        "¿Cómo puede una escuela reducir su consumo de papel?",
    ),
    "zh": (
        "电动汽车有哪些缺点？",
        "怎样准备一次骑行旅行？",
        "买笔记本电脑要考虑什么？",
        "列出十种容易养的植物。",
        "比较燃气供暖和热泵。",
        "狗狗感到压力时有哪些表现？",
        "请解释联合国的主要职能。",
        "学校怎样减少纸张的使用？",
    ),
}
NOT_PLANNED = {
    "code": (
        "Write a C function that counts the vowels of a string.",
        "Implement binary search in Go.",
        "What does this print? print([i**2 for i in range(3)])",
        "Fix this code: for i in range(10) print(i)",
        "How do I reverse a string in Rust?",
        "Write a SQL query for the five newest orders.",
        "Give me a regex for IPv4 addresses.",
        "Write a bash script that backs up my home folder.",
    ),
    "arithmetic": (
        "What is 48 * 37?",
        "What's 18% of 250?",
        "If a pen costs $2 and a book $7, how much do 3 pens and 2 books cost?",
        "Solve x^2 - 5x + 6 = 0.",
        "A cyclist rides 45 km in 3 hours. What is her average speed?",
        "What is the sum of the first 20 integers?",
        "Convert 5 miles to kilometres.",
        "How many minutes are there in 3 days?",
    ),
    "greetings": (
        "Hi!",
        "Hello, nice to see you.",
        "Good evening!",
        "Thanks a million!",
        "How are you doing?",
        "What's up?",
        "See you later!",
        "Happy new year!",
    ),
    "translation": (
        "Translate to German: The train leaves at noon.",
        "Translate into Spanish: I would like a table for two.",
        "How do you say 'thank you' in Japanese?",
        "What is 'bridge' in Italian?",
        "Translate the following text into French: We will meet on Monday.",
        "Please translate: Wo ist der Bahnhof?",
        "Translate into Chinese: What are the benefits of exercise?",
        "How would you translate 'Feierabend' into English?",
    ),
    "rewriting": (
        "Rewrite this politely: Give me the file.",
        "Make this text shorter: The weather was so nice that we decided to stay outside all day long.",
        "Correct the grammar: He don't likes coffee.",
        "Paraphrase this sentence: Time heals all wounds.",
        "Summarize the following in one sentence: The shop opens at nine and closes at six.",
        "Change this to the past tense: She walks to school and meets her friends.",
        "Proofread this: Their going too the park.",
        "Turn these notes into one sentence: meeting Tuesday, room 5, bring laptop",
    ),
    "de": (
        "Servus, alles klar?",
        "Was ist 24 mal 17?",
        "Übersetze ins Spanische: Ich habe Hunger.",
        "Schreibe eine Funktion in Python, die Primzahlen ausgibt.",
        "Formuliere den Satz höflicher: Mach das Fenster zu.",
        "Wer hat die Zauberflöte komponiert?",
        "Vielen Dank für deine Hilfe!",
        "Ist der Mond größer als der Mars?",
    ),
    "es": (
        "¡Buenos días!",
        "¿Cuánto es 24 por 17?",
        "Traduce al alemán: Tengo hambre.",
        "Escribe una función en Python que imprima números primos.",
        "Reescribe la frase con más cortesía: Cierra la ventana.",
        "¿Quién compuso La flauta mágica?",
        "Gracias por tu ayuda.",
        "¿Es la Luna más grande que Marte?",
    ),
    "zh": (
        "早上好！",
        "24乘以17等于多少？",
        "把“我饿了”翻译成德语。",
        "用Python写一个输出质数的函数。",
        "把这句话说得更礼貌一些：把窗户关上。",
        "《魔笛》是谁写的？",
        "谢谢你的帮助！",
        "月球比火星大吗？",
    ),
}
FOLLOW_UPS = (
    "Why is that?",
    "Can you say more about the second point?",
    "Make it shorter.",
    "Give me another example.",
    "What about older people?",
    "Rewrite your answer as a table.",
    "And the third one?",
    "Please explain that again.",
    "Which of them is the most important?",
    "Translate that into German.",
    "Wie meinst du das?",
    "Erkläre den ersten Punkt noch einmal.",
    "¿Qué quieres decir con eso?",
    "Explícame otra vez el último punto.",
    "请再解释一下第一点。",
    "能举个例子吗？",
)


def is_planned(*turns: str) -> bool:
    """Whether mode auto plans the last of these messages of a user; answers stand between them."""
    asked = [Message("user", turns[0])]
    for turn in turns[1:]:
        asked += [Message("assistant", "There are several. 1. Health 2. Time"), Message("user", turn)]
    ask = Ask(messages=tuple(asked), mode="auto")
    return decide(ask, ask.messages, taught=False).mode == "sot"


def test_85_of_100_lists_are_planned() -> None:
    lists = [question for questions in LISTS.values() for question in questions]
    assert len(lists) == 40
    left_out = [question for question in lists if not is_planned(question)]
    assert len(left_out) <= 6, left_out


@pytest.mark.parametrize("language", ["de", "es", "zh"])
def test_lists_are_planned_in_every_language(language: str) -> None:
    left_out = [question for question in LISTS[language] if not is_planned(question)]
    assert len(left_out) <= 1, left_out


def test_no_question_for_a_single_answer_is_planned() -> None:
    alone = [question for questions in NOT_PLANNED.values() for question in questions]
    assert len(alone) + len(FOLLOW_UPS) == 80
    planned = [question for question in alone if is_planned(question)]
    planned += [turn for turn in FOLLOW_UPS if is_planned("What are the benefits of tea?", turn)]
    assert planned == []


@pytest.mark.parametrize("language", ["en", "de", "es", "zh"])
def test_the_language_of_a_list_question_is_known(language: str) -> None:
    assert {question: language_of(question) for question in LISTS[language]} == dict.fromkeys(
        LISTS[language], language
    )
