"""Devices and splits as the seeds wrote them: read, refused in one line, made into commands for hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot_app.core.device_map import HostDevice, check_stages, parse_devices, ports_of, split_ranges
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.opening import open_embedded
from specsot_app.fleet.options import FleetOptions, Models, local_hosts, models_of
from specsot_app.fleet.service_specs import (
    PRIVATE,
    Service,
    Serving,
    command_of,
    services_of,
    with_member_server,
)
from specsot_master.config import read_config as read_master
from specsot_worker.config import read_config as read_worker

TWO = parse_devices("10.0.0.1#0,10.0.0.2#1")
HERE = frozenset(["10.0.0.1"])


@pytest.mark.parametrize(
    ("written", "places"),
    [
        ("127.0.0.1#0,127.0.0.1#1", [("127.0.0.1", "cuda:0"), ("127.0.0.1", "cuda:1")]),
        (" gpu-a#03 , gpu-b#cpu", [("gpu-a", "cuda:3"), ("gpu-b", "cpu")]),
        (["h#cpu", "h#cpu", "[::1]#0"], [("h", "cpu"), ("h", "cpu"), ("[::1]", "cuda:0")]),
    ],
)
def test_devices_are_places(written, places) -> None:
    assert parse_devices(written) == tuple(HostDevice(*one) for one in places)


@pytest.mark.parametrize(
    "written", ["", "10.0.0.1", "10.0.0.1#", "#0", "a#0,,b#0", "a#0 b#0", "a#-1", "a#gpu"]
)
def test_what_is_no_place_is_refused(written: str) -> None:
    with pytest.raises(InvalidRequest, match="devices must be HOST#GPU or HOST#cpu"):
        parse_devices(written)


def test_stages_may_share_a_gpu() -> None:
    assert [str(place) for place in parse_devices("a#1,b#1,b#01")] == ["a#1", "b#1", "b#1"]
    wanted = FleetOptions(devices="127.0.0.1#0,127.0.0.1#0", kind="processes", drafter="ngram")
    _, first, second, drafter = services_of(wanted, models_of(wanted), 50050, Path("folder"))
    assert [given(one, "--device") for one in (first, second, drafter)] == ["cuda:0"] * 3


@pytest.mark.parametrize(
    ("splits", "ranges"), [("14,28", "0:14,14:28,28:36"), ("18", "0:18,18:36"), (" 1 ,35", "0:1,1:35,35:36")]
)
def test_splits_are_where_stages_begin(splits: str, ranges: str) -> None:
    assert ",".join(map(str, split_ranges(splits, 36))) == ranges


@pytest.mark.parametrize("splits", ["", "0", "36", "28,14", "14,14", "14,", "-1", "half"])
def test_splits_that_do_not_fit_are_refused(splits: str) -> None:
    with pytest.raises(InvalidRequest, match="ascending numbers between 0 and the model's 36 layers"):
        split_ranges(splits, 36)


def test_every_stage_has_one_place() -> None:
    check_stages(2, TWO)
    check_stages(5, ())
    with pytest.raises(InvalidRequest, match="devices are 2, stages 3"):
        check_stages(3, TWO)


def test_members_of_one_host_have_ports_of_their_own() -> None:
    assert ports_of(["a", "b", "a", "a", "b"]) == (50051, 50051, 50052, 50053, 50052)


def test_this_machine_is_distinguished_from_others() -> None:
    assert local_hosts(["127.0.0.1", "localhost", "192.0.2.1"]) == {"127.0.0.1", "localhost"}
    with pytest.raises(InvalidRequest, match=r"cannot resolve the host nowhere\.invalid"):
        local_hosts(["nowhere.invalid"])


@pytest.mark.parametrize(
    ("devices", "here", "said"),
    [
        ("10.0.0.1#0,10.0.0.2#0", {"10.0.0.1"}, "10.0.0.2 is another machine: give --certificates"),
        ("127.0.0.1#0,10.0.0.2#0", {"127.0.0.1"}, "devices name 127.0.0.1, which 10.0.0.2 cannot reach"),
        ("10.0.0.2#0", (), "10.0.0.2 is another machine"),
    ],
)
def test_what_is_missing_is_reported(devices: str, here, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        with_member_server(
            replace(PRIVATE, places=parse_devices(devices), own_hosts=frozenset(here)), None, False
        )


def test_a_machine_without_stages_must_say_where_it_is_reached() -> None:
    serving = replace(PRIVATE, places=parse_devices("10.0.0.2#0"))
    with pytest.raises(InvalidRequest, match="no device is on this machine: give --fleet-listen HOST:50060"):
        with_member_server(serving, None, True)
    assert with_member_server(serving, "10.0.0.9:7", True).fleet == "10.0.0.9:7"


def test_a_fleet_of_this_machine_alone_needs_none_of_it() -> None:
    serving = replace(
        PRIVATE, places=parse_devices("127.0.0.1#0,127.0.0.1#1"), own_hosts=frozenset(["127.0.0.1"])
    )
    assert with_member_server(serving, None, False) == serving
    master, *members = lineup(serving)
    assert master.arguments.count("--fleet-listen") == 0
    assert [given(one, "--device") for one in members] == ["cuda:0", "cuda:1", "cuda:1"]
    assert all(one.host is None and one.address.startswith("unix:") for one in members)


def test_with_certificates_members_have_an_endpoint_of_their_own(tmp_path: Path) -> None:
    assert with_member_server(replace(PRIVATE, certificates=tmp_path), None, False).fleet == "127.0.0.1:50060"


def test_those_elsewhere_get_a_command_that_their_service_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = replace(PRIVATE, places=TWO, own_hosts=HERE, members=("--insecure", "on"))
    master, first, second, drafter = lineup(with_member_server(serving, None, True))
    assert [one.host for one in (master, first, second, drafter)] == [None, None, "10.0.0.2", "10.0.0.2"]
    assert read_master([*master.arguments, "--insecure"]).fleet_listen == "10.0.0.1:50060"
    assert given(first, "--listen") == "10.0.0.1:50051"
    program, *words = command_of(second).split()
    assert program == "specsot-worker"
    read = read_worker(words)
    assert (read.member.master, read.layers, read.model.device) == ("10.0.0.1:50060", Range(3, 8), "cuda:1")
    assert (read.service.listen, read.member.advertise, read.member.name) == (
        "10.0.0.2:50051",
        "10.0.0.2:50051",
        "worker-1",
    )
    assert given(drafter, "--listen") == "10.0.0.2:50052"


def test_certificates_reach_every_service_by_its_role(tmp_path: Path) -> None:
    serving = with_member_server(
        replace(PRIVATE, places=TWO, own_hosts=HERE, certificates=tmp_path), None, False
    )
    for service in lineup(serving):
        role = service.module.removeprefix("specsot_")
        tls_files = [given(service, flag) for flag in ("--tls-ca", "--tls-cert", "--tls-key")]
        assert tls_files == [str(tmp_path / role / name) for name in ("ca.pem", "own.pem", "own.key")]
    assert given(lineup(serving)[0], "--token-file") == str(tmp_path / "master" / "tokens")


def test_every_ring_has_workers_and_a_drafter_of_its_own() -> None:
    places = parse_devices("10.0.0.1#0,10.0.0.1#1,10.0.0.2#0,10.0.0.2#1")
    check_stages(2, places, 2)
    check_stages(None, places, 2)
    with pytest.raises(InvalidRequest, match="devices are 4, stages 3 times 2"):
        check_stages(2, places, 3)
    with pytest.raises(InvalidRequest, match="devices are 4, stages those of 3 rings"):
        check_stages(None, places, 3)
    master, *members = lineup(replace(PRIVATE, replicas=2, places=places, own_hosts=HERE))
    assert (given(master, "--replicas"), given(master, "--workers")) == ("2", "2")
    assert read_master(list(master.arguments)).ring.replicas == 2
    found = [(one.name, one.host, given(one, "--device")) for one in members]
    assert found == [
        ("worker-0", None, "cuda:0"),
        ("worker-1", None, "cuda:1"),
        ("drafter", None, "cuda:1"),
        ("worker-2", "10.0.0.2", "cuda:0"),
        ("worker-3", "10.0.0.2", "cuda:1"),
        ("drafter-1", "10.0.0.2", "cuda:1"),
    ]
    assert given(members[4], "--layers") == "3:8"
    assert "--replicas" not in lineup(PRIVATE)[0].arguments


def lineup(serving: Serving) -> list[Service]:
    models = Models(small_pair() / "base", Path("head"), (Range(0, 3), Range(3, 8)))
    return services_of(FleetOptions(), models, 50050, Path("folder"), None, serving)


def given(service: Service, flag: str) -> str:
    return service.arguments[service.arguments.index(flag) + 1]


def test_a_fleet_of_ones_own_has_its_stages_on_the_devices_that_are_named() -> None:
    wanted = FleetOptions(devices="127.0.0.1#1,127.0.0.1#cpu", layers="0:3,3:8", kind="processes")
    _, first, second, drafter = services_of(wanted, models_of(wanted), 50050, Path("folder"))
    assert [given(one, "--device") for one in (first, second, drafter)] == ["cuda:1", "cpu", "cpu"]
    assert [given(one, "--layers") for one in (first, second)] == ["0:3", "3:8"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (FleetOptions(devices="192.0.2.1#0"), "devices name 192.0.2.1, another machine: start the fleet"),
        (FleetOptions(devices="127.0.0.1#0", stages=2), "devices are 1, stages 2"),
        (FleetOptions(devices="127.0.0.1#0", layers="0:3,3:8"), "devices are 1, stages 2"),
    ],
)
def test_a_fleet_of_ones_own_is_on_this_machine(wanted: FleetOptions, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        models_of(wanted)


@pytest.mark.torch
async def test_devices_of_an_embedded_fleet(demo_model: Path) -> None:
    """Two CPUs are as good as two GPUs to see who gets which."""
    wanted = FleetOptions(
        devices="127.0.0.1#cpu,127.0.0.1#cpu", drafter="none", model=str(demo_model / "base")
    )
    fleet = await open_embedded(wanted, models_of(wanted))
    try:
        (first, second) = [one.layers for one in (await fleet.info()).members]
    finally:
        await fleet.close()
    assert (first.first, first.last, second.last) == (0, second.first, 8)


@pytest.mark.parametrize(
    ("devices", "replicas", "fleet", "chosen", "in_flight", "threads"),
    [
        ("h#cpu,h#cpu", 1, None, None, 1, "8 8 8"),  # one after the other, each with all cores
        ("h#cpu,h#cpu,h#cpu,h#cpu", 2, "127.0.0.1:7", None, 1, "4 4 4 4 4 4"),  # rings compute side by side
        ("h#cpu,h#cpu", 1, None, "3", None, "3 3 3"),  # who chooses threads means them for all at once
        ("h#0,h#cpu", 1, None, None, None, "2 2 2"),  # a GPU computes beside the cores
        ("h#cpu,h#cpu", 1, "10.0.0.1:7", None, None, "2 2 2"),  # another machine may join
        ("h#cpu,g#cpu", 1, "10.0.0.1:7", None, None, "8 8 8"),  # nobody shares this machine's
    ],
)
def test_stages_of_one_machine_take_turns_with_all_its_cores(
    monkeypatch: pytest.MonkeyPatch,
    devices: str,
    replicas: int,
    fleet: str | None,
    chosen: str | None,
    in_flight: int | None,
    threads: str,
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    serving = replace(PRIVATE, places=parse_devices(devices), own_hosts=frozenset("h"), replicas=replicas)
    master, *members = lineup(replace(serving, fleet=fleet))
    assert read_master([*master.arguments, "--insecure"]).ring.max_in_flight == in_flight
    assert [dict(one.environment)["OMP_NUM_THREADS"] for one in members] == threads.split()
