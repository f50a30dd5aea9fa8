"""`specsot-drafter`: the draft model as a process.

It puts a drafter's rooms together and lets them run.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Executor

from specsot.model.config import require_torch
from specsot.service.membership import Part
from specsot.service.runtime_env import set_runtime_defaults
from specsot.transport.links import Dialer
from specsot_drafter.config import DrafterConfig, read_config


def main() -> int:
    config = read_config()
    set_runtime_defaults()
    from specsot.service.lifecycle import run_service, write_logs

    write_logs("drafter", config.service.log_format, config.service.log_level)
    return run_service("specsot-drafter", lambda leaving: serve(config, leaving))


async def serve(config: DrafterConfig, leaving: asyncio.Event) -> None:
    from specsot.service.member import serve_member
    from specsot.service.telemetry import observed

    require_torch()

    def make(name: str, address: str, dialer: Dialer, compute: Executor) -> Part:
        from specsot_drafter.drafter import Drafter
        from specsot_drafter.loader import DraftLoader
        from specsot_drafter.telemetry import DrafterTelemetry

        return Drafter(DraftLoader(config.draft, name, address), dialer, compute, DrafterTelemetry(seen))

    with observed("drafter", config.service) as seen:
        await serve_member(make, config.service, config.member, leaving)


if __name__ == "__main__":
    sys.exit(main())
