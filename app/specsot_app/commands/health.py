"""`specsot health`: asks one service whether it lives and whether it serves.

Refuses to know torch and the service's own words; it must answer in half a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specsot.transport.security import Tls

TlsCa = Annotated[
    Path | None, typer.Option(help="Speak TLS; this PEM file vouches for the other side's certificate.")
]


def health(
    address: Annotated[str, typer.Argument(help="host:port of a master, worker or drafter.")],
    service: Annotated[str, typer.Option(help="Ask for one service, such as specsot.v1.Master.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 2.0,
    tls_ca: TlsCa = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate to show to a worker or drafter.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key.")] = None,
) -> int:
    """Exit status 0: it serves; 1: it does not, or nobody answers."""
    from specsot.transport.grpc_channel import probe

    state = probe(address, service, timeout, Tls(tls_ca, tls_cert, tls_key))
    print(f"{address}: {state}")
    return 0 if state == "SERVING" else 1
