"""`specsot health`: asks one service whether it serves. Loads nothing heavy: probes run it often."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from specsot.service.command import Example, command
from specsot.service.option_table import Offer, Option, option
from specsot.transport.security import Tls

# Help of the TLS options, which here are those of a client.
SHOWN = Offer(
    help={
        "ca": "Use TLS; CA certificates (PEM) that verify the service.",
        "cert": "Client certificate for a worker or drafter (PEM).",
    }
)


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """Options of `specsot health`.

    address: Address of a master, worker or drafter, host:port.
    service: Name of a gRPC service, such as specsot.v1.Master; empty: the whole server.
    timeout: Seconds to wait for the answer.
    tls: TLS files of a client; without a CA, TLS is not used.
    """

    HEADING: ClassVar[str] = "Options"

    address: Annotated[str, Option("host:port of a master, worker or drafter.", positional=True)]
    service: str = option("", "Ask for one service, such as specsot.v1.Master.", metavar="NAME")
    timeout: float = option(2.0, "Seconds to wait for an answer.", metavar="SECONDS")
    tls: Annotated[Tls, SHOWN] = field(default_factory=Tls)


@command(HealthOptions, examples=[Example("specsot health 127.0.0.1:50050", "Check a master")])
def health(options: HealthOptions) -> int:
    """Check the health of one service.

    Exit status 0: serving; 1: not serving, or no answer.

    \f The line on stdout is the address and the state, such as "SERVING". No answer within `timeout` seconds
    also gives 1.
    """
    from specsot.transport.grpc_channel import probe

    state = probe(options.address, options.service, options.timeout, options.tls)
    print(f"{options.address}: {state}")
    return 0 if state == "SERVING" else 1
