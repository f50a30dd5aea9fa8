"""`specsot completion`: a script that completes commands, options and values in a shell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from click.shell_completion import get_completion_class

from specsot.service.command import Example, command
from specsot.service.option_table import Option

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    HEADING: ClassVar[str] = "Arguments"

    shell: Annotated[Shell, Option("bash, zsh or fish.", positional=True)]


EXAMPLES = (
    Example('eval "$(specsot completion bash)"', "In ~/.bashrc"),
    Example('eval "$(specsot completion zsh)"', "In ~/.zshrc"),
    Example("specsot completion fish > ~/.config/fish/completions/specsot.fish", "Once, for fish"),
)


@command(CompletionOptions, examples=EXAMPLES)
def completion(given: CompletionOptions) -> int:
    """Print a completion script for bash, zsh or fish."""
    from specsot_app.cli import COMPLETE, specsot

    known = get_completion_class(given.shell)
    assert known is not None
    print(known(specsot(), {}, "specsot", COMPLETE).source())
    return 0
