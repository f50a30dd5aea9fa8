"""`specsot health`: asks one service whether it lives and whether it serves.

Refuses to know torch and the service's own words; it must answer in half a second.
"""

from __future__ import annotations

from typing import Annotated

import typer


def health(
    address: Annotated[str, typer.Argument(help="host:port of a master, worker or drafter.")],
    service: Annotated[str, typer.Option(help="Ask for one service, such as specsot.v1.Master.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 2.0,
) -> int:
    """Exit status 0: it serves; 1: it does not, or nobody answers."""
    from specsot.rpc.probe import probe

    state = probe(address, service, timeout)
    print(f"{address}: {state}")
    return 0 if state == "SERVING" else 1
