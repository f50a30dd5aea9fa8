"""Flags, their environment variables, and the one line each wrong value gets.

Knows nothing of running services.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from specsot._version import __version__
from specsot.members import Overrides, Range, TreeShape
from specsot.service.command import read
from specsot.service.option_table import POSITIVE, arguments_of, memory, option
from specsot.service.options import layers, name_of, reachable
from specsot_drafter.config import read_config as read_drafter
from specsot_master.config import read_config as read_master
from specsot_worker.config import read_config as read_worker


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the services of other tests are told."""
    monkeypatch.delenv("SPECSOT_KV_MEMORY", raising=False)


@dataclass(frozen=True, slots=True)
class Small:
    page_rows: int = option(1, "", kind=POSITIVE)
    rows: int = option(1, "", kind=POSITIVE)
    nodes: int = option(1, "", kind=POSITIVE)
    depth: int = option(1, "", kind=POSITIVE)


def test_the_command_line_wins_over_the_environment() -> None:
    environment = {"SPECSOT_PAGE_ROWS": "64"}
    assert read("specsot-infer", Small, "", [], environment) == Small(page_rows=64)
    assert read("specsot-infer", Small, "", ["--page-rows", "32"], environment) == Small(page_rows=32)


def test_openais_clients_are_answered_directly_unless_the_master_has_another_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read_master(["--model", "m"]).default_mode == "direct"
    monkeypatch.setenv("SPECSOT_DEFAULT_MODE", "auto")
    assert read_master(["--model", "m"]).default_mode == "auto"


def test_a_required_flag_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSOT_MODEL", "/models/base")
    monkeypatch.setenv("SPECSOT_LAYERS", "4:8")
    config = read_worker([])
    assert (config.model.model, config.layers) == ("/models/base", Range(4, 8))


@pytest.mark.parametrize(
    ("read", "arguments", "line"),
    [
        (read_master, [], "specsot-master: Missing option '--model'."),
        (read_worker, ["--model", "m", "--layers", "4:4"], "'4:4' is no layer range; write first:last"),
        (read_worker, ["--model", "m", "--layers", "four"], "'four' is no layer range"),
        (read_worker, ["--model", "m", "--dtype", "fp8"], "Invalid value for '--dtype': 'fp8' is not one of"),
        (read_worker, ["--model", "m", "--kv-memory", "lots"], "'lots' is no amount of memory"),
        (read_drafter, ["--model", "m"], "specsot-drafter: --drafter eagle needs --draft-model"),
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
        (read_master, ["--model", "m", "--drafter", "oracle"], "'--drafter': 'oracle' is not one of"),
        (read_master, ["--model", "m", "--mod", "x"], "No such option '--mod'"),
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


def test_wrong_values_of_a_heads_config_can_be_overridden() -> None:
    given = ["--model", "m", "--master", "a:1", "--draft-model", "h"]
    assert read_drafter(given).draft.overrides == Overrides(None, None)
    told = read_drafter([*given, "--drafter-rope-theta", "1e4", "--aux-layers", "2,16,29"])
    assert told.draft.overrides == Overrides(10000.0, (2, 16, 29))


@pytest.mark.parametrize("read", [read_worker, read_drafter])
def test_pickled_weights_are_asked_for_by_name(
    read: Callable[[list[str]], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model", "m", *(["--draft-model", "d"] if read is read_drafter else [])]
    weights = "draft" if read is read_drafter else "model"
    assert getattr(read(given), weights).model_format == "safetensors"
    assert getattr(read([*given, "--model-format", "bin"]), weights).model_format == "bin"
    with pytest.raises(SystemExit):
        read([*given, "--model-format", "onnx"])
    assert "'--model-format': 'onnx' is not one of" in capsys.readouterr().err


def test_command_line_environment_file_default_in_this_order(file: Callable[[str], str]) -> None:
    path = file("page-rows = 64\nrows = 128\nnodes = 5")
    environment = {"SPECSOT_ROWS": "32", "SPECSOT_CONFIG": path, "SPECSOT_NODES": ""}
    assert read("specsot-infer", Small, "", [], environment) == Small(64, 32, 5, 1)
    assert read("specsot-infer", Small, "", ["--rows", "16", "--page-rows=8"], environment).rows == 16
    with pytest.raises(SystemExit):
        read(
            "specsot-infer", Small, "", ["--config", path + ".not"], environment
        )  # the command line names the file, not the environment


def test_a_variable_that_is_overridden_may_be_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent's variables reach its children, and mean something else there."""
    monkeypatch.setenv("SPECSOT_LAYERS", "0:4,4:8")
    assert read_worker(["--model", "m", "--layers", "4:8"]).layers == Range(4, 8)


def test_a_file_speaks_to_several_programs(file: Callable[[str], str]) -> None:
    path = file(
        'model = "m"\n[worker]\nkv_memory = "4G"\nlog_format = "json"\n'
        '[drafter]\ndraft-model = "d"\naux-layers = [2, 16, 29]\nblend = false\ndraft-threshold = 0.5\n'
        "[infer]\nmax-parallel = 4"
    )
    worker, drafter = read_worker(["--config", path]), read_drafter(["--config", path])
    assert (worker.model.model, worker.model.kv_memory, worker.service.log_format) == ("m", 4 << 30, "json")
    assert (drafter.draft.kv_memory, drafter.draft.overrides.aux_layers) == (1 << 30, (2, 16, 29))
    assert (drafter.draft.drafting.blend, drafter.draft.drafting.threshold) == (False, 0.5)


def test_a_program_s_own_table_wins(file: Callable[[str], str]) -> None:
    path = file('model = "m"\ndevice = "cpu"\n[worker]\ndevice = "cuda:1"')
    assert read_worker(["--config", path]).model.device == "cuda:1"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("kv-memry = 1", "kv-memry is no flag of worker; did you mean kv-memory?"),
        ("[worker]\ncolour = 1", "worker.colour is no flag of worker"),
        ("[wroker]\ndtype = 1", "no program has a table [wroker]; they are master, worker, drafter, "),
        ("kv-memory = 'lots'", "kv-memory: 'lots' is no amount of memory"),
        ("dtype = 'int3'", "dtype: 'int3' is not one of 'auto', 'fp32', 'bf16', 'fp16'"),
        ("name = 1979-05-27", "name must be text, a number, true, false, or a list of these"),
        ("served-model-name = 'demo'", "served-model-name is no flag of worker"),
        ("config = 'other.toml'", "config is no flag of worker"),
        ("model =", "Invalid value (at end of document)"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(
    text: str, line: str, file: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(text)
    with pytest.raises(SystemExit) as caught:
        read_worker(["--config", path, "--model", "m"])
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.startswith(f"specsot-worker: {path}: {line}")
    assert said.count("\n") == 1


def test_a_file_that_is_not_there_is_named_with_who_named_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSOT_CONFIG", "no/where.toml")
    with pytest.raises(SystemExit):
        read_worker(["--model", "m"])
    assert capsys.readouterr().err == (
        "specsot-worker: SPECSOT_CONFIG: no/where.toml: No such file or directory\n"
    )


def test_vllm_s_names_count_too(file: Callable[[str], str]) -> None:
    given = ["--model", "m", "--max-num-seqs", "3", "--max-num-batched-tokens=64", "--served-model-name", "x"]
    ring = read_master([*given, "--config", file("block-size = 32")]).ring
    assert (ring.conduct.live, ring.rows, ring.name, ring.page_rows) == (3, 64, "x", 32)
    assert read_worker(["--model", "m", "--kv-cache-memory-bytes", "2G"]).model.kv_memory == 2 << 30
    with pytest.raises(SystemExit):
        read_worker(["--model", "m", "--served-model-name", "x"])  # a member's name is another thing


def test_every_program_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_master(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"specsot-master {__version__}\n")


def test_help_names_the_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        read_worker(["--help"])
    assert caught.value.code == 0
    assert "[SPECSOT_KV_MEMORY]" in capsys.readouterr().out


def test_what_a_master_makes_of_its_flags() -> None:
    arguments = "--model m --workers 2 --drafter none --draft-nodes 8 --draft-depth 3 --draft-breadth 3"
    ring = read_master([*arguments.split(), "--branch-layout", "batched"]).ring
    assert (ring.workers, ring.drafts, ring.layout) == (2, False, "batched")
    assert ring.shape == TreeShape(depth=2, top_k=3, nodes=9)


@pytest.mark.parametrize(
    "words",
    [
        "--draft-depth 3 --draft-breadth 3 --draft-nodes 8 --tuner fixed",
        "--draft-tokens 3 --width 3 --nodes 9 --tree fixed",
        "--num-speculative-tokens 3 --width 3 --draft-nodes 8 --tree fixed",
        "--depth 2 --draft-breadth 3 --nodes 9 --tuner fixed",
    ],
)
def test_a_tree_has_the_same_size_under_every_name_that_its_flags_ever_had(words: str) -> None:
    """`--depth` counted the levels below the first one and `--nodes` the root, `--draft-tokens` no root."""
    assert read_master(["--model", "m", *words.split()]).ring.shape == TreeShape(2, 3, 9, fixed=True)
    assert not read_master(["--model", "m", "--tuner", "seed"]).ring.shape.fixed


def test_a_master_writes_the_size_of_a_tree_as_it_reads_it() -> None:
    shape = TreeShape(2, 3, 9, fixed=True)
    words = "--draft-depth 3 --draft-breadth 3 --draft-nodes 8 --tuner fixed"
    assert arguments_of(shape) == tuple(words.split())


@pytest.mark.parametrize("words", [["--draft-depth", "0"], ["--nodes", "x"], ["--tree", "tall"]])
def test_sizes_that_no_tree_has_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_master(["--model", "m", *words])
    assert words[1] in capsys.readouterr().err


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
