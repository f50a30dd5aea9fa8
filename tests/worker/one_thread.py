"""Members that compute at once on the test's own thread, and a link that keeps what they say."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from specsot.members import Configuration
from specsot.transport.links import LocalLink
from specsot_drafter.engine import DraftEngine


class Here(Executor):
    """Does it at once."""

    def submit(self, work: Any, /, *arguments: Any, **more: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_result(work(*arguments, **more))
        return done


class AnswerMessage(list[Any]):
    """A link, and a dialer of such. drafter: what leads to a drafter, if that is another one."""

    drafter: LocalLink | None = None

    async def send(self, message: Any) -> None:
        self.append(message)

    def post(self, message: Any) -> None:
        self.append(message)

    async def close(self) -> None: ...

    async def dial(self, address: str, epoch: int, kind: str = "worker") -> Any:
        return self.drafter if self.drafter and kind == "drafter" else self


@dataclass
class Heads:
    """See `EngineProvider`: one engine, which wants no features."""

    engine: DraftEngine
    name: str = "d"

    def make_engine(self, configuration: Configuration) -> DraftEngine:
        return self.engine
