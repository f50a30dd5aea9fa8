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

    host: Name or address of the host, as other machines reach it.
    device: Name of a torch device on that host, such as "cuda:0" or "cpu".
    """

    host: str
    device: str

    def __str__(self) -> str:
        """Return the place as --devices writes it: "10.0.0.1#0" or "10.0.0.1#cpu"."""
        return f"{self.host}#{self.device.removeprefix('cuda:')}"


def parse_devices(devices: str | Sequence[str]) -> tuple[HostDevice, ...]:
    """Return one place for each stage, in ring order; several stages may share a device.

    "10.0.0.1#0,10.0.0.2#cpu" -> GPU 0 of the first host, and the CPU of the second.

    devices: Places as --devices writes them, separated by commas or as a sequence.
    Raises InvalidRequest for a malformed place; an empty string is malformed, an empty sequence has no
    places.
    """
    places = devices.split(",") if isinstance(devices, str) else devices
    return tuple(_place(place) for place in places)


def _place(written: str) -> HostDevice:
    """Return the place that a text such as "10.0.0.1#0" names.

    A GPU has a number of 1 to 3 digits and becomes "cuda:N"; "cpu" stays. A host must not contain "#" or
    white space.

    written: One place as --devices writes it; white space around it is ignored.
    Raises InvalidRequest for a malformed text.
    """
    match = re.fullmatch(r"\s*([^#\s]+)#(\d{1,3}|cpu)\s*", written)
    if match is None:
        raise InvalidRequest(
            f"devices must be HOST#GPU or HOST#cpu, such as 10.0.0.1#0,10.0.0.2#0, got {written.strip()!r}",
            field="devices",
        )
    device = match[2]
    return HostDevice(match[1], device if device == "cpu" else f"cuda:{int(device)}")


@dataclass(frozen=True, slots=True)
class PlannedPlace:
    """A place, and what the user says of it.

    place: The host and device.
    memory: Free bytes of the device's memory, as the user gave them; None if not given.
    bandwidth: Bytes a second that the device's memory can read, as the user gave them; None if not given.
    """

    place: HostDevice
    memory: int | None = None
    bandwidth: float | None = None


def parse_planned(devices: str | Sequence[str]) -> tuple[PlannedPlace, ...]:
    """Return one place for each stage with what the user says of its memory.

    "10.0.0.1#0=24G@1008" -> GPU 0 with 24 GiB free and 1008 GB/s.

    Sizes are written as for the options of memory, such as 512M or 24G. Bandwidths are given in GB/s and
    returned in bytes a second. Missing memory or bandwidth is None.

    devices: HOST#GPU=MEMORY@BANDWIDTH, of which the last two may be left out; separated by commas or as a
        sequence.
    Raises InvalidRequest for a malformed place or size.
    """
    texts = devices.split(",") if isinstance(devices, str) else devices
    matches = [re.fullmatch(r"([^=@]*)(?:=([^@]*))?(?:@(\d+(?:\.\d+)?))?", text.strip()) for text in texts]
    if None in matches:
        invalid = next(text for text, parts in zip(texts, matches) if parts is None)
        raise InvalidRequest(
            f"devices are HOST#GPU=MEMORY@BANDWIDTH with GB/s, such as 10.0.0.1#0=24G@1008, got {invalid!r}",
            field="devices",
        )
    parts = [text.groups() for text in matches if text]
    places = parse_devices([place for place, _, _ in parts])
    try:
        memories = [MEMORY.read(memory) if memory is not None else None for _, memory, _ in parts]
    except ValueError as error:
        raise InvalidRequest(f"devices: {error}", field="devices") from None
    bandwidths = [float(bandwidth) * 1e9 if bandwidth else None for _, _, bandwidth in parts]
    return tuple(map(PlannedPlace, places, memories, bandwidths))


def splits_of(splits: Any) -> str:
    """Return the layer ranges that --layer-splits describes: "14,28" or [14, 28] -> "0:14,14:28,28:".

    The last range has no end, which means the model's last layer.

    splits: First layer of each stage after the first, as a comma-separated text or a sequence of numbers; it
        is not checked.
    """
    cuts = [str(cut).strip() for cut in (splits.split(",") if isinstance(splits, str) else splits)]
    return ",".join(f"{first}:{last}" for first, last in zip(["0", *cuts], [*cuts, ""]))


def check_stages(stages: int | None, places: Sequence[HostDevice], rings: int = 1) -> None:
    """Raise InvalidRequest unless there is one place for each stage of each ring; return if no places are
    given.

    Without `stages`, the number of places must be a multiple of `rings`.

    stages: Number of stages of each ring; None: as many as the places allow.
    places: Places of --devices, ring by ring; empty if not given.
    rings: Number of complete rings, at least 1.
    """
    if places and len(places) != (stages or len(places) // rings) * rings:
        expected = f"{rings} times {stages}" if stages and rings > 1 else stages or f"those of {rings} rings"
        raise InvalidRequest(f"devices are {len(places)}, stages {expected}", field="devices")


def ports_of(hosts: Sequence[str]) -> tuple[int, ...]:
    """Return a port for each member, so that members of one host have different ports: [a, a, b] -> (50051,
    50052, 50051).

    hosts: The host of each member, in order.
    """
    return tuple(FIRST_PORT + hosts[:number].count(host) for number, host in enumerate(hosts))


def address_of(host: str, port: int) -> str:
    """Return "host:port", with an IPv6 address in brackets: ("::1", 80) -> "[::1]:80".

    host: A name, an IPv4 address, or an IPv6 address with or without brackets.
    port: The TCP port.
    """
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def parse_ranges(ranges_text: str | Sequence[str], layers: int) -> tuple[Range, ...]:
    """Return one layer range for each stage, in ring order.

    The text in the error is what was given.

    ranges_text: Ranges such as "0:4,4:8", as one text or as a sequence; the last range may lack its end.
    layers: Number of layers of the model.
    Raises InvalidRequest unless the ranges follow each other from layer 0 to the model's last.
    """
    text = ranges_text if isinstance(ranges_text, str) else ",".join(map(str, ranges_text))
    if not (ranges := contiguous_ranges(text, layers)):
        raise InvalidRequest(
            f"layers must be ranges that follow each other from 0 to the model's {layers}, such as "
            f"0:{layers // 2},{layers // 2}:{layers}, got {text!r}",
            field="layers",
        )
    return ranges


def contiguous_ranges(ranges_text: str, layers: int) -> tuple[Range, ...]:
    """Return the ranges if they follow each other from layer 0 to `layers`; otherwise ().

    ("0:14,14:", 28) -> 0:14 and 14:28.

    The result is also () for an empty range, a malformed part, and an end beyond `layers`. White space
    around a range is ignored.

    ranges_text: Ranges such as "0:14,14:", separated by commas; a missing end means `layers`.
    layers: Number of layers of the model.
    """
    matches = [re.fullmatch(r"\s*(\d{1,6}):(\d{0,6})\s*", part) for part in ranges_text.split(",")]
    edges = [(int(match[1]), int(match[2] or layers)) for match in matches if match]
    is_gapless = all(left[1] == right[0] for left, right in pairwise(edges))
    covers_model = is_gapless and len(edges) == len(matches) and edges[0][0] == 0 and edges[-1][1] == layers
    if not covers_model or any(first >= last for first, last in edges):
        return ()
    return tuple(Range(first, last) for first, last in edges)


def check_order(ranges_text: str | Sequence[str]) -> None:
    """Raise InvalidRequest unless a model could have these layer ranges, whatever its number of layers.

    A text without any number raises as well. If the last range has no end, the model is taken to have at
    least one layer more.

    ranges_text: Ranges such as "0:14,14:28,28:", as one text or as a sequence.
    """
    text = ranges_text if isinstance(ranges_text, str) else ",".join(map(str, ranges_text))
    edges = [int(edge) for edge in re.findall(r"\d{1,6}", text)]
    ends_with_model = text.rstrip().endswith(":")
    if not contiguous_ranges(text, max(edges, default=0) + ends_with_model):
        raise InvalidRequest(
            f"layers must be ranges that follow each other from 0, such as 0:14,14:28, got {text!r}",
            field="layers",
        )


def split_ranges(splits: str, layers: int) -> tuple[Range, ...]:
    """Return the ranges into which --layer-splits cuts a model: ("14", 28) -> 0:14 and 14:28.

    White space around a number is ignored. There is one range more than there are numbers.

    splits: The first layer of each stage after the first, separated by commas.
    layers: Number of layers of the model.
    Raises InvalidRequest if a range would be empty or a part is no number.
    """
    cuts = [int(cut) if re.fullmatch(r"\s*\d{1,6}\s*", cut) else 0 for cut in splits.split(",")]
    edges = list(pairwise([0, *cuts, layers]))
    if any(first >= last for first, last in edges):
        raise InvalidRequest(
            f"layer_splits must be ascending numbers between 0 and the model's {layers} layers, such as "
            f"{layers // 2}, got {splits!r}",
            field="layer_splits",
        )
    return tuple(Range(first, last) for first, last in edges)
