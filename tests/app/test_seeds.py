"""The scripts of the systems before this one, as printed; only paths and lengths are the small pair's."""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from specsot.core.skeleton import Point, read_plan
from specsot.errors import InvalidRequest
from specsot.events import Event, Planned, SkeletonText
from specsot.service.command import ForeignName, TableCommand
from specsot.service.option_table import InactiveOption
from specsot_app.api import SpecSoT
from specsot_app.cli import main, specsot
from specsot_app.commands.infer import infer
from specsot_app.commands.serve import serve
from specsot_app.fleet.options import FleetOptions, models_of, with_stages
from tests.conftest import REPOSITORY

BASE, HEAD = REPOSITORY / "models/demo/base", REPOSITORY / "models/demo/eagle3"
PAGE = (REPOSITORY / "docs/migrating.md").read_text()
ROWS = (REPOSITORY / "tests/app/predecessors.md").read_text()
MODELS = f"--base_model_path {BASE} --eagle_model_path {HEAD}"


def given_to(command: TableCommand, line: str) -> object:
    """The settings that a command line becomes."""
    heard: list[object] = []
    run, command.run = command.run, heard.append
    try:
        command(args=shlex.split(line), standalone_mode=False)
    finally:
        command.run = run
    return heard[0]


def told(line: str) -> tuple[int, str]:
    """A command's status, and its one line of complaint."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        return main(shlex.split(line)), err.getvalue().strip()


@pytest.mark.torch
def test_the_python_snippet_as_printed() -> None:
    import torch

    from specsot import SpecSoTModel

    model = SpecSoTModel.from_pretrained(
        base_model_path=str(BASE),
        ea_model_path=str(HEAD),
        use_eagle3=True,
        dtype=torch.float32,
        device_map="cpu",
    )
    with model:
        output_ids, stats = model.generate(
            task_prompt="What is photosynthesis?",
            max_new_tokens=200,
            temperature=0.0,
            top_p=0.0,
            enable_parallel=True,
            use_semantic_constraint=True,
            use_scheduling=True,
            max_parallel=2,
        )
        response = model.tokenizer.decode(output_ids[0], skip_special_tokens=True)
    assert response == stats["output_text"]
    assert re.match(r"## 1\. .+\n", response)
    assert stats["tokens"] == output_ids.shape[1]
    assert stats["mode"] == "specsot"
    assert {"queue", "skeleton", "skeleton_prefill", "branches", "branches_prefill"} == set(stats["phases"])
    half = SpecSoTModel.from_pretrained(
        str(BASE), str(HEAD), dtype=torch.float16, use_bim_mode=True, use_scheduling=True, world_size=2
    )
    with half:
        ids, stats = half.generate(
            task_prompt="Why?", max_new_tokens=3, enable_parallel=False, max_skeleton_tokens=200,
            repetition_penalty=0.0, seed=42,
        )  # fmt: skip
    assert (ids.shape[1], stats["mode"]) == (stats["tokens"], "eagle")


def run_as_main(monkeypatch: pytest.MonkeyPatch, name: str, line: str) -> None:
    """`python -m specsot ...`, or a script of the repository, up to its exit status 0."""
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(line)])
    run = runpy.run_path if name.endswith(".py") else runpy.run_module
    with pytest.raises(SystemExit) as ended:
        run(name, run_name="__main__")
    assert not ended.value.code


@pytest.mark.torch
def test_infer_as_printed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    line = (
        f"infer --prompt 'What is photosynthesis?' {MODELS} --use_eagle3 True --max_new_tokens 20 "
        "--enable_parallel False --use_semantic_constraint True --use_scheduling True --max_parallel 2 "
        "--distributed False --use_bim_mode False --ignore_eos"
    )
    monkeypatch.setenv("SPECSOT_DTYPE", "fp32")  # in bf16 the words depend on the processor
    run_as_main(monkeypatch, "specsot", line)
    assert "Photosynth" in capfd.readouterr().out


def test_serve_with_their_names_has_http_at_its_port() -> None:
    theirs = given_to(serve, f"{MODELS} --host 0.0.0.0 --port 8000 --enable_parallel True")
    assert (theirs.http_port, theirs.port, theirs.master.default_mode) == (8000, 0, "auto")
    assert (str(theirs.fleet.model), str(theirs.fleet.draft_model)) == (str(BASE), str(HEAD))
    ours = given_to(serve, f"--model {BASE} --port 8000")
    assert (ours.http_port, ours.port) == (None, 8000)


def test_several_gpus_as_printed() -> None:
    line = '--distributed True --devices "127.0.0.1#0,127.0.0.1#1,127.0.0.1#2" --layer_splits "14,28"'
    assert given_to(serve, line).layer_splits == "14,28"
    pytest.importorskip("specsot_lab")
    command = specsot().get_command(None, "eval")
    given = given_to(command, "--world_size 3 --gpu_ids 5,6,7 --layer_splits 14,28 --task retrieval")
    assert (given.fleet.stages, given.tasks) == (3, "retrieval")
    assert (given.fleet.devices, given.fleet.layers) == (
        "127.0.0.1#5,127.0.0.1#6,127.0.0.1#7",
        "0:14,14:28,28:",
    )


@pytest.mark.torch
def test_a_model_without_a_prompt_file_plans_in_markers(tmp_path: Path) -> None:
    """It writes a list, and the client reads the seed's language."""
    for file in BASE.iterdir():
        if file.name != "specsot.json":
            (tmp_path / file.name).symlink_to(file)
    with SpecSoT.from_pretrained(str(tmp_path), plan_style="markers", dtype="fp32") as model:
        asked = {"mode": "sot", "max_new_tokens": 128, "max_skeleton_tokens": 64}
        events = collected(model, "What is sleep?", asked)
    texts = [event.text for event in events if isinstance(event, SkeletonText)]
    (planned,) = [event for event in events if isinstance(event, Planned)]
    if planned.points:
        (plan,) = texts
        assert re.fullmatch(r"\[PLAN\]\n(\d+\.<\d{1,4}><None>\[-\].+\n)+\[END\]", plan), plan
        assert read_plan(plan) == planned.points
    else:
        assert not texts, "a list without two usable points is never shown"


def collected(model: SpecSoT, question: str, asked: dict[str, object]) -> list[Event]:
    async def gather() -> list[Event]:
        return [event async for event in model.stream(question, **asked)]

    return asyncio.run(gather())


@pytest.mark.torch
def test_run_specsot_as_printed_and_one_after_the_other_with_other_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One prompt, asked both ways; as printed first, and again at the end."""
    pytest.importorskip("specsot_lab")
    monkeypatch.chdir(tmp_path)
    script = str(REPOSITORY / "run_specsot.py")
    line = f"{MODELS} --num_samples 1 --max_new_tokens 64"
    printed = f"--distributed False --enable_parallel True --task planning {line}"
    split = '--distributed True --devices "127.0.0.1#cpu,127.0.0.1#cpu" --layer_splits 4 --comm_mode p2p'
    for words in (printed, f"{line} {split}", f"{line} --temperature 0.7 --enable_parallel False", printed):
        run_as_main(monkeypatch, script, words)
    kept = {folder.name: (folder / "records.jsonl").read_text() for folder in tmp_path.iterdir()}
    assert {name: len(records.splitlines()) for name, records in kept.items()} == {
        "eval": 2,
        "eval-2": 2,
        "eval-3": 1,
    }, "the last run has the settings of the first one, so it asks nothing anew"


def test_run_specsot_needs_no_installation_of_the_lab(tmp_path: Path) -> None:
    """As after a plain install: the lab is on no path, and neither are the packages that it asks for."""
    program = (
        "import runpy, sys\n"
        "sys.path[:] = [path for path in sys.path if not path.rstrip('/').endswith('/lab')]\n"
        "sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in str(one)]\n"
        "sys.modules.update(matplotlib=None, zstandard=None)\n"
        "sys.argv[:] = ['run_specsot.py', '--help']\n"
        f"runpy.run_path({str(REPOSITORY / 'run_specsot.py')!r}, run_name='__main__')\n"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (0, "")
    assert "--temperature" in said.stdout


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (f"infer --prompt Why? {MODELS} --use_eagle3 False", "is an EAGLE-3 head"),
        ("infer --prompt Why? --distributed perhaps", "'perhaps' is not True or False"),
        ("infer --prompt Why? --distributed True --world_size 1", "distributed is True, but stages say 1"),
        ("infer --base_model_path a --model b --prompt Why?", "--base-model-path is another name of --model"),
    ],
)
def test_what_contradicts_is_refused_in_one_line(line: str, why: str) -> None:
    status, said = told(line)
    assert (status, said.count("\n")) == (2, 0)
    assert why in said


@pytest.mark.parametrize(
    ("distributed", "given", "stages"),
    [(True, {}, 2), (False, {}, 1), (True, {"devices": "a#0,b#0"}, None), (True, {"stages": 3}, 3)],
)
def test_distributed_is_a_number_of_stages(
    distributed: bool, given: dict[str, object], stages: int | None
) -> None:
    assert with_stages(distributed, given)["stages"] == stages


@pytest.mark.parametrize(
    ("given", "inactive"),
    [
        ({"layer-splits": "14,28"}, "layer_splits 14,28"),  # of `serve`
        ({"layers": "0:14,14:28,28:"}, "layers 0:14,14:28,28:"),
        ({"stages": 3}, "stages 3"),
        ({"devices": "127.0.0.1#5,127.0.0.1#6"}, "devices 127.0.0.1#6"),
    ],
)
def test_what_splits_a_model_has_no_effect_if_it_is_not_distributed(
    given: dict[str, object], inactive: str
) -> None:
    with pytest.warns(InactiveOption, match=f"because distributed is False: {inactive}$") as shown:
        kept = with_stages(False, given)
    assert len(shown) == 1, "one line"
    assert kept == {"stages": 1} | ({"devices": "127.0.0.1#5"} if "devices" in given else {})


@pytest.mark.parametrize(
    "given",
    [
        {"layer-splits": "28,14"},
        {"layer-splits": "a"},
        {"layers": "0:28,28:14,14:"},
        {"stages": 0},
        {"devices": "nowhere"},
    ],
)
def test_a_value_that_no_model_could_have_is_refused_also_where_it_has_no_effect(
    given: dict[str, object],
) -> None:
    with pytest.raises(InvalidRequest):
        with_stages(False, given)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("table", "lines"),
    [
        ("--comm_mode p2p", ["comm_mode p2p has no effect in one process; --fleet processes starts several"]),
        (
            "--distributed False --devices 127.0.0.1#cpu --layer_splits 14,28",
            ["without effect, because distributed is False: layers 0:14,14:28,28:"],
        ),
        (
            "--distributed True --devices 127.0.0.1#cpu,127.0.0.1#cpu --layer_splits 4 --comm_mode ring",
            ["comm_mode ring has no effect in one process; --fleet processes starts several"],
        ),
    ],
)
def test_their_table_of_parameters_is_taken_whole(
    table: str, lines: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    line = f"infer --prompt Why? {MODELS} --max_new_tokens 4 --enable_parallel True --use_eagle3 True {table}"
    assert main(shlex.split(line)) == 0
    told = capfd.readouterr().err.splitlines()
    assert [one.removeprefix("specsot: ") for one in told if one.startswith("specsot: ")] == lines


@pytest.mark.torch
def test_their_default_device_is_no_error_where_there_is_no_gpu() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    asked = FleetOptions(model=str(BASE), distributed=False, devices="127.0.0.1#0")
    with pytest.warns(InactiveOption, match="devices 127.0.0.1#0 has no effect"):
        assert models_of(asked).places == ()


def test_what_is_of_a_question_is_refused_by_its_own_name_where_a_model_is_opened() -> None:
    with pytest.raises(InvalidRequest, match="enable_parallel is an option of generate"):
        SpecSoT.from_pretrained(base_model_path=str(BASE), enable_parallel=True)
    with pytest.raises(InvalidRequest, match="comm_mode must be one of"):
        SpecSoT.from_pretrained(base_model_path=str(BASE), comm_mode="mesh")


def test_their_plan_on_one_line_is_read() -> None:
    plan = read_plan("[PLAN] 1.<200><Search>[-]Task 2.<150><None>[-]Task [END]")
    assert plan == (Point(1, 200, "Task", "Search"), Point(2, 150, "Task"))


def test_every_name_of_theirs_is_in_the_page() -> None:
    names = {
        one.keyword for command in (infer, serve) for one in command.params if isinstance(one, ForeignName)
    }
    assert {"prompt", "use_eagle3", "base_model_path", "gpu_ids"} <= names
    assert [name for name in sorted(names) if name not in PAGE] == []


def test_each_command_accepts_what_the_page_says() -> None:
    table = re.search(r"accept these flags of theirs:\n(.*?)\n\n`serve`", PAGE, re.DOTALL)
    assert table is not None
    rows = [line.split("|")[1:-1] for line in table[1].strip().splitlines()]
    commands = [name.strip(" `") for name in rows[0][1:]]
    for names, *said in rows[2:]:
        for flag in re.findall(r"--(\w+)", names):
            assert [yes.strip() for yes in said] == [
                "yes" if flag.replace("_", "-") in flags_of(name) else "no" for name in commands
            ], flag


def flags_of(name: str) -> set[str]:
    pytest.importorskip("specsot_lab")
    command = specsot().get_command(click.Context(specsot()), name)
    assert command is not None
    return {one.lstrip("-") for parameter in command.params for one in parameter.opts}


@pytest.mark.slow
def test_every_command_of_the_page_is_understood() -> None:
    pytest.importorskip("specsot_lab")
    lines = [
        re.sub("(infer|steps) D", rf"\1 --model {BASE} --draft-model {HEAD}", line).replace(" Q", " Why?")
        for line in re.findall(r"`(?:python -m )?specsot ([^`|]+)`", PAGE + ROWS)
        if "..." not in line
    ]
    assert len(lines) > 20
    for line in lines:
        command: click.Command | None = specsot()
        words = shlex.split(line)
        while isinstance(command, click.Group) and words:
            command = command.get_command(click.Context(command), words.pop(0))
        assert command is not None, line
        if isinstance(command, TableCommand):
            assert given_to(command, shlex.join(words)), line


def test_every_file_of_the_page_is_there() -> None:
    for path in re.findall(r"`((?:app|lab|services|shared)/\w+/[\w/.]+)`", PAGE):
        assert (REPOSITORY / path).exists(), path
    tests = set(re.findall(r"`(\w+/[\w/]+\.py)`", ROWS))
    assert len(tests) > 30
    assert [path for path in sorted(tests) if not (REPOSITORY / "tests" / path).is_file()] == []
