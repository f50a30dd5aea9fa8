"""Settings every service has: where it listens, how it logs, how long it may take to leave.

Refuses to know the rest of a service's settings.
"""

from __future__ import annotations

import argparse
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specsot.errors import InvalidRequest
from specsot.members import QUANTIZATIONS
from specsot.process.flags import SWITCH, Flags, memory, seconds
from specsot.rpc.exposure import exposed
from specsot.rpc.tls import PLAIN, Tls

LogFormat = Literal["console", "json"]


@dataclass(frozen=True, slots=True)
class Setting:
    """grace: seconds from SIGTERM until what still runs is cancelled.

    metrics: where figures are served for Prometheus, if anywhere.

    reflection, channelz: whether its door tells what it serves, and how its connections stand.
    reflection None: nobody said.
    tls: who it is, and who vouches for its peers. insecure: it may be reachable without any of that.
    """

    listen: str
    log_format: LogFormat = "console"
    log_level: str = "info"
    grace: float = 5.0
    metrics: str | None = None
    reflection: bool | None = None
    channelz: bool = False
    tls: Tls = PLAIN
    insecure: bool = False


def add_setting(flags: Flags, listen: str) -> None:
    flags.flag("listen", default=listen, help="where to serve: host:port (0 for a free port) or unix:path")
    flags.flag("log-format", default="console", choices=("console", "json"), help="how log lines look")
    levels = ("debug", "info", "warning", "error")
    flags.flag("log-level", default="info", choices=levels, help="the least important lines to write")
    flags.flag("grace", seconds, 5.0, "seconds that running work has after SIGTERM")
    flags.flag("metrics", help="where to serve figures for Prometheus: host:port (0 for a free port)")
    told = "whether clients may ask what is here; by default where they need not show who they are"
    flags.flag("reflection", choices=SWITCH, help=told)
    flags.flag("channelz", default="off", choices=SWITCH, help="whether connections may be looked at")
    flags.flag("tls-cert", Path, help="certificate in PEM: who this service is")
    flags.flag("tls-key", Path, help="its key")
    flags.flag("tls-ca", Path, help="certificates in PEM of those who vouch for the rest of the fleet")
    flags.flag("insecure", default="off", choices=SWITCH, help="be reachable from elsewhere without all that")


def read_setting(flags: Flags, given: argparse.Namespace) -> Setting:
    """Exits with status 2 and one line for certificates that do not belong together."""
    try:
        tls = Tls(given.tls_ca, given.tls_cert, given.tls_key)
    except InvalidRequest as error:
        flags.error(str(error))
    setting = Setting(
        given.listen,
        given.log_format,
        given.log_level,
        given.grace,
        given.metrics,
        reflection=None if given.reflection is None else given.reflection == "on",
        channelz=given.channelz == "on",
        tls=tls,
        insecure=given.insecure == "on",
    )
    needs = "--tls-cert and --tls-key"
    check_exposure(flags, setting, "metrics", setting.metrics, needs, tls.cert is not None)
    return setting


def read_member_setting(flags: Flags, given: argparse.Namespace) -> Setting:
    """A member's: whoever dials it shows a certificate, and so does it. Exits as read_setting does."""
    setting = read_setting(flags, given)
    if setting.tls != PLAIN and not setting.tls.mutual:
        flags.error("--tls-cert, --tls-key and --tls-ca go together: members show each other who they are")
    needs = "--tls-cert, --tls-key and --tls-ca"
    check_exposure(flags, setting, "listen", setting.listen, needs, setting.tls.mutual)
    return setting


def check_exposure(
    flags: Flags, setting: Setting, flag: str, address: str | None, needs: str, secured: bool
) -> None:
    """Exits with status 2 and one line where strangers could come in and nobody said that they may.

    What has no port cannot be opened; the door says so.
    """
    open = address is not None and ":" in address and exposed(address)
    if open and not secured and not setting.insecure:
        flags.error(f"--{flag} {address} is open to other machines: give {needs}, or --insecure")


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
    flags.flag("quantization", choices=QUANTIZATIONS, help="hold matrices in fewer bits than dtype has")
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
