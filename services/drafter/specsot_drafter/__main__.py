"""`specsot-drafter`: the draft model as a process.

Refuses to know the ring; it puts a drafter's rooms together and lets them run.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import Executor

from specsot.links import Dialer
from specsot.membership import Part
from specsot.model.fields import require_torch
from specsot.process.habits import settle_habits
from specsot_drafter.config import DrafterConfig, read_config


def main() -> int:
    config = read_config()
    settle_habits()
    from specsot.process.life import live
    from specsot.process.logs import write_logs

    write_logs("drafter", config.setting.log_format, config.setting.log_level)
    return live("specsot-drafter", lambda leaving: serve(config, leaving))


async def serve(config: DrafterConfig, leaving: asyncio.Event) -> None:
    from specsot.process.member import serve_member
    from specsot.process.observing import observed

    require_torch()

    def make(name: str, address: str, dialer: Dialer, compute: Executor) -> Part:
        from specsot_drafter.observing import drafter_observer
        from specsot_drafter.part import Drafter
        from specsot_drafter.source import DraftLoader, DraftLoadOptions

        supply = DraftLoadOptions(
            name,
            address,
            config.model,
            config.draft_model,
            config.dtype,
            config.device,
            config.kv_memory,
            config.draft_format,
            config.model_format,
            config.overrides,
            config.drafter,
            config.options,
            config.quantization,
        )
        return Drafter(DraftLoader(supply), dialer, compute, drafter_observer(seen))

    with observed("drafter", config.setting) as seen:
        await serve_member(make, config.setting, config.master, config.advertise, config.name, leaving)


if __name__ == "__main__":
    sys.exit(main())
