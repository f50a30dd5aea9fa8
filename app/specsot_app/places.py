"""Which stage runs where, as the seeds wrote it: devices "10.0.0.1#0,10.0.0.2#0", layer splits "14,28"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specsot.errors import InvalidRequest

FIRST_PORT = 50051  # of a host's first member; the next one has the next


@dataclass(frozen=True, slots=True)
class HostDevice:
    """Where one member runs: a host as the others reach it, and a torch device there."""

    host: str
    device: str

    def __str__(self) -> str:
        return f"{self.host}#{self.device.removeprefix('cuda:')}"


def parse_devices(devices: str | Sequence[str]) -> tuple[HostDevice, ...]:
    """One place a stage, in ring order. Raises InvalidRequest: no such place, or a GPU named twice."""
    listed = devices.split(",") if isinstance(devices, str) else devices
    places = tuple(_place(one) for one in listed)
    for number, place in enumerate(places):
        if place.device != "cpu" and place in places[:number]:
            raise InvalidRequest(f"devices name {place} twice; a GPU runs one stage", field="devices")
    return places


def _place(written: str) -> HostDevice:
    found = re.fullmatch(r"\s*([^#\s]+)#(\d{1,3}|cpu)\s*", written)
    if found is None:
        raise InvalidRequest(
            f"devices must be HOST#GPU or HOST#cpu, such as 10.0.0.1#0,10.0.0.2#0, got {written.strip()!r}",
            field="devices",
        )
    device = found[2]
    return HostDevice(found[1], device if device == "cpu" else f"cuda:{int(device)}")


def check_stages(stages: int | None, places: Sequence[HostDevice], rings: int = 1) -> None:
    """Raises InvalidRequest unless there is one place for each stage of each ring."""
    if places and len(places) != (stages or len(places) // rings) * rings:
        told = f"{rings} times {stages}" if stages and rings > 1 else stages or f"those of {rings} rings"
        raise InvalidRequest(f"devices are {len(places)}, stages {told}", field="devices")


def ports_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """One port for each member, counted on its host."""
    return tuple(FIRST_PORT + hosts[:number].count(host) for number, host in enumerate(hosts))


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
