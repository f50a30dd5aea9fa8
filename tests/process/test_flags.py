"""Flags, their environment variables, and the one line each wrong value gets.

Knows nothing of running services.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specsot.members import Overrides, Range, TreeShape
from specsot.process.flags import Flags, layers, memory, positive
from specsot.process.setting import name_of, reachable
from specsot_drafter.config import read_config as read_drafter
from specsot_master.config import read_config as read_master
from specsot_worker.config import read_config as read_worker


def test_the_command_line_wins_over_the_environment() -> None:
    flags = Flags("program", "", {"SPECSOT_PAGE_ROWS": "64"})
    flags.flag("page-rows", positive, 256)
    flags.flag("rows", positive, 512)
    assert vars(flags.parse_args([])) == {"page_rows": 64, "rows": 512}
    assert vars(flags.parse_args(["--page-rows", "32"])) == {"page_rows": 32, "rows": 512}


def test_a_required_flag_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSOT_MODEL", "/models/base")
    monkeypatch.setenv("SPECSOT_LAYERS", "4:8")
    config = read_worker([])
    assert (config.model, config.layers) == (Path("/models/base"), Range(4, 8))


@pytest.mark.parametrize(
    ("read", "arguments", "line"),
    [
        (read_master, [], "specsot-master: the following arguments are required: --model"),
        (read_worker, ["--model", "m", "--layers", "4:4"], "'4:4' is no layer range; write first:last"),
        (read_worker, ["--model", "m", "--layers", "four"], "'four' is no layer range"),
        (read_worker, ["--model", "m", "--dtype", "fp8"], "--dtype: invalid choice: 'fp8'"),
        (read_worker, ["--model", "m", "--kv-memory", "lots"], "'lots' is no amount of memory"),
        (
            read_drafter,
            ["--model", "m"],
            "specsot-drafter: --drafter eagle needs --draft-model",
        ),
        (
            read_drafter,
            ["--model", "m", "--draft-model", "h", "--aux-layers", "2,two"],
            "'2,two' are no layers; write their numbers, such as 2,16,29",
        ),
        (
            read_drafter,
            ["--model", "m", "--draft-model", "h", "--aux-layers", "16,2"],
            "'16,2' must be different layers in ascending order",
        ),
        (
            read_drafter,
            ["--model", "m", "--draft-model", "h", "--drafter-rope-theta", "0"],
            "'0' is not a number > 0",
        ),
        (read_master, ["--model", "m", "--workers", "0"], "'0' is not a whole number > 0"),
        (read_master, ["--model", "m", "--grace", "-1"], "'-1' is no number of seconds"),
        (read_master, ["--model", "m", "--drafter", "oracle"], "--drafter: invalid choice: 'oracle'"),
        (read_master, ["--model", "m", "--mod", "x"], "unrecognized arguments: --mod x"),
    ],
)
def test_a_wrong_flag_is_one_line_and_status_2(
    read: Callable[[list[str]], Any], arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        read(arguments)
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert line in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(("variable", "value"), [("SPECSOT_WORKERS", "none"), ("SPECSOT_DRAFTER", "oracle")])
def test_a_wrong_variable_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit):
        read_master(["--model", "m"])
    assert f"specsot-master: {variable}: '{value}' is" in capsys.readouterr().err


def test_what_a_head_s_config_says_wrongly_may_be_said_right() -> None:
    given = ["--model", "m", "--master", "a:1", "--draft-model", "h"]
    assert read_drafter(given).overrides == Overrides(None, None)
    told = read_drafter([*given, "--drafter-rope-theta", "1e4", "--aux-layers", "2,16,29"])
    assert told.overrides == Overrides(10000.0, (2, 16, 29))


@pytest.mark.parametrize("read", [read_worker, read_drafter])
def test_pickled_weights_are_asked_for_by_name(
    read: Callable[[list[str]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", "m", *(["--draft-model", "d"] if read is read_drafter else [])]
    assert read(given).model_format == "safetensors"
    assert read([*given, "--model-format", "bin"]).model_format == "bin"
    with pytest.raises(SystemExit):
        read([*given, "--model-format", "onnx"])
    assert "--model-format: invalid choice: 'onnx'" in capsys.readouterr().err


def test_help_names_the_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_worker(["--help"])
    assert caught.value.code == 0
    assert "[SPECSOT_KV_MEMORY]" in capsys.readouterr().out


def test_what_a_master_makes_of_its_flags() -> None:
    arguments = "--model m --workers 2 --drafter none --nodes 9 --depth 2 --top-k 3 --branch-layout batched"
    ring = read_master(arguments.split()).ring
    assert (ring.workers, ring.drafter, ring.layout) == (2, False, "batched")
    assert ring.shape == TreeShape(depth=2, top_k=3, nodes=9)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("64kb", 64 << 10), ("7", 7)],
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert memory(text) == size


def test_a_layer_range() -> None:
    assert layers("0:16") == Range(0, 16)


def test_where_peers_reach_a_member() -> None:
    assert reachable("worker:5", "0.0.0.0:5", 5) == "worker:5"
    assert reachable(None, "127.0.0.1:0", 4321) == "127.0.0.1:4321"
    assert reachable(None, "unix:/run/w0", 0) == "unix:/run/w0"
    assert reachable(None, "0.0.0.0:50051", 50051).endswith(":50051")
    assert not reachable(None, "0.0.0.0:50051", 50051).startswith("0.0.0.0")


def test_a_member_is_named_after_its_address() -> None:
    assert name_of("w", "host:1") == "w"
    assert name_of(None, "host:1") == "host:1"
    assert name_of(None, "unix:/run/worker-0") == "worker-0"
