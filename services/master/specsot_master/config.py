"""The options of a master's process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specsot.errors import InvalidRequest
from specsot.members import CommMode, Layout, Transport, TreeShape
from specsot.params import DrafterName, Mode
from specsot.service.command import read
from specsot.service.option_table import HOST_NAMES, POSITIVE, SECONDS, Offer, Option
from specsot.service.options import ServiceOptions
from specsot.transport.heartbeat import Heartbeat
from specsot.transport.security import Tokens
from specsot_master.core.placement import TAKE_OVER_SECONDS
from specsot_master.core.ring import EngineConfig


@dataclass(frozen=True, slots=True)
class RingOptions:
    """What a master makes of its members. conduct: how requests are treated; its model and vocabulary are
    read from the model's directory.
    """

    HEADING: ClassVar[str] = "Ring"

    name: Annotated[
        str,
        Option("Public name of the model.", aliases=("served-model-name",), unset="the directory's name"),
    ] = ""
    workers: Annotated[
        int, Option("Workers that share the layers, unless they bring ranges.", kind=POSITIVE)
    ] = 1
    replicas: Annotated[
        int,
        Option(
            "Complete rings, each with workers and a drafter of its own.",
            aliases=("data-parallel-size",),
            kind=POSITIVE,
        ),
    ] = 1
    max_stages: Annotated[
        int | None,
        Option("Most workers that share the layers after a rebalance.", kind=POSITIVE, unset="all that help"),
    ] = None
    placement: Annotated[
        Literal["measured", "even"], Option("How layers are shared: by measured speed, or evenly.")
    ] = "measured"
    take_over_after: Annotated[
        float,
        Option(
            "Seconds that a lost worker has to come back before the others share its layers.", kind=SECONDS
        ),
    ] = TAKE_OVER_SECONDS
    drafter: Annotated[DrafterName, Option("`none`, or any other: whichever drafter joins the ring.")] = (
        "eagle"
    )
    page_rows: Annotated[
        int | None,
        Option(
            "Positions per KV page.",
            aliases=("block-size",),
            kind=POSITIVE,
            unset="64 where a GPU computes, else 256",
        ),
    ] = None
    rows: Annotated[
        int, Option("Most rows of one frame.", aliases=("max-num-batched-tokens",), kind=POSITIVE)
    ] = 512
    shape: TreeShape = field(default_factory=TreeShape)
    layout: Annotated[Layout, Option("Layout of branches in a frame.", flag="branch-layout")] = "batched"
    draft_timeout: Annotated[float, Option("Seconds that stage 0 waits for a draft tree.", kind=SECONDS)] = (
        1.0
    )
    transport: Annotated[Transport, Option("What carries messages between members.")] = "grpc"
    comm_mode: Annotated[
        CommMode,
        Option(
            "`p2p`: results and features go straight to whoever needs them. `ring`: stages talk to "
            "neighbours only, and the drafter to the last stage."
        ),
    ] = "p2p"
    conduct: EngineConfig = field(default_factory=EngineConfig)

    @property
    def drafts(self) -> bool:
        """A drafter belongs to each ring."""
        return self.drafter != "none"


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """stuck_after: seconds without a lap, while there is work, after which it does not serve.

    token: one more beside those of token_file.
    """

    HEADING: ClassVar[str] = "Doors"

    model: Annotated[Path, Option("Directory of the base model (its tokenizer and config).", metavar="DIR")]
    ring: RingOptions = field(default_factory=RingOptions)
    http: Annotated[
        str | None, Option("Serve HTTP, too, on this host:port (port 0: any free port).", metavar="ADDRESS")
    ] = None
    http_names: Annotated[
        tuple[str, ...],
        Option(
            "Names that browsers may call it by, beside localhost, this host's name and addresses; "
            "where no token is needed.",
            kind=HOST_NAMES,
        ),
    ] = ()
    default_mode: Annotated[Mode, Option("How OpenAI clients that name no mode are answered.")] = "direct"
    fleet_listen: Annotated[
        str | None, Option("Address on which members join.", metavar="ADDRESS", unset="--listen")
    ] = None
    token_file: Annotated[
        Path | None,
        Option("Tokens that clients may show, one a line; or one in SPECSOT_TOKEN.", metavar="FILE"),
    ] = None
    token: Annotated[str | None, Option("A token that clients may show.", secret=True)] = field(
        default=None, repr=False
    )
    journal: Annotated[
        Path | None, Option("Directory in which resumable requests outlive a restart.", metavar="DIR")
    ] = None
    stuck_after: Annotated[
        float,
        Option("Seconds without a lap, while there is work, until it is unhealthy.", kind=SECONDS),
    ] = 60.0
    pulse: Heartbeat = field(default_factory=Heartbeat)
    service: Annotated[ServiceOptions, Offer(defaults={"listen": "127.0.0.1:50050"})] = field(
        default_factory=lambda: ServiceOptions("127.0.0.1:50050")
    )

    @property
    def guarded(self) -> bool:
        """Clients must show a token."""
        return bool(self.token_file or self.token)

    def tokens(self) -> Tokens | None:
        """What clients must show, if anything. Raises InvalidRequest for a file without tokens."""
        return Tokens(self.token_file, self.token) if self.guarded else None

    def check(self) -> None:
        """Clients show tokens, members certificates: where either must, they come in by different doors.

        Raises InvalidRequest.
        """
        self.pulse.check()
        self.tokens()
        service, tls = self.service, self.service.tls
        service.check()
        if self.fleet_listen is None and (self.guarded or tls.ca):
            shown = "tokens are for clients" if self.guarded else "--tls-ca is for members"
            raise InvalidRequest(f"{shown}: give members a door of their own by --fleet-listen")
        if tls.ca and not tls.cert:
            raise InvalidRequest("--tls-ca needs --tls-cert and --tls-key")
        needs = "--tls-cert, --tls-key and --token-file (or SPECSOT_TOKEN)"
        public = tls.cert is not None and self.guarded
        for flag, address in (("listen", service.listen), ("http", self.http)):
            service.check_exposure(flag, address, needs, public)
        needs = "--tls-cert, --tls-key and --tls-ca"
        service.check_exposure("fleet-listen", self.fleet_listen, needs, tls.mutual)


def read_config(arguments: Sequence[str] | None = None) -> MasterConfig:
    """Exits with status 2 and one line when something is wrong."""
    about = "Take requests, and lead a SpecSoT ring of workers and a drafter."
    return read("specsot-master", MasterConfig, about, arguments, check=MasterConfig.check)
