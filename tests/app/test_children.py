"""Services as child processes: their lines, their ends, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from specsot.core.info import Info, MemberInfo, RequestsInfo, StepsInfo
from specsot.errors import Cancelled, ModelError, Unavailable
from specsot.members import Range
from specsot_app.commands.serve import closing_lines
from specsot_app.fleet import processes
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.options import FleetOptions, Models, models_of
from specsot_app.fleet.processes import (
    ChildProcess,
    ProcessFleet,
    ShortLives,
    free_port,
    keep_running,
    start,
    unless_one_ends,
)
from specsot_app.fleet.service_specs import Service, Serving, services_of
from specsot_drafter.config import read_config as read_drafter
from specsot_master.config import read_config as read_master
from specsot_worker.config import read_config as read_worker

pytestmark = pytest.mark.processes


def little(word: str) -> Service:
    return Service("little-0", "tests.app.little_service", "nowhere", (word,))


class Ear:
    """Hears what services say; `first` is set with the first line."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.first = asyncio.Event()

    def __call__(self, service: str, line: str) -> None:
        self.lines.append((service, line))
        self.first.set()


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch, request) -> None:
    monkeypatch.chdir(request.config.rootpath)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_child_speaks_and_ends_when_asked() -> None:
    ear = Ear()
    child = await start(little("wait"), ear)
    await ear.first.wait()
    assert is_running(child.pid)
    await child.end()
    assert ear.lines == [("little-0", "here I am"), ("little-0", "leaving")]
    assert not is_running(child.pid)


async def test_its_last_words_say_why_it_ended() -> None:
    failed = await (await start(little("fail"), Ear())).wait_ended()
    assert isinstance(failed, ModelError)
    assert str(failed) == "little-0: no/where: no such model directory"
    fell = await (await start(little("fall"), Ear())).wait_ended()
    assert isinstance(fell, Unavailable)
    assert str(fell) == "little-0: here I am"


async def test_waiting_ends_with_the_first_child_that_does() -> None:
    children = [await start(little("wait"), Ear()), await start(little("fail"), Ear())]
    with pytest.raises(ModelError, match="no such model directory"):
        await unless_one_ends(children, asyncio.Event().wait())
    await asyncio.gather(*(child.end() for child in children))


class Dead:
    """A process that has ended; its output is open until it is told to close."""

    returncode, pid = 7, 0

    def __init__(self) -> None:
        self.closing_lines = asyncio.Event()
        self.stdout = self._lines()

    async def wait(self) -> int:
        return self.returncode

    async def _lines(self) -> AsyncIterator[bytes]:
        await self.closing_lines.wait()
        yield b"my last words"


async def test_who_gives_up_waiting_takes_no_words_from_who_waits_next() -> None:
    dead = Dead()
    child = ChildProcess(little("wait"), dead, Ear())  # type: ignore[arg-type]
    first = asyncio.create_task(child.wait_ended())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    dead.closing_lines.set()
    assert str(await child.wait_ended()) == "little-0: my last words"


class Infos:
    """A master's client whose master reports these states, one a call, and the last one again and again."""

    def __init__(self, *states: Info) -> None:
        self.states = states
        self.calls = 0

    async def info(self) -> Info:
        state = self.states[min(self.calls, len(self.states) - 1)]
        self.calls += 1
        return state


async def fleet_of(ear: Ear, *services: Service) -> ProcessFleet:
    """Without any request."""
    children = [await start(one, ear) for one in services]
    return ProcessFleet(children, Infos(Info()), AsyncExitStack(), ear)  # type: ignore[arg-type]


async def test_a_member_that_ends_is_started_again_and_its_master_is_not() -> None:
    ear = Ear()
    fleet = await fleet_of(ear, little("wait"), replace(little("wait"), name="worker-0"))
    keeping = asyncio.create_task(fleet.keep_running())
    master, first = fleet.children
    os.kill(first.pid, signal.SIGKILL)
    while fleet.children[1] is first:
        ear.first.clear()
        await ear.first.wait()
    assert ("worker-0", "worker-0: ended by signal 9: it is started again") in ear.lines
    assert is_running(fleet.children[1].pid)
    await master.end()
    assert isinstance(await keeping, Unavailable)
    await fleet.children[1].end()


def ring(
    *workers: str, ready: bool = True, plan: str = "worker-0 0:8", tokens: int = 7, running: int = 1
) -> Info:
    """A ring of these workers, which answers requests. plan: empty while no epoch is formed."""
    members = tuple(MemberInfo("worker", name, "nowhere", "model") for name in workers)
    counts = StepsInfo(steps=tokens, tokens=tokens), RequestsInfo(running=running)
    return Info(members=members, ready=ready, plan=plan, steps=counts[0], requests=counts[1])


async def test_a_lost_worker_is_started_when_the_others_have_generated_a_token(monkeypatch) -> None:
    """A process that starts takes the processor for seconds, while a request waits for the repair."""
    monkeypatch.setattr(processes, "REPAIR_PAUSE", 0.0)
    states = Infos(
        ring("worker-0", "worker-1"),  # The master has not noticed the loss yet.
        ring("worker-0", ready=False, plan=""),
        ring("worker-0", tokens=7),
        ring("worker-0", tokens=7),
        ring("worker-0", tokens=8),
    )
    await processes.wait_for_repair("worker-1", states.info)
    assert states.calls == 5


@pytest.mark.parametrize(
    "state",
    [
        ring("worker-1"),  # No other worker.
        ring("worker-0", "worker-1", running=0),  # No request.
    ],
)
async def test_a_lost_worker_is_started_at_once_if_nobody_gains_by_waiting(state: Info) -> None:
    states = Infos(state)
    await processes.wait_for_repair("worker-1", states.info)
    assert states.calls == 1


async def test_a_lost_worker_is_started_when_the_others_cannot_take_over(monkeypatch) -> None:
    monkeypatch.setattr(processes, "REPAIR_PAUSE", 0.0)
    monkeypatch.setattr(processes, "TAKE_OVER_SECONDS", 0.01)
    states = Infos(ring("worker-0", ready=False, plan=""))
    await asyncio.wait_for(processes.wait_for_repair("worker-1", states.info), 5)
    assert states.calls > 1


async def test_a_lost_worker_waits_while_the_others_get_ready_however_long_that_takes(monkeypatch) -> None:
    monkeypatch.setattr(processes, "REPAIR_PAUSE", 0.0)
    monkeypatch.setattr(processes, "TAKE_OVER_SECONDS", 0.0)
    states = Infos(
        *[ring("worker-0", ready=False)] * 9, ring("worker-0", tokens=7), ring("worker-0", tokens=8)
    )
    await processes.wait_for_repair("worker-1", states.info)
    assert states.calls == 11


@pytest.mark.parametrize(("word", "times"), [("fall", 3), ("fail", 1)])
async def test_a_member_that_cannot_be_helped_is_given_up(word: str, times: int) -> None:
    """One that ends again and again, and one that was given something unusable."""
    ear = Ear()
    assert str(await keep_running([await start(little(word), ear)], ear)).startswith("little-0: ")
    assert ear.lines.count(("little-0", "here I am")) == times
    told = "3 times in a row within 30 minutes of its start: it is not started again"
    assert (told in ear.lines[-1][1]) == (times == 3)


def test_a_member_is_given_up_that_dies_slowly_again_and_again_and_not_one_that_works_between() -> None:
    """Such as one whose weights do not fit, and take minutes to load until that is found out."""
    loading, working = ShortLives(), ShortLives()
    assert [loading.record_end(1, 900.0) for _ in range(3)] == [False, False, True]
    lives = [900.0, 900.0, 7200.0] * 5
    assert not any(working.record_end(1, seconds) for seconds in lives)
    assert not any(working.record_end(member, 1.0) for member in (2, 3, 4, 5))


async def test_a_call_that_an_ending_child_cut_off_does_not_hide_why_it_ended() -> None:
    children = [await start(little("fail"), Ear())]

    async def cut_off() -> None:
        raise Cancelled("CANCELLED")

    with pytest.raises(ModelError, match="no such model directory"):
        await unless_one_ends(children, cut_off())
    await asyncio.gather(*(child.end() for child in children))


async def test_a_master_without_the_http_extra_accepts_no_member(tmp_path: Path) -> None:
    (tmp_path / "fastapi.py").write_text("raise ModuleNotFoundError(name='fastapi')")
    ear, port = Ear(), str(free_port())
    flags = (
        "--model",
        str(small_pair() / "base"),
        "--workers",
        "1",
        "--listen",
        f"127.0.0.1:{port}",
        "--http",
        "127.0.0.1:0",
    )
    service = Service("master", "specsot_master", "", flags, (("PYTHONPATH", str(tmp_path)),))
    ended = await (await start(service, ear)).wait_ended()
    assert str(ended) == "master: --http needs fastapi: pip install 'specsot[http]'"
    assert not any("listening" in line for _, line in ear.lines)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of a killed parent")
async def test_a_killed_parent_leaves_nothing_running() -> None:
    code = (
        "import asyncio\n"
        "from specsot_app.fleet.processes import start\n"
        "from specsot_app.fleet.service_specs import Service\n"
        "async def main():\n"
        "    service = Service('little', 'tests.app.little_service', '', ('wait',))\n"
        "    child = await start(service, lambda name, line: print(child.pid, flush=True))\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    process = os.pidfd_open(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    ended, _, _ = await asyncio.to_thread(select.select, [process], [], [], 20)
    os.close(process)
    assert ended


def test_a_fleet_is_a_master_workers_and_a_drafter(tmp_path) -> None:
    models = Models(small_pair() / "base", small_pair() / "eagle3")
    services = services_of(FleetOptions(stages=3), models, free_port(), tmp_path)
    assert [service.name for service in services] == ["master", "worker-0", "worker-1", "worker-2", "drafter"]
    plain = services_of(FleetOptions(), Models(models.base, None), free_port(), tmp_path)
    assert [service.module for service in plain] == ["specsot_master", "specsot_worker"]
    flags = dict(zip(plain[0].arguments[::2], plain[0].arguments[1::2]))
    assert flags["--drafter"] == "none"
    assert flags["--served-model-name"] == "demo"


def test_a_fleets_services_get_every_option_that_a_variable_could_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command's variables reach its children; what they would mean there must not count."""
    wanted = FleetOptions(kind="processes", layers="0:4,4:8")
    master, worker, _, drafter = services_of(wanted, models_of(wanted), 50999, tmp_path)
    for name in ("NAME", "LAYERS", "CONFIG", "BLEND", "LISTEN", "ADVERTISE", "MASTER", "TOP_K", "MODEL"):
        monkeypatch.setenv(f"SPECSOT_{name}", "none of yours")
    monkeypatch.setenv("SPECSOT_GRACE", "0.5")  # this one is for them
    for service in (master, worker, drafter):
        for variable, value in service.environment:
            monkeypatch.setenv(variable, value)
    configs = read_master(master.arguments), read_worker(worker.arguments), read_drafter(drafter.arguments)
    assert (configs[0].ring.name, configs[1].member.name, configs[2].member.name) == (
        "demo",
        "worker-0",
        "drafter",
    )
    assert configs[1].layers == Range(0, 4)
    assert {config.service.grace for config in configs} == {0.5}


def test_no_service_gets_the_token_of_who_starts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is what a client shows; the master of a fleet with tokens has a file of them."""
    monkeypatch.setenv("SPECSOT_TOKEN", "secret")
    wanted = FleetOptions(kind="processes")
    services = services_of(wanted, models_of(wanted), 50999, tmp_path)
    assert {dict(service.environment).get("SPECSOT_TOKEN") for service in services} == {""}


def test_a_file_of_tokens_is_the_master_s_and_its_clients(tmp_path: Path) -> None:
    """Members have no token: they come in by an endpoint of their own."""
    tokens = tmp_path / "my tokens"
    tokens.write_text("\n sesame admin\nother\n")
    wanted = FleetOptions(kind="processes", stages=2)
    serving = Serving(fleet="127.0.0.1:20001", token_file=tokens)
    master, *members = services_of(wanted, models_of(wanted), 50999, tmp_path, serving=serving)
    config = read_master(master.arguments)
    assert (config.token_file, config.fleet_listen) == (tokens, "127.0.0.1:20001")
    assert not any(str(tokens) in member.arguments for member in members)
    assert {read_worker(one.arguments).member.master for one in members[:2]} == {"127.0.0.1:20001"}
    lines = closing_lines("demo", serving, master.address, 8000)
    assert f"--token-file '{tokens}'" in next(line for line in lines if "terminal" in line)
    for line in (line for line in lines if "curl" in line):
        read = line.partition("Bearer $(")[2].partition(")")[0]
        shown = subprocess.run(["sh", "-c", read], capture_output=True, text=True, check=True).stdout
        assert shown == "sesame\n"
        assert "cacert" not in line


@pytest.mark.parametrize(
    ("host", "shown"), [("::", "127.0.0.1:{}"), ("[::]", "127.0.0.1:{}"), ("::1", "'[::1]:{}'")]
)
def test_what_serve_prints_is_an_address_in_every_shell(host: str, shown: str) -> None:
    """Brackets are quoted, which zsh would take for a pattern; everywhere is here, too."""
    serving = Serving(host=host)
    lines = "\n".join(closing_lines("demo", serving, serving.reachable_address(50050), 8000))
    assert f"infer --master {shown.format(50050)} " in lines
    assert f"{shown.format(50050)} specsot.v1.Master/Generate" in lines
    page = shown.format("8000/v1/chat/completions")
    assert page.replace("'[", "'http://[").replace("127", "http://127", 1) in lines
