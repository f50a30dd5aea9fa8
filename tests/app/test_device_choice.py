"""What `--device auto` means on machines with GPUs and without, and the line that says so."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.checkpoint.config import read_config
from specsot.errors import ModelError
from specsot_app.core.device_choice import FoundGpu, FoundGpus, KvMemory, choose_device, visible_gpus
from specsot_app.fleet.devices import choose_for, print_choice, print_shared_gpus, with_kv_memory
from specsot_app.fleet.embedded import EmbeddedOptions
from specsot_app.fleet.options import FleetOptions, Models
from specsot_app.fleet.service_specs import drafter_flags, worker_flags
from tests.master.stage import BASE
from tests.there import there

GIB = 1 << 30
SMALL, LARGE = FoundGpu(0, "NVIDIA L4", 20 * GIB), FoundGpu(1, "NVIDIA H200", 70 * GIB)
ONE = FoundGpus((replace(LARGE, number=0),), 1, "2.13.0+cu130", torch_cuda=True)
TWO = replace(ONE, gpus=(SMALL, LARGE), installed=2)
NONE = FoundGpus(torch_version="2.13.0+cpu")


@pytest.mark.parametrize(
    ("found", "need", "stages", "device"),
    [
        (NONE, None, 1, "cpu"),
        (ONE, 60 * GIB, 1, "cuda"),
        (ONE, None, 1, "cuda"),
        (ONE, 71 * GIB, 1, "cpu"),
        (ONE, 60 * GIB, 2, "cuda"),
        (ONE, 71 * GIB, 2, "cpu"),  # both stages would be on the only one
        (TWO, 10 * GIB, 1, "cuda:1"),  # the one with more free memory
        (TWO, 60 * GIB, 2, "cuda:1"),  # the first one does not hold half of it
        (TWO, 30 * GIB, 2, "cuda"),  # the master gives each stage one of its own
        (TWO, 80 * GIB, 2, "cuda"),  # the master gives the second one more layers
        (TWO, 80 * GIB, 1, "cpu"),
        (TWO, 91 * GIB, 2, "cpu"),
        (replace(TWO, gpus=(SMALL, replace(LARGE, free=None))), 30 * GIB, 1, "cuda:1"),
    ],
)
def test_a_gpu_is_chosen_where_the_model_has_room(
    found: FoundGpus, need: int | None, stages: int, device: str
) -> None:
    assert choose_device(found, need, stages).device == device


@pytest.mark.parametrize(
    ("found", "need", "line"),
    [
        (NONE, None, "device cpu: this machine has no NVIDIA GPU"),
        (ONE, 4 * GIB, "device cuda:0, NVIDIA H200 (70.0 GiB free); 4.0 GiB needed"),
        (
            ONE,
            80 * GIB,
            "device cpu: the model needs 80.0 GiB, "
            "the GPU with the most free memory is cuda:0, NVIDIA H200 (70.0 GiB free); "
            "--quantization int8 or a smaller --kv-memory needs less, and --device cuda tries it anyway",
        ),
        (
            replace(NONE, installed=1),
            None,
            "device cpu: this machine has an NVIDIA GPU, but torch 2.13.0+cpu is built for CPUs; "
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130 "
            "installs one with CUDA",
        ),
        (
            replace(ONE, gpus=(), hidden=True),
            None,
            "device cpu: this machine has an NVIDIA GPU, but CUDA_VISIBLE_DEVICES hides them all",
        ),
        (
            replace(TWO, gpus=()),
            None,
            "device cpu: this machine has 2 NVIDIA GPUs, but torch 2.13.0+cu130 cannot use them; "
            "its CUDA may need a newer driver (nvidia-smi)",
        ),
    ],
)
def test_one_line_says_what_is_chosen_and_why(found: FoundGpus, need: int | None, line: str) -> None:
    chosen = choose_device(found, need)
    assert chosen.reason == line
    assert chosen.notable == (found.installed > 0)


def test_gpus_that_are_too_small_together_are_counted_together() -> None:
    """Two stages could have used both; one stage could not."""
    assert "2 GPUs have 90.0 GiB free together" in choose_device(TWO, 91 * GIB, stages=2).reason
    assert "the GPU with the most free memory is cuda:1" in choose_device(TWO, 91 * GIB, stages=1).reason


@pytest.mark.torch
@pytest.mark.parametrize(("free", "device"), [(GIB >> 10, "cpu"), (10 * GIB, "cuda")])
def test_the_memory_of_a_real_model_decides(free: int, device: str) -> None:
    """Its weights, KV pages and drafter are counted from the files, without loading them."""
    card = replace(ONE, gpus=(FoundGpu(0, "a small card", free),))
    options = FleetOptions(device="auto", model=str(BASE), draft_model=str(BASE.parent / "eagle3"))
    made, choice = choose_for(options, find_gpus_here=lambda: card)
    assert made.device == device
    out = io.StringIO()
    print_choice(there(choice), out)
    line = out.getvalue()
    assert line.count("\n") == 1
    assert there(choice).notable, "also shown to a user who did not ask"
    assert ("the model needs" if device == "cpu" else " needed") in line


def test_a_split_layer_takes_the_first_gpus() -> None:
    chosen = choose_device(TWO, 30 * GIB, shards=2)
    assert chosen.device == "cuda:0"
    assert "and cuda:1" in chosen.reason
    short = choose_device(TWO, 60 * GIB, shards=2)
    assert short.device == "cuda:0", "what was asked for is not left out; loading refuses it"
    assert "30.0 GiB of it on each, which does not fit on cuda:0" in short.reason


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["a", "b"]),
        ("", []),
        ("-1", []),
        ("1,0", ["b", "a"]),
        ("1,7,0", ["b"]),
        ("GPU-bbbb", ["b"]),
        ("MIG-1234,0", ["a part of a GPU", "a"]),
    ],
)
def test_gpus_are_numbered_as_cuda_numbers_the_visible_ones(visible: str | None, names: list[str]) -> None:
    installed = [("GPU-aaaa-1", FoundGpu(0, "a", GIB)), ("GPU-bbbb-2", FoundGpu(1, "b", GIB))]
    found = visible_gpus(installed, visible)
    assert [gpu.name for gpu in found] == names
    assert [gpu.number for gpu in found] == list(range(len(names)))


AUTO = FleetOptions(device="auto")


def unasked(*_: object) -> FoundGpus:
    raise AssertionError("nobody needs to know")


def chosen(options: FleetOptions, found: FoundGpus, need: int = GIB, rings: int = 1) -> str:
    made, choice = choose_for(options, rings, lambda: found, lambda _: need)
    assert choice
    assert choice.device == made.device
    return made.device


def test_a_fleet_of_ones_own_takes_the_gpu() -> None:
    assert chosen(AUTO, ONE) == "cuda"
    assert chosen(AUTO, NONE) == "cpu"
    assert chosen(replace(AUTO, layers="0:4,4:8"), TWO, 30 * GIB) == "cuda"
    assert chosen(AUTO, TWO, 20 * GIB, rings=2) == "cuda", "each ring has a GPU of its own"
    assert chosen(AUTO, TWO, 50 * GIB, rings=2) == "cpu"


def test_the_line_is_printed_with_the_name_of_the_program() -> None:
    out = io.StringIO()
    print_choice(choose_device(NONE), out)
    assert out.getvalue() == "specsot: device cpu: this machine has no NVIDIA GPU\n"


@pytest.mark.parametrize(
    ("options", "device"),
    [
        (replace(AUTO, device="cuda:3"), "cuda:3"),
        (replace(AUTO, master="10.0.0.1:50050"), "cpu"),
        (replace(AUTO, devices="127.0.0.1#0"), "cpu"),
    ],
)
def test_nothing_is_looked_for_where_nothing_is_to_choose(options: FleetOptions, device: str) -> None:
    made, choice = choose_for(options, find_gpus_here=unasked)
    assert (made.device, choice) == (device, None)


def test_a_model_that_cannot_be_read_is_left_to_who_loads_it() -> None:
    def broken(_: FleetOptions) -> int:
        raise ModelError("no such directory")

    made, _ = choose_for(AUTO, find_gpus_here=lambda: ONE, count_bytes=broken)
    assert made.device == "cuda"


def memory_of(
    options: FleetOptions, found: FoundGpus, rings: int = 1
) -> tuple[int | None, int | None, list[tuple[int, ...]], str]:
    """The KV memory of workers and drafter, what was asked for, and what was printed."""
    asked: list[tuple[int, ...]] = []

    def count(_: FleetOptions, *numbers: int) -> KvMemory:
        asked.append(numbers)
        return KvMemory(worker=28 * GIB, drafter=GIB, positions=1 << 20)

    out = io.StringIO()
    made = with_kv_memory(options, out, rings, 64, lambda: found, count)
    return made.kv_memory, made.draft_kv_memory, asked, out.getvalue()


def test_kv_pages_take_what_is_free_on_a_gpu_and_the_start_says_so() -> None:
    kv, draft, asked, printed = memory_of(FleetOptions(device="cuda:0"), ONE)
    free = ONE.gpus[0].free
    assert (kv, draft, asked) == (28 * GIB, GIB, [(free, 1, 1, 64)])
    assert printed.startswith("specsot: KV memory 28.0 GiB of")
    assert "1,048,576 tokens; --kv-memory sets it" in printed


def test_a_drafter_has_a_kv_memory_of_its_own_if_it_is_given() -> None:
    def memory(flags: tuple[str, ...]) -> str:
        return flags[flags.index("--kv-memory") + 1]

    options = FleetOptions(model=BASE, kv_memory=28 * GIB, draft_kv_memory=GIB)
    assert memory(worker_flags(options, Models(BASE, None), 0)) == "28G"
    assert memory(drafter_flags(options)) == "1G"
    assert memory(drafter_flags(replace(options, draft_kv_memory=None))) == "28G"
    embedded = EmbeddedOptions(options)
    assert embedded.member_options("drafter").kv_memory == GIB
    assert embedded.member_options("worker-0").kv_memory == 28 * GIB


def test_the_start_says_that_stages_share_a_gpu_and_what_that_costs() -> None:
    def printed(options: FleetOptions, found: FoundGpus) -> str:
        out = io.StringIO()
        print_shared_gpus(options, out, 1, lambda: found)
        return out.getvalue()

    line = printed(FleetOptions(device="cuda", stages=2), ONE)
    assert line.startswith("specsot: 2 stages share cuda:0: one stage would be faster")
    assert printed(FleetOptions(device="cuda:1", stages=2), TWO).startswith("specsot: 2 stages share cuda:1:")
    assert printed(FleetOptions(device="cuda", stages=2), TWO) == "", "each has one of its own"
    assert printed(FleetOptions(device="cuda"), ONE) == ""
    assert printed(FleetOptions(device="cpu", stages=2), NONE) == ""


def test_a_ring_of_two_stages_takes_the_memory_of_two_gpus() -> None:
    _, _, [(free, num_gpus, rings, _)], _ = memory_of(FleetOptions(device="cuda", stages=2), TWO)
    assert (free, num_gpus, rings) == (min(gpu.free or 0 for gpu in TWO.gpus), 2, 1)
    shared = FleetOptions(devices="127.0.0.1#0,127.0.0.1#0")
    assert memory_of(shared, TWO)[2] == [(TWO.gpus[0].free, 1, 1, 64)]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (FleetOptions(device="cuda", kv_memory=GIB), ONE),
        (FleetOptions(device="cuda", master="10.0.0.1:50050"), ONE),
        (FleetOptions(devices="127.0.0.1#0,127.0.0.1#cpu"), ONE),
        (FleetOptions(device="cuda"), FoundGpus((FoundGpu(0, "a part of a GPU"),), 1, "2.13.0", True)),
    ],
)
def test_a_kv_memory_that_is_given_or_unknown_stays(options: FleetOptions, found: FoundGpus) -> None:
    kv, draft, asked, printed = memory_of(options, found)
    assert (kv, draft, asked, printed) == (options.kv_memory, None, [], "")


def test_kv_pages_leave_most_of_a_small_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specsot_app.fleet.devices.free_memory", lambda: GIB)
    kv, _, _, printed = memory_of(FleetOptions(device="cpu", kind="processes"), NONE)
    assert kv == GIB // 4
    assert "256 MiB" in printed
    monkeypatch.setattr("specsot_app.fleet.devices.free_memory", lambda: 64 * GIB)
    assert memory_of(FleetOptions(device="cpu", kind="processes"), NONE)[0] is None


@pytest.mark.torch
def test_kv_memory_is_what_requests_can_use_or_what_fits(demo_model: Path) -> None:
    from specsot_app.fleet.fitting import kv_memory_on_gpus

    options = FleetOptions(model=demo_model / "base", drafter="none", dtype="bf16")
    ample = kv_memory_on_gpus(options, 1, 100 * GIB, 1, 1, 4)
    context = read_config(demo_model / "base").max_positions
    assert ample.positions == 4 * context
    two_stages = kv_memory_on_gpus(options, 2, 100 * GIB, 1, 1, 4)
    assert (two_stages.positions, two_stages.drafter) == (4 * context, 0)
    assert ample.worker // 2 <= two_stages.worker < ample.worker
    scarce = kv_memory_on_gpus(options, 1, GIB, 1, 1, 1 << 20)
    assert scarce.worker < 0.8 * GIB, "the rest is left to others"
    assert kv_memory_on_gpus(options, 1, GIB // 64, 1, 1, 64).positions == 0
    drafted = replace(options, drafter="eagle", draft_model=demo_model / "eagle3")
    assert 0 < kv_memory_on_gpus(drafted, 1, 100 * GIB, 1, 1, 4).drafter < ample.worker


@pytest.mark.torch
def test_memory_is_counted_with_kv_pages_and_what_drafts(demo_model: Path) -> None:
    from specsot_app.fleet.devices import count_memory

    plain = FleetOptions(model=demo_model / "base", drafter="none", kv_memory=1 << 28, dtype="bf16")
    files = sum(path.stat().st_size for path in (demo_model / "base").glob("*.safetensors"))
    alone = count_memory(plain)
    assert 1 << 28 < alone < 4 * files + (1 << 28) + (1 << 30)
    drafted = count_memory(replace(plain, drafter="eagle", draft_model=demo_model / "eagle3"))
    assert drafted > alone + (1 << 28), "the drafter has pages of its own"


@pytest.mark.torch
def test_this_machine_can_be_asked() -> None:
    from specsot_app.fleet.devices import find_gpus

    found = find_gpus()
    assert len(found.gpus) <= max(found.installed, 1)
    assert bool(found.torch_version) == bool(found.installed)


def test_a_machine_without_a_gpu_is_asked_without_torch() -> None:
    """The process that only starts the others need not import it."""
    asked = (
        "import sys; from specsot_app.fleet import devices; from specsot_kernels.cpu import compiling;"
        " devices._installed_gpus, compiling.start_compiling = list, list; found = devices.find_gpus();"
        " sys.exit('torch' in sys.modules or bool(found.gpus))"
    )
    assert subprocess.run([sys.executable, "-c", asked]).returncode == 0
