"""Settings every service has: where it listens, how it logs, how long it may take to leave.

Refuses to know the rest of a service's settings.
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass
from typing import Literal

from specsot.process.flags import Flags, memory, seconds

LogFormat = Literal["console", "json"]


@dataclass(frozen=True, slots=True)
class Setting:
    """grace: seconds from SIGTERM until what still runs is cancelled.

    metrics: where figures are served for Prometheus, if anywhere.

    reflection, channelz: whether its door tells what it serves, and how its connections stand.
    """

    listen: str
    log_format: LogFormat = "console"
    log_level: str = "info"
    grace: float = 5.0
    metrics: str | None = None
    reflection: bool = True
    channelz: bool = False


def add_setting(flags: Flags, listen: str) -> None:
    flags.flag("listen", default=listen, help="where to serve: host:port (0 for a free port) or unix:path")
    flags.flag("log-format", default="console", choices=("console", "json"), help="how log lines look")
    levels = ("debug", "info", "warning", "error")
    flags.flag("log-level", default="info", choices=levels, help="the least important lines to write")
    flags.flag("grace", seconds, 5.0, "seconds that running work has after SIGTERM")
    flags.flag("metrics", help="where to serve figures for Prometheus: host:port (0 for a free port)")
    flags.flag("reflection", default="on", choices=("on", "off"), help="whether clients may ask what is here")
    flags.flag("channelz", default="off", choices=("on", "off"), help="whether connections may be looked at")


def read_setting(given: argparse.Namespace) -> Setting:
    return Setting(
        given.listen,
        given.log_format,
        given.log_level,
        given.grace,
        given.metrics,
        reflection=given.reflection == "on",
        channelz=given.channelz == "on",
    )


def add_membership(flags: Flags) -> None:
    """What workers and drafters share."""
    flags.flag("model", required=True, help="directory of the base model")
    flags.flag(
        "model-format",
        default="safetensors",
        choices=("safetensors", "bin"),
        help="bin reads the base's pytorch_model.bin (weights only) where it has no safetensors file",
    )
    flags.flag("master", default="127.0.0.1:50050", help="host:port of the master to join")
    flags.flag("advertise", help="where peers reach this one; by default where it listens")
    flags.flag("name", help="its name in the fleet; by default the advertised address", spelled=False)
    flags.flag(
        "dtype", default="auto", choices=("auto", "fp32", "bf16", "fp16"), help="numbers to compute with"
    )
    flags.flag("device", default="cpu", help="torch device, such as cpu or cuda:0")
    flags.flag("kv-memory", memory, memory("1G"), "memory for KV pages, such as 512M or 4G")


def reachable(advertise: str | None, listen: str, port: int) -> str:
    """The address peers are told: what was asked for, else where it really listens."""
    if advertise:
        return advertise
    if listen.startswith("unix:"):
        return listen
    host = listen.rpartition(":")[0]
    everywhere = host in ("", "0.0.0.0", "[::]")
    return f"{socket.gethostname() if everywhere else host}:{port}"


def name_of(name: str | None, address: str) -> str:
    """A unix socket is named after its file."""
    return name or (address.rpartition("/")[2] if address.startswith("unix:") else address)
