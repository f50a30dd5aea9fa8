"""Opens the HTTP door of one master.

Refuses to know endpoints; it gathers what they need.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from specsot.members import Head
from specsot.params import Mode
from specsot.rpc.options import Terms
from specsot_master.desk import RequestCounter
from specsot_master.gateway.app import build_app
from specsot_master.gateway.counting import observe_master
from specsot_master.gateway.door import HttpDoor, open_http_door
from specsot_master.gateway.house import HttpContext
from specsot_master.gateway.metrics import Metrics
from specsot_master.gateway.names import HostCheck
from specsot_master.master import Master


async def open_http(
    listen: str,
    master: Master,
    desk: RequestCounter,
    terms: Terms,
    metrics: Metrics | None = None,
    mode: Mode = "direct",
    names: Iterable[str] = (),
) -> HttpDoor:
    """metrics: those that are counted already, if any are. mode: of OpenAI's clients who do not say.

    names: what the door is called, where nobody is asked for a token.

    Raises Unavailable when the address cannot be had, InvalidRequest for bad certificates.
    """
    metrics = metrics or observe_master(master, desk)

    def head() -> Head | None:
        rings = [one.fleet.ring for one in master.replicas if one.drafts]
        return next((ring.head for ring in rings if ring), None)

    house = HttpContext(
        desk,
        master.text,
        healthy=lambda: master.serving,
        head=head,
        figures=metrics.written,
        began=int(time.time()),
        mode=mode,
    )
    app = build_app(house, terms.tokens)
    return await open_http_door(listen, HostCheck(app, names) if terms.tokens is None else app, terms.tls)
