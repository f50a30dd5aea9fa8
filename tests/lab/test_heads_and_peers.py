"""`specsot bench ranks`, `tuner` and `llamacpp`: what rows are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsot_app.cli import main
from specsot_app.fleet.options import FleetOptions
from specsot_bench.core.pairing import Sample
from specsot_lab.bench import llamacpp, tuner
from specsot_lab.bench.pairs import PairedAnswer

pytestmark = pytest.mark.torch

ANSWER = "Photosynthesis is how plants turn light into sugar. It needs water and air. It gives off oxygen."


def test_ranks_of_the_small_pair_by_shape(tmp_path: Path) -> None:
    texts, file = tmp_path / "texts.jsonl", tmp_path / "ranks.json"
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": ANSWER}]
    texts.write_text(json.dumps({"messages": turns}) + "\n")
    asked = ["bench", "ranks", "--texts", str(texts), "--most", "1", "--tokens", "24", "--json", str(file)]
    assert main([*asked, "--shapes", "2,6"]) == 0
    told = json.loads(file.read_text())
    assert told["settings"] == {"texts": "texts.jsonl", "conversations": 1}
    chain, tree = told["rows"]
    assert (chain["name"], tree["name"]) == ("chain of 2", "tree of 6")
    assert 1 <= chain["tokens a step"] <= 3


def test_with_many_clients_the_policy_is_compared_with_the_best_fixed_setting() -> None:
    """The baseline is one of them: where drafts do not pay, it is the best."""
    rows = tuner.rows_of(
        {1: {"plain": 100.0, "the tuner": 180.0, "tree of 8": 200.0}, 8: {"plain": 400.0, "the tuner": 380.0}}
    )
    found = {row["name"]: (row["of_baseline"], row["of_best"]) for row in rows}
    assert found["1: the tuner"] == (1.8, 0.9)
    assert found["8: the tuner"] == (0.95, 0.95)


def test_ways_are_compared_with_llama_cpp_of_the_same_round() -> None:
    def answers(*seconds: float, **more: object) -> list[PairedAnswer]:
        return [PairedAnswer("", Sample(60, one), **more) for one in seconds]  # type: ignore[arg-type]

    rows = {row["name"]: row for row in llamacpp.rows_of({
        "llama.cpp": answers(2.0, 4.0),
        "int8 plain": answers(1.0, 2.0),
        "int8 both": answers(0.5, 0.5, branches=Sample(60, 0.25), steps=20),
        "int8 by script": answers(1.0, 1.5),
    })}  # fmt: skip
    both = rows["int8 both"]
    assert (both["peer"], both["plain"], both["per_step"]) == (6.0, 3.0, 3.0)
    assert (both["branches"], both["script"]) == (6.0, 2.5)
    assert rows["int8 plain"]["script"] is rows["llama.cpp"]["branches"] is None


def test_decoding_is_compared_after_the_first_token_of_each_side() -> None:
    """A side that reads the prompt slowly may decode fast: 49 tokens in 2 s beside 49 tokens in 1 s."""
    rows = {row["name"]: row for row in llamacpp.rows_of({
        "llama.cpp": [PairedAnswer("", Sample(50, 10.0), first=8.0)],
        "int8 plain": [PairedAnswer("", Sample(50, 3.0), first=2.0)],
        "int8 branches": [PairedAnswer("", Sample(50, 3.0))],
    })}  # fmt: skip
    assert (rows["llama.cpp"]["first"], rows["llama.cpp"]["decoding"]) == (8.0, 24.5)
    assert (rows["int8 plain"]["decoding"], rows["int8 plain"]["peer_decoding"]) == (49.0, 2.0)
    assert rows["int8 branches"]["decoding"] is rows["int8 branches"]["peer_decoding"] is None


def test_no_prompt_of_many_clients_or_with_a_passage_is_sent_twice() -> None:
    """The passage would otherwise be in SpecSoT's prefix cache, and llama.cpp would read it again."""
    task = llamacpp.PeerTask(
        "python", "file", FleetOptions(), ("int8",), ("plain",), 2, 8, 2, 60.0, None, 30, 3
    )
    rounds = [task.questions(number) for number in range(4)]
    assert [len(round_) for round_ in rounds] == [3] * 4
    beginnings = {" ".join(question.split()[:2]) for round_ in rounds for question in round_}
    assert len(beginnings) == 12
    assert all(len(question.split()) > 30 for round_ in rounds for question in round_)


def test_ways_that_cannot_be_measured_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "llamacpp", "--peer", "python", "--gguf", "file"]
    assert main([*command, "--ways", "small"]) == 2
    assert "--small-model" in capsys.readouterr().err
    assert main([*command, "--ways", "branches", "--clients", "4"]) == 2
    assert "--clients" in capsys.readouterr().err
