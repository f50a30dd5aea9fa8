"""Defines and checks the options of a master's process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from specsot.checkpoint.resolving import resolve_model
from specsot.errors import InvalidRequest
from specsot.params import Mode
from specsot.service.command import read
from specsot.service.option_table import HOST_NAMES, ORIGINS, SECONDS, Offer, Option, Tier, option
from specsot.service.options import ServiceOptions
from specsot.transport.heartbeat import Heartbeat
from specsot.transport.security import Tokens
from specsot_master.core.ring.ring_state import RingOptions

# Processes. Bounds --api-processes, so that each one's share of the memory for bodies holds a body of the
# largest size.
MAX_API_PROCESSES: Final = 16
# Cores. With so few, further processes would take time from the model.
FEW_CORES: Final = 4
# Processes. As many as serve HTTP by default on a large machine. Untuned.
DEFAULT_API_PROCESSES: Final = 4
# The first word of the names of the master's metrics: its own, or that of vLLM.
MetricPrefix = Literal["specsot", "vllm"]


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """All options of a master's process; each option's help text describes it.

    model: The base model: a directory, a GGUF file, or a name that `resolve_model` knows.
    ring: How rings are formed, and how requests are treated.
    stuck_after: Seconds without a step, while there is work, after which health checks fail.
    token: One more valid client token, in addition to those of token_file; None for no further one.
    pulse: How often members send heartbeats, and how long they may be silent.
    service: What all services have: address, TLS, logs, telemetry.
    http: The host:port of the HTTP server; None to serve no HTTP.
    api_processes: How many processes serve HTTP for the master; 0 for its own process, None to decide by the
        number of cores.
    http_names: Host names accepted from browsers, besides localhost and this host's name and addresses.
    allowed_origins: Origins of web pages that may send requests; empty for none.
    default_mode: The mode of requests from OpenAI's clients that name none.
    sse_ping_interval: Seconds of silence in a streamed HTTP answer before a ping.
    metrics_prefix: The first word of the names of metrics.
    fleet_listen: The address on which members connect; None for that of the clients.
    client_tls: False to serve clients without TLS although there is a certificate.
    token_file: The file of valid client tokens, one per line; None for none.
    journal: The directory of the journal; None to keep nothing over a restart.
    """

    # The heading of these options in the help text.
    HEADING: ClassVar[str] = "Endpoints"
    # Options without a tier of their own are listed only in the full help.
    TIER: ClassVar[Tier] = "expert"

    model: Annotated[
        Path,
        Option(
            "Base model, as for workers; its tokenizer and config are read.", metavar="MODEL", tier="common"
        ),
    ]
    ring: RingOptions = field(default_factory=RingOptions)
    http: str | None = option(
        None,
        "Serve HTTP, too, on this host:port (port 0: any free port).",
        metavar="ADDRESS",
        tier="common",
    )
    api_processes: int | None = option(
        None,
        "Processes that read HTTP requests, tokenize prompts and write responses, so that the master's core "
        "is left to running requests; 0 does all of it in the master's own process.",
        metavar="NUMBER",
        min_value=0,
        max_value=MAX_API_PROCESSES,
        unset="0 up to 4 cores, else a quarter of the cores, at most 4",
    )
    http_names: tuple[str, ...] = option(
        (),
        "Host names accepted from browsers, besides localhost and this host's name and addresses; "
        "checked if no token is required.",
        kind=HOST_NAMES,
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Origins of web pages that may send requests, such as https://chat.example.", kind=ORIGINS
    )
    default_mode: Mode = option(
        "direct",
        "Mode for OpenAI clients that do not choose one.",
        tier="common",
    )
    sse_ping_interval: float = option(
        10.0,
        "Seconds without text in a streamed HTTP answer after which a comment is sent, so that proxies and "
        "clients keep the connection.",
        metavar="SECONDS",
        min_value=5,
        max_value=60,
    )
    metrics_prefix: MetricPrefix = option(
        "specsot", "Prefix of the master's metrics; `vllm` suits dashboards and gateways made for vLLM."
    )
    fleet_listen: str | None = option(
        None, "Address on which members connect.", metavar="ADDRESS", unset="--listen"
    )
    client_tls: bool = option(
        True, "Use TLS for clients, too, if there is a certificate; `off` if they are on this machine."
    )
    token_file: Path | None = option(
        None,
        "File of valid client tokens, one per line; or one in SPECSOT_TOKEN.",
        tier="common",
        metavar="FILE",
    )
    token: str | None = option(None, "A valid client token.", secret=True)
    journal: Path | None = option(
        None,
        "Directory of the journal, from which resumable requests continue after a restart.",
        tier="common",
        metavar="DIR",
    )
    stuck_after: float = option(
        60.0, "Seconds without a step, while there is work, after which health checks fail.", kind=SECONDS
    )
    pulse: Heartbeat = field(default_factory=Heartbeat)
    service: Annotated[ServiceOptions, Offer(defaults={"listen": "127.0.0.1:50050"})] = field(
        default_factory=lambda: ServiceOptions("127.0.0.1:50050")
    )

    @property
    def base(self) -> Path:
        """The model's directory, to which the option `model` resolves. Raises ModelError."""
        return resolve_model(self.model)

    @property
    def num_api_processes(self) -> int:
        """How many processes serve HTTP for the master; 0 if its own process does."""
        if self.api_processes is not None:
            return self.api_processes
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return 0 if num_cores <= FEW_CORES else min(num_cores // 4, DEFAULT_API_PROCESSES)

    @property
    def guarded(self) -> bool:
        """True if clients must show a token."""
        return bool(self.token_file or self.token)

    def tokens(self) -> Tokens | None:
        """Return the valid client tokens, or None if none is required. Raises InvalidRequest for a file
        without tokens.
        """
        return Tokens(self.token_file, self.token) if self.guarded else None

    def check(self) -> None:
        """Check the options together; return nothing if they may be used. A CA needs a certificate, and an
        address that other machines can reach needs the protection that its port offers, unless --insecure is
        given.

        Clients authenticate by tokens and members by certificates. If either is required, members need a port
        of their own.

        Raises InvalidRequest for options that contradict each other or expose a port without protection.
        """
        self.pulse.check()
        self.tokens()
        service = self.service
        tls = self.service.tls
        service.check()
        if self.fleet_listen is None and (self.guarded or tls.ca):
            shown = "tokens are for clients" if self.guarded else "--tls-ca is for members"
            raise InvalidRequest(f"{shown}: give members an endpoint of their own by --fleet-listen")
        if tls.ca and not tls.cert:
            raise InvalidRequest("--tls-ca needs --tls-cert and --tls-key")
        needs = "--tls-cert, --tls-key and --token-file (or SPECSOT_TOKEN)"
        public = tls.cert is not None and self.guarded and self.client_tls
        for flag, address in (("listen", service.listen), ("http", self.http)):
            service.check_exposure(flag, address, needs, public)
        needs = "--tls-cert, --tls-key and --tls-ca"
        service.check_exposure("fleet-listen", self.fleet_listen, needs, tls.mutual)


def read_config(arguments: Sequence[str] | None = None) -> MasterConfig:
    """Return the options from the command line, the environment and the option file. If something is wrong,
    print one line and exit with status 2.

    arguments: the words after the command's name; None for those of this process.
    """
    about = "Serve clients, and coordinate a SpecSoT ring of workers and a drafter."
    return read("specsot-master", MasterConfig, about, arguments, check=MasterConfig.check)
