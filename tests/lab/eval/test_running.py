"""A run keeps every answer as it comes, goes on behind the last one, and never mixes settings."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import pytest

from specsot.errors import InvalidRequest, ModelError
from specsot.params import Window
from specsot_app.fleet.opening import FleetClient
from specsot_app.fleet.options import ClientOptions, FleetOptions
from specsot_lab.eval.aggregate import CategoryRow
from specsot_lab.eval.records import Folder, read_records
from specsot_lab.eval.running import Run, evaluate, with_warm_up
from specsot_lab.eval.tasks import Prompt, read_task
from tests.lab.eval.speaker import Broken, Speaker

MATHS = read_task("gsm8k")[:2]
TALK = [Prompt("mt_bench", "81", "writing", ("Write.", "Again, shorter."))]
ELSEWHERE = FleetOptions(master="127.0.0.1:1", client=ClientOptions(token="secret"))


async def ask(
    speaker: Speaker,
    output: Path,
    prompts: Sequence[Prompt] = MATHS,
    wanted: FleetOptions = ELSEWHERE,
    tokens: int = 8,
) -> str:
    async def opener(_: FleetOptions) -> FleetClient:
        return speaker

    def draw(lines: Sequence[CategoryRow], file: Path, out: TextIO) -> None:
        out.write(f"{file.name} of {len(lines)}\n")

    out = io.StringIO()
    run = Run(prompts, wanted, tokens, Folder(output), opener, out, io.StringIO())
    assert await evaluate(run, draw) == 0
    return out.getvalue()


async def test_a_run_that_was_broken_off_asks_only_what_is_left(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        await ask(Speaker(3), tmp_path)
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"task": "gsm8k", "cut')
    speaker = Speaker()
    told = await ask(speaker, tmp_path)
    assert [(one.mode, one.limits.max_new_tokens) for one in speaker.asked] == [("sot", 8)]
    assert [one["scores"]["final_number"] for one in read_records(tmp_path / "records.jsonl")] == [1, 1, 0, 0]
    assert "| gsm8k | math " in told
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["settings"]["served"] == [["demo", "f1"]]
    assert [row["name"] for row in summary["rows"]] == ["gsm8k, math"]
    assert [(row["speedup"], row["verdict"]) for row in summary["rows"]] == [(2.0, "sot")], (
        "a plan is no text"
    )
    assert "plot.png of 1" in told
    assert "secret" not in (tmp_path / "settings.json").read_text()


async def test_the_demo_models_quality_means_nothing(tmp_path: Path) -> None:
    assert "means nothing" in await ask(Speaker(), tmp_path, wanted=FleetOptions())


async def test_a_preset_is_for_every_question(tmp_path: Path) -> None:
    speaker = Speaker()
    await ask(speaker, tmp_path, wanted=replace(ELSEWHERE, preset="long"))
    assert {one.window for one in speaker.asked} == {Window(4, 1020)}
    with pytest.raises(InvalidRequest, match="preset was 'long', is 'small'"):
        await ask(Speaker(), tmp_path, wanted=replace(ELSEWHERE, preset="small"))


async def test_a_fleet_has_answered_both_ways_before_an_answer_counts() -> None:
    speaker = Speaker()

    async def opener(_: FleetOptions) -> FleetClient:
        return speaker

    assert await with_warm_up(opener)(ELSEWHERE) is speaker
    assert [(one.mode, one.limits.max_new_tokens) for one in speaker.asked] == [("direct", 64), ("sot", 64)]
    speaker.left = 0
    with pytest.raises(Broken):
        await with_warm_up(opener)(ELSEWHERE)
    assert speaker.closed


async def test_a_refused_request_is_reported_and_not_scored(tmp_path: Path) -> None:
    told = await ask(Speaker(refused="Carla"), tmp_path)
    assert "not answered: gsm8k 0 (direct): too long" in told


async def test_later_turns_follow_the_answers_of_their_own_side(tmp_path: Path) -> None:
    speaker = Speaker()
    await ask(speaker, tmp_path, TALK)
    said = [(one.mode, [message.content for message in one.messages]) for one in speaker.asked]
    assert said == [
        (mode, words)
        for mode in ("direct", "sot")
        for words in (["Write."], ["Write.", f"{mode}: 160", "Again, shorter."])
    ]
    assert [len(one["turns"]) for one in read_records(tmp_path / "records.jsonl")] == [2, 2]


async def test_a_refused_later_turn_leaves_the_first(tmp_path: Path) -> None:
    told = await ask(Speaker(refused="Again"), tmp_path, TALK)
    assert "not answered: mt_bench 81 (sot): too long" in told
    assert [len(one["turns"]) for one in read_records(tmp_path / "records.jsonl")] == [1, 1]


async def test_what_the_fleet_broke_off_is_no_answer_and_is_asked_again(tmp_path: Path) -> None:
    told = await ask(Speaker(fails="Carla"), tmp_path)
    assert "not answered: gsm8k 0 (direct): the answer was broken off: cancelled" in told
    speaker = Speaker()
    assert "not answered" not in await ask(speaker, tmp_path)
    assert [one.mode for one in speaker.asked] == ["direct", "sot"], "of that question alone"
    refused = Speaker(0)
    await ask(refused, tmp_path)
    assert not refused.asked


async def test_a_corrected_reference_scores_what_was_answered_before(tmp_path: Path) -> None:
    await ask(Speaker(), tmp_path)
    corrected = [replace(one, references=("160",), category="sums") for one in MATHS]
    await ask(Speaker(0), tmp_path, corrected)
    (row,) = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert (row["category"], row["direct_quality"]) == ("sums", 1)


@pytest.mark.parametrize("line", ["3", '{"task": "gsm8k"}', "{"])
def test_a_line_that_is_no_record_is_reported(tmp_path: Path, line: str) -> None:
    (tmp_path / "records.jsonl").write_text(f"{line}\n")
    with pytest.raises(ModelError, match="not records of a run"):
        read_records(tmp_path / "records.jsonl")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (dict(tokens=9), "max_new_tokens was 8, is 9"),
        (dict(wanted=replace(ELSEWHERE, drafter="none")), "drafter was None, is 'none'"),
    ],
)
async def test_other_settings_are_refused_until_a_fresh_start(
    tmp_path: Path, other: dict[str, Any], told: str
) -> None:
    await ask(Speaker(), tmp_path)
    with pytest.raises(InvalidRequest, match=told):
        await ask(Speaker(), tmp_path, **other)
    Folder(tmp_path).forget()
    await ask(Speaker(), tmp_path, **other)


def test_what_is_not_ours_in_a_folder_is_not_forgotten(tmp_path: Path) -> None:
    for name in ("settings.json", "records.jsonl", "summary.json", "plot.png", "mine"):
        (tmp_path / name).touch()
    Folder(tmp_path).forget()
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


async def test_another_model_of_the_same_master_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        await ask(Speaker(1), tmp_path)
    with pytest.raises(InvalidRequest, match=r"served was \[\['demo', 'f1'\]\], is \[\['demo', 'f2'\]\]"):
        await ask(Speaker(serves="f2"), tmp_path)


async def test_records_without_settings_are_refused(tmp_path: Path) -> None:
    await ask(Speaker(), tmp_path)
    (tmp_path / "settings.json").unlink()
    with pytest.raises(InvalidRequest, match="is not recorded"):
        await ask(Speaker(), tmp_path)


async def test_other_words_under_an_old_id_are_another_prompt(tmp_path: Path) -> None:
    await ask(Speaker(), tmp_path, TALK)
    speaker = Speaker()
    await ask(speaker, tmp_path, [replace(TALK[0], turns=("Sing.",))])
    assert [one.messages[0].content for one in speaker.asked] == ["Sing."] * 2
