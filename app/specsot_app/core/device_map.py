"""Parses which layers each stage runs, and on which host and device: --layers, --layer-splits, --devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specsot.errors import InvalidRequest
from specsot.members import Range
from specsot.service.option_table import MEMORY

# Port of a host's first member; further members of the host have the following ports.
FIRST_PORT = 50051


@dataclass(frozen=True, slots=True)
class HostDevice:
    """Where one member runs.

    host: the host, as other machines reach it.
    device: a torch device on that host.
    """

    host: str
    device: str

    def __str__(self) -> str:
        return f"{self.host}#{self.device.removeprefix('cuda:')}"


def parse_devices(devices: str | Sequence[str]) -> tuple[HostDevice, ...]:
    """Return one place a stage, in ring order; several stages may share a device. Raises InvalidRequest for a
    malformed place.

    "10.0.0.1#0,10.0.0.2#cpu" -> GPU 0 of the first host, and the CPU of the second.
    """
    listed = devices.split(",") if isinstance(devices, str) else devices
    return tuple(_place(one) for one in listed)


def _place(written: str) -> HostDevice:
    """Parse one place. Raises InvalidRequest."""
    found = re.fullmatch(r"\s*([^#\s]+)#(\d{1,3}|cpu)\s*", written)
    if found is None:
        raise InvalidRequest(
            f"devices must be HOST#GPU or HOST#cpu, such as 10.0.0.1#0,10.0.0.2#0, got {written.strip()!r}",
            field="devices",
        )
    device = found[2]
    return HostDevice(found[1], device if device == "cpu" else f"cuda:{int(device)}")


@dataclass(frozen=True, slots=True)
class PlannedPlace:
    """A place, and what the user says of it.

    place: the place.
    memory: free bytes of its memory; None if not given.
    bandwidth: bytes a second of its memory; None if not given.
    """

    place: HostDevice
    memory: int | None = None
    bandwidth: float | None = None


def parse_planned(devices: str | Sequence[str]) -> tuple[PlannedPlace, ...]:
    """Parse HOST#GPU=MEMORY@BANDWIDTH, of which the last two may be left out. Raises InvalidRequest.

    "10.0.0.1#0=24G@1008" -> GPU 0 with 24 GiB free and 1008 GB/s.
    """
    listed = devices.split(",") if isinstance(devices, str) else devices
    found = [re.fullmatch(r"([^=@]*)(?:=([^@]*))?(?:@(\d+(?:\.\d+)?))?", one.strip()) for one in listed]
    if None in found:
        wrong = next(one for one, parts in zip(listed, found) if parts is None)
        raise InvalidRequest(
            f"devices are HOST#GPU=MEMORY@BANDWIDTH with GB/s, such as 10.0.0.1#0=24G@1008, got {wrong!r}",
            field="devices",
        )
    parts = [one.groups() for one in found if one]
    places = parse_devices([place for place, _, _ in parts])
    try:
        rooms = [MEMORY.read(room) if room is not None else None for _, room, _ in parts]
    except ValueError as error:
        raise InvalidRequest(f"devices: {error}", field="devices") from None
    speeds = [float(speed) * 1e9 if speed else None for _, _, speed in parts]
    return tuple(map(PlannedPlace, places, rooms, speeds))


def splits_of(splits: Any) -> str:
    """Return layer_splits as ranges: "14,28" or [14, 28] -> "0:14,14:28,28:"; the last stage ends with the
    model.
    """
    cuts = [str(cut).strip() for cut in (splits.split(",") if isinstance(splits, str) else splits)]
    return ",".join(f"{first}:{last}" for first, last in zip(["0", *cuts], [*cuts, ""]))


def check_stages(stages: int | None, places: Sequence[HostDevice], rings: int = 1) -> None:
    """Check that there is one place for each stage of each ring. Raises InvalidRequest."""
    if places and len(places) != (stages or len(places) // rings) * rings:
        told = f"{rings} times {stages}" if stages and rings > 1 else stages or f"those of {rings} rings"
        raise InvalidRequest(f"devices are {len(places)}, stages {told}", field="devices")


def ports_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return a port for each member: hosts [a, a, b] -> (50051, 50052, 50051)."""
    return tuple(FIRST_PORT + hosts[:number].count(host) for number, host in enumerate(hosts))


def address_of(host: str, port: int) -> str:
    """Return host:port, with IPv6 addresses in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse_ranges(written: str | Sequence[str], layers: int) -> tuple[Range, ...]:
    """Return one layer range a stage, in ring order.

    Raises InvalidRequest unless the ranges follow each other from layer 0 to the model's last.
    """
    said = written if isinstance(written, str) else ",".join(map(str, written))
    if not (ranges := follow(said, layers)):
        raise InvalidRequest(
            f"layers must be ranges that follow each other from 0 to the model's {layers}, such as "
            f"0:{layers // 2},{layers // 2}:{layers}, got {said!r}",
            field="layers",
        )
    return ranges


def follow(written: str, layers: int) -> tuple[Range, ...]:
    """Return the ranges if they follow each other from layer 0 to `layers`; otherwise ().

    ("0:14,14:", 28) -> 0:14 and 14:28.
    """
    found = [re.fullmatch(r"\s*(\d{1,6}):(\d{0,6})\s*", part) for part in written.split(",")]
    edges = [(int(one[1]), int(one[2] or layers)) for one in found if one]
    joined = all(before[1] == after[0] for before, after in pairwise(edges))
    whole = joined and len(edges) == len(found) and edges[0][0] == 0 and edges[-1][1] == layers
    if not whole or any(first >= last for first, last in edges):
        return ()
    return tuple(Range(first, last) for first, last in edges)


def check_order(written: str | Sequence[str]) -> None:
    """Raise InvalidRequest unless a model could have these layer ranges, such as 0:14,14:28,28:."""
    said = written if isinstance(written, str) else ",".join(map(str, written))
    edges = [int(edge) for edge in re.findall(r"\d{1,6}", said)]
    ends_with_model = said.rstrip().endswith(":")
    if not follow(said, max(edges, default=0) + ends_with_model):
        raise InvalidRequest(
            f"layers must be ranges that follow each other from 0, such as 0:14,14:28, got {said!r}",
            field="layers",
        )


def split_ranges(splits: str, layers: int) -> tuple[Range, ...]:
    """Return the ranges into which "14,28" cuts a model. Raises InvalidRequest if one would be empty."""
    cuts = [int(cut) if re.fullmatch(r"\s*\d{1,6}\s*", cut) else 0 for cut in splits.split(",")]
    edges = list(pairwise([0, *cuts, layers]))
    if any(first >= last for first, last in edges):
        raise InvalidRequest(
            f"layer_splits must be ascending numbers between 0 and the model's {layers} layers, such as "
            f"{layers // 2}, got {splits!r}",
            field="layer_splits",
        )
    return tuple(Range(first, last) for first, last in edges)
