"""Every way into a master: clients by gRPC and HTTP, members; opened together, closed together.

Refuses to know requests and rings.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from specsot.errors import InvalidRequest
from specsot.process.options import reachable
from specsot.rpc.options import CLIENT_STREAMS, HELD_BYTES, PUBLIC_BYTES, Terms
from specsot.rpc.serve import Door
from specsot.rpc.tls import Tls
from specsot.rpc.tokens import Tokens
from specsot_master.config import MasterConfig
from specsot_master.desk import Desk
from specsot_master.master import Master
from specsot_master.server import FleetService, MasterService, open_fleet_door, open_master_door

if TYPE_CHECKING:
    from specsot_master.gateway.door import HttpDoor
    from specsot_master.gateway.metrics import Metrics

log = structlog.get_logger()

GRACE = 1.0  # seconds to tell those who are still there


@asynccontextmanager
async def open_doors(
    config: MasterConfig, master: Master, desk: Desk, members: FleetService, metrics: Metrics | None = None
) -> AsyncGenerator[Door]:
    """The clients' gRPC door, while all are open. metrics: those that are counted already.

    Raises Unavailable (an address cannot be had), InvalidRequest (certificates, a missing extra).
    """
    patience = config.ring.conduct.unread_for
    clients = MasterService(desk, master.info, patience, master.rebalance, config.tokens())
    listen, apart = config.service.listen, config.fleet_listen
    if config.http is not None:  # else clients would be let in, and thrown out again, while it is imported
        check_extra()
    async with AsyncExitStack() as doors:
        door = await open_master_door(listen, clients, members if apart is None else None, _public(config))
        doors.push_async_callback(door.close, GRACE)
        log.info("listening", at=reachable(None, listen, door.port), model=master.model.name)
        if apart is not None:
            fleet = await open_fleet_door(apart, members, _terms(config, config.service.tls))
            doors.push_async_callback(fleet.close, GRACE)
            log.info("listening", at=reachable(None, apart, fleet.port), whom="members")
        if config.http is not None:
            http = await open_http(config.http, config, master, desk, metrics)
            doors.push_async_callback(http.close, GRACE)
        yield door


def check_extra() -> None:
    """Raises InvalidRequest without the extra `http`."""
    try:
        import specsot_master.gateway.opening  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            f"--http needs {error.name}: pip install 'specsot[http]'", field="http"
        ) from None


async def open_http(
    listen: str, config: MasterConfig, master: Master, desk: Desk, metrics: Metrics | None
) -> HttpDoor:
    """Raises Unavailable."""
    from specsot_master.gateway.opening import open_gateway

    terms = _public(config)
    door = await open_gateway(listen, master, desk, terms, metrics, config.default_mode, config.http_names)
    scheme = "http" if terms.tls.cert is None else "https"
    log.info("listening", at=f"{scheme}://{reachable(None, listen, door.port)}/")
    return door


def _public(config: MasterConfig) -> Terms:
    """Clients show tokens, and are asked for no certificate."""
    own = config.service.tls
    terms = _terms(config, Tls(cert=own.cert, key=own.key), config.tokens())
    return replace(terms, streams=CLIENT_STREAMS, held=HELD_BYTES)


def _terms(config: MasterConfig, tls: Tls, tokens: Tokens | None = None) -> Terms:
    service = config.service
    return Terms(
        PUBLIC_BYTES, reflection=service.reflection, channelz=service.channelz, tls=tls, tokens=tokens
    )
