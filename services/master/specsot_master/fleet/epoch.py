"""The newest epoch: who runs what in it, who is ready, who could not take part, and what each is to be told.

Pure. Refuses to know links, and when an epoch is to begin or to end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specsot.members import Configuration, Progress, Range, Registration, Rejoined, StandBy
from specsot_master.fleet.formation import configurations_of, rejoin_configuration
from specsot_master.fleet.succession import Stages
from specsot_master.fleet.wishes import RingConfig


@dataclass(slots=True)
class Epoch:
    """One object for whichever is the newest; number and stages outlast its end.

    failed: could not take part, since a ring was last complete.
    """

    number: int = 0
    stages: Stages = ()
    failed: set[str] = field(default_factory=set[str])
    _plan: dict[str, Configuration] = field(default_factory=dict[str, Configuration])  # empty after its end
    _ready: set[str] = field(default_factory=set[str])
    _progress: dict[str, Progress] = field(default_factory=dict[str, Progress])
    _returning: tuple[str, Configuration] | None = None  # the drafter, into the running epoch

    def __contains__(self, name: str) -> bool:
        """It takes part, ready or not."""
        return name in self._plan

    @property
    def formed(self) -> bool:
        """It has begun, and has not ended."""
        return bool(self._plan)

    @property
    def slow(self) -> list[str]:
        """Those who have not said yet that they are ready."""
        return [name for name in self._plan if name not in self._ready]

    @property
    def behind(self) -> list[str]:
        """Of the slow ones those who have not done their own part: the others wait for them."""
        told = [(name, self._progress.get(name)) for name in self.slow]
        return [name for name, one in told if one is None or one.done < one.total]

    @property
    def standing(self) -> str:
        """Of the slow ones, in words."""
        told = [(name, self._progress.get(name)) for name in self.slow]
        return ", ".join(
            f"{name} {f'{one.done} of {one.total}' if one else 'not begun'}" for name, one in told
        )

    def move(self, name: str, progress: Progress) -> bool:
        """It has got so far. Whether that is news."""
        news = name in self._plan and self._progress.get(name) != progress
        if news:
            self._progress[name] = progress
        return news

    @property
    def ring(self) -> Configuration | None:
        """What every member was told; None while somebody is not ready."""
        return next(iter(self._plan.values())) if self._plan and not self.slow else None

    @property
    def running(self) -> dict[str, Range]:
        """The layers of every stage."""
        return {stage.name: stage.layers for stage in self.stages} if self._plan else {}

    @property
    def busy(self) -> Collection[str]:
        """Who takes part, or is about to."""
        return [*self._plan, self._returning[0]] if self._returning else self._plan.keys()

    def begin(
        self, number: int, members: Sequence[Registration], stages: Stages, wishes: RingConfig
    ) -> Mapping[str, Configuration | StandBy]:
        """Become the next one, after the end of this one. Raises Refused where KV memory is too little."""
        self.number = number
        self._plan = configurations_of(number, members, stages, wishes)
        self.stages = stages
        self._ready.clear()
        self._progress.clear()
        spare = [one.name for one in members if one.kind == "worker" and one.name not in self._plan]
        return {**self._plan, **dict.fromkeys(spare, StandBy(number))}

    def end(self) -> list[str]:
        """Who took part."""
        names, self._plan, self._returning = list(self._plan), {}, None
        return names

    def count(self, name: str) -> Mapping[str, Rejoined]:
        """It is ready. Where it is the drafter that comes back, whoever has its features tells it what it
        missed.
        """
        self._ready.add(name)
        if not self._returning or self._returning[0] != name:
            return {}
        told, self._returning = self._returning[1], None
        self._draft_at(told.drafter)
        self._plan[name] = told
        assert told.drafter is not None
        return {told.stages[-1].name: Rejoined(self.number, told.drafter)}

    def draft_no_more(self, name: str) -> bool:
        """Whether it was the drafter of a running epoch, which goes on without."""
        if self._returning and self._returning[0] == name:
            self._returning = None
            return True
        if not (self.ring and name in self._plan and name not in self.running):
            return False
        del self._plan[name]
        self._draft_at(None)
        return True

    def take_back(self, members: Sequence[Registration], wishes: RingConfig) -> Mapping[str, Configuration]:
        """A drafter may come back into a running epoch, which it disturbs no more than its loss did."""
        drafters = (one.name for one in members if one.kind == "drafter")
        name = next((one for one in drafters if one not in self.busy and one not in self.failed), None)
        told = rejoin_configuration(self.ring, name, members, wishes) if self.ring and name else None
        if not name or not told:
            return {}
        self._returning = name, told
        self._ready.discard(name)
        return {name: replace(told, head=None)}  # the stages have their taps

    def _draft_at(self, address: str | None) -> None:
        self._plan = {one: replace(plan, drafter=address) for one, plan in self._plan.items()}
