"""Scores of made-up answers whose scores are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsot.errors import ModelError
from specsot_lab.eval import scoring
from specsot_lab.eval.tasks import TASKS, read_task, score


def test_exact_match_forgives_case_articles_and_punctuation_alone() -> None:
    assert scoring.exact_match("The United Kingdom.", ["united kingdom"]) == 1
    assert scoring.exact_match("in the United Kingdom", ["united kingdom"]) == 0
    assert scoring.exact_match("the U.S.", ["US"]) == scoring.exact_match("1234", ["1,234"]) == 1
    assert scoring.exact_match("at 10 A.M.", ["at 10 m"]) == 0, "SQuAD drops marks before articles"


def test_f1_of_two_words_in_four() -> None:
    assert scoring.token_f1("it was World War", ["World War"]) == pytest.approx(2 * 0.5 * 1 / 1.5)
    assert scoring.token_f1("nothing", ["1942", "World War"]) == 0
    assert scoring.token_f1("in 1942", ["World War", "in 1942"]) == 1


def test_rouge_l_follows_the_order_of_words() -> None:
    assert scoring.rouge_l("police killed gunman", ["police kill gunman"]) == pytest.approx(2 / 3)
    assert scoring.rouge_l("gunman kill police", ["police kill gunman"]) == pytest.approx(1 / 3)
    assert scoring.rouge_l("The gunman", ["the gunman", ""]) == 1
    assert scoring.rouge_l("gunman", ["the gunman"]) == pytest.approx(2 / 3), "an article is a word"


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("8 + 8 = 16. The answer is 160.", "160", 1),
        ("It is $1,234.50.", "1234.5", 1),
        ("1,00,000 rupees", "100000", 1),
        ("160 minutes, or 3 hours", "160", 0),
        ("none", "160", 0),
        ("so -3", "-3", 1),
        ("a loss of -$3", "-3", 1),
        ("so \u22123", "-3", 1),
        ("which leaves 10-3", "3", 1),
        ("half of them, 50%", "50%", 1),
        ("$5", "$5", 1),
        ("about .5", "0.5", 1),
        ("They have 7,8,9", "9", 1),
        ("It is 72.", "He has 48 / 2 = 24.\n#### 72", 1),
        ("It is 72.\n\n## 3. Check it\nIt is right.", "72", 1),
    ],
)
def test_gsm8k_takes_the_last_number(answer: str, reference: str, right: float) -> None:
    assert scoring.final_number(answer, [reference]) == right


def test_retrieval_takes_the_first_number() -> None:
    assert scoring.first_number("Passage [3] answers it.", ["3"]) == 1
    assert scoring.first_number("33", ["3"]) == 0
    assert scoring.first_number("Passages 3,5", ["3"]) == scoring.first_number("Passage-3", ["3"]) == 1
    assert scoring.first_number("## 1. Read it\nPassage 3", ["3"]) == 1, "a heading's number is the plan's"


@pytest.mark.parametrize("reference", ["seven", "1/2", ""])
def test_a_reference_that_is_no_number_can_not_be_scored_by(reference: str) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        scoring.final_number("7", [reference])


def test_coverage_is_the_share_of_what_was_asked() -> None:
    asked = scoring.dimensions_of("Plan a trip from Greer to Pennsylvania.\n- quiet hotels\nBudget: $3,400.")
    assert asked == ("quiet hotels", "Greer", "Pennsylvania", "$3,400")
    assert scoring.coverage("From Greer, with quiet hotels, for $3,400", asked) == 0.75
    assert scoring.coverage("", asked) == 0


def test_every_task_has_prompts_and_scores_what_it_can() -> None:
    for name in TASKS:
        prompts = read_task(name)
        assert len({prompt.id for prompt in prompts}) == len(prompts) >= 8
    for name in ("retrieval", "multi-doc-qa", "gsm8k"):
        assert all(next(iter(score(one, one.references[0]).values())) == 1 for one in read_task(name))
    assert all(score(one, one.turns[0]).get("coverage", 1) == 1 for one in read_task("planning"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "2", "turns": "Hi"}', "turns must be a list, got 'Hi'"),
        ('{"id": "2", "turns": []}', "turns is empty"),
        ('{"id": "2", "turns": [null]}', "turns must be a list of texts"),
        ('{"id": "2", "turns": ["Hi"], "reference": "72"}', "reference must be a list, got '72'"),
        ('{"id": "2", "turns": ["Hi"], "reference": ["1/2"]}', "a reference must be a number, not '1/2'"),
        ('{"turns": ["Hi"]}', "it has no 'id'"),
        ('{"id": "1", "turns": ["Hi"]}', "has the id '1', too"),
        ("[1]", "not an object"),
        ("{", "Expecting property name"),
    ],
)
def test_an_invalid_prompt_is_reported_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "my.jsonl"
    file.write_text(f'{{"id": "1", "turns": ["Hi"], "reference": [72]}}\n\n{line}\n')
    with pytest.raises(ModelError, match=rf"my.jsonl, line 3: .*{said}"):
        read_task("gsm8k", file)


def test_a_text_may_have_any_signs_in_it(tmp_path: Path) -> None:
    file = tmp_path / "my.jsonl"
    file.write_text('\ufeff{"id": 1, "category": null, "turns": ["one\u2028two\x85"]}\r\n', encoding="utf-8")
    (prompt,) = read_task("vicuna", file)
    assert (prompt.id, prompt.category, prompt.turns) == ("1", "vicuna", ("one\u2028two\x85",))
