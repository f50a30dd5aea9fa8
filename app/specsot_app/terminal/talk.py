"""A conversation as a value, and what a line that a person typed means in it.

Refuses to know who answers, terminals and files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specsot.params import MODES, Message, Mode

HELP = """\
/mode auto|sot|direct  let the model choose; force a plan; answer without one
/stop                  end the answer that is being written, as Ctrl-C does; what is there stays
/clear                 forget the conversation
/help                  this
/exit                  leave, as Ctrl-D does"""


@dataclass(frozen=True, slots=True)
class Question:
    text: str


@dataclass(frozen=True, slots=True)
class SetMode:
    mode: Mode


@dataclass(frozen=True, slots=True)
class Stop: ...


@dataclass(frozen=True, slots=True)
class Clear: ...


@dataclass(frozen=True, slots=True)
class Leave: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """Nothing to do but to say this."""

    reply: str = ""


ChatCommand = Question | SetMode | Stop | Clear | Leave | Reply

_ALONE: dict[str, ChatCommand] = {
    "": Reply(),
    "/stop": Stop(),
    "/clear": Clear(),
    "/help": Reply(HELP),
    "/exit": Leave(),
    "/quit": Leave(),
}


def parse_line(line: str) -> ChatCommand:
    """Lines that begin with a slash are for us, all others for the model."""
    said = line.strip()
    word, _, rest = said.partition(" ")
    if said in _ALONE:
        return _ALONE[said]
    if word == "/mode":
        return _mode_of(rest.strip())
    if word.startswith("/"):
        return Reply(f"no command is called {said}; /help tells all")
    return Question(said)


def _mode_of(name: str) -> ChatCommand:
    if name in MODES:
        return SetMode(name)
    return Reply(f"/mode takes one of {', '.join(MODES)}")


@dataclass(frozen=True, slots=True)
class Conversation:
    """What was said so far, oldest first: questions and answers take turns.

    system: what the model is told before all of it.
    """

    mode: Mode = "auto"
    system: str = ""
    turns: tuple[Message, ...] = ()

    def with_question(self, question: str) -> tuple[Message, ...]:
        """What the model is sent."""
        before = (Message("system", self.system),) if self.system else ()
        return (*before, *self.turns, Message("user", question))

    def answered(self, question: str, answer: str) -> Conversation:
        """Without an answer, as if nothing had been asked."""
        if not answer.strip():
            return self
        more = Message("user", question), Message("assistant", answer)
        return replace(self, turns=(*self.turns, *more))

    def without_oldest(self) -> Conversation:
        """Without the oldest question and its answer."""
        return replace(self, turns=self.turns[2:])
