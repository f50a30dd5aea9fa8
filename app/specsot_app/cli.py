"""Defines the `specsot` command: its subcommands, and one-line error messages.

It imports nothing heavy: a subcommand is imported when it is used, since `specsot health` must be quick. The
commands of `specsot_bench` and of the lab are entry points of `specsot.commands`, named `eval`, or
`bench.load` for `specsot bench load`. Their names are known here, so that a plain install can say what to
install.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from specsot._version import __version__
from specsot.errors import Cancelled, InvalidRequest, ModelError, SpecsotError
from specsot.service.command import (
    COLUMN,
    MAX_HELP_COLUMNS,
    Example,
    add_version,
    command,
    wording,
    write_list,
)
from specsot.service.option_table import InactiveOption, Option
from specsot.service.runtime_env import INTERRUPTED, TERMINATED, Terminated, set_runtime_defaults

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


# Exit status after unusable arguments, options or models.
WRONG_INPUT = 2
# Exit status after any other known error.
FAILED = 1

# What `specsot --help` shows, without importing any of them.
COMMANDS: Mapping[str, Mapping[str, str]] = {
    "Ask": {
        "infer": "Answer one question.",
        "chat": "Hold a conversation.",
        "demo": "Fetch the demo model, which answers without --model.",
    },
    "Serve": {
        "serve": "Start a fleet of processes, on this machine or on several.",
        "join": "Run layers of a fleet that another machine shares.",
        "status": "Show the state of a fleet, live.",
        "info": "Show the state of a fleet once.",
        "rebalance": "Redistribute the layers over all workers.",
        "health": "Check the health of one service.",
    },
    "Check and measure": {
        "plan": "Show how a model fits on which devices, without loading it.",
        "verify": "Compare a fleet's answers with Transformers, token for token.",
        "bench": "Measure this machine.",
        "eval": "Measure quality and speed of planned answers against direct ones.",
        "train": "Train an EAGLE-3 head for a base model.",
    },
    "Shell": {
        "completion": "Print a completion script for bash, zsh or fish.",
        "version": "Print the versions of SpecSoT, Python and torch, for a bug report.",
    },
}
# The line of help of each benchmark, by the name that follows `specsot bench`.
BENCHES: Mapping[str, str] = {
    "quick": "All families of methods side by side, with short answers; minutes on two cores.",
    "full": "All methods, up to 2,000 tokens: tables, plots, recommended settings.",
    "demo": "Plain, drafted and planned answers of the demo model, side by side.",
    "load": "Requests per second and waits of 1 to 64 clients at once.",
    "ring": "Whole answers over stages that are far from each other.",
    "policies": "Perplexity under each KV policy.",
    "precision": "Memory, perplexity and tokens per step in every precision.",
    "ablation": "What each optimisation gains by itself: on and off.",
    "steps": "Where the time of a step goes on a CPU, or its time by the tokens of its tree.",
    "tuner": "Draft sizes by the tuner, compared with fixed ones.",
    "ranks": "Tokens per step of a head's chains and trees.",
    "kernels": "Kernels of trees and attention on a GPU.",
    "llamacpp": "SpecSoT compared with llama.cpp, on the same model.",
}
# Commands that have subcommands.
GROUPS = ("bench",)
# Names of the subcommands, which the words of an error message may mean.
WORDS = (
    *("infer", "chat", "demo", "serve", "join", "status", "info", "rebalance", "health", "plan", "verify"),
    *("train", "eval"),
)
# The environment variable with which a shell's completion script calls this command.
COMPLETE = "_SPECSOT_COMPLETE"
# Commands that share the module `status`.
STATUS_COMMANDS = ("info", "status", "rebalance")
# First line of `specsot --help`.
ABOUT = (
    "Low latency for long answers: planned, written in parallel, drafted in trees that the model verifies."
)


class Group(click.Group):
    """A group of subcommands, each imported when it is used.

    name: Name of the group, such as "bench".
    about: One line of help.
    commands_by_heading: Subcommands with one line of help each, by the heading under which the help shows
        them.
    prefix: Name that precedes a subcommand's name in the path of an entry point: "bench" for "bench.load";
        empty for the whole command.
    """

    def __init__(
        self, name: str, about: str, commands_by_heading: Mapping[str, Mapping[str, str]], prefix: str = ""
    ) -> None:
        super().__init__(
            name, help=about, no_args_is_help=True, context_settings={"max_content_width": MAX_HELP_COLUMNS}
        )
        self._commands_by_heading = commands_by_heading
        self._prefix = prefix
        if not prefix:
            add_version(self, "specsot")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands: first those of `commands_by_heading`, then installed entry
        points below the prefix.

        Each name is listed once. Without a prefix, installed entry points are not listed.

        ctx: Click's context, which is not used.
        """
        known = [name for names in self._commands_by_heading.values() for name in names]
        installed = (path.rpartition(".")[2] for path in paths_below(self._prefix)) if self._prefix else ()
        return list(dict.fromkeys((*known, *installed)))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a subcommand, importing its module; None if there is no such command.

        A known command that is not installed is returned as a command that fails with what to install.

        "completion" and "version" are defined in this module, names in GROUPS are groups of their own, and
        all others are imported.

        ctx: Click's context, which is not used.
        cmd_name: Name of the subcommand, without the group's name.
        """
        if cmd_name not in self.list_commands(ctx):
            return None
        path = f"{self._prefix}.{cmd_name}" if self._prefix else cmd_name
        if path in ("completion", "version"):
            return completion if path == "completion" else version
        if cmd_name in GROUPS:
            return Group(cmd_name, "Measure this machine.", {"Commands": BENCHES}, cmd_name)
        if path in BENCH or path in LAB or self._prefix:
            return command_of(path)
        module = "status" if path in STATUS_COMMANDS else path.partition(".")[0]
        return getattr(import_module(f"specsot_app.commands.{module}"), cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return (name, subcommand, its arguments), as click does. For an unknown name, fail with a usage
        error that suggests the most similar name.

        Click allows None for the first two; this group returns None only during shell completion, for an
        unknown name.

        A name that begins with "-" is left to click, which reports an unknown option. Without a similar name
        the error suggests none.

        ctx: Click's context, which raises the usage error.
        args: The words after the group's name; the first one names the subcommand.
        Raises click.UsageError for an unknown name.
        """
        name = args[0]
        known = self.get_command(ctx, name) is not None
        # While click completes words, errors must not be printed.
        if not (known or name.startswith("-") or ctx.resilient_parsing):
            similar = get_close_matches(name, self.list_commands(ctx), 1)
            ctx.fail(f"No such command {name!r}." + (f" Did you mean {similar[0]!r}?" if similar else ""))
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the completions of a partly typed word: the subcommands that begin with it, then the group's
        own options.

        Help lines come from `commands_by_heading`, so that no command is imported for its help.

        A subcommand without a help line, such as an installed one, is completed without help.

        ctx: Click's context.
        incomplete: The typed beginning of a word; empty matches every name.
        """
        help_lines = {
            name: line for names in self._commands_by_heading.values() for name, line in names.items()
        }
        matching = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        subcommands = [CompletionItem(name, help=help_lines.get(name)) for name in matching]
        return [*subcommands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands under their headings.

        ctx: Click's context, which is not used.
        formatter: Click's formatter of help texts; it receives one section for each heading.
        """
        for heading, names in self._commands_by_heading.items():
            with formatter.section(heading):
                write_list(formatter, list(names.items()), COLUMN // 2)


def specsot() -> Group:
    """Return a new `specsot` command with all its subcommands."""
    return Group("specsot", ABOUT, COMMANDS)


# Shells for which a completion script exists.
Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Arguments of `specsot completion`.

    shell: The shell whose completion script is printed.
    """

    HEADING: ClassVar[str] = "Arguments"

    shell: Annotated[Shell, Option("bash, zsh or fish.", positional=True)]


# Examples in the help of `specsot completion`.
SHELLS = (
    Example('eval "$(specsot completion bash)"', "In ~/.bashrc"),
    Example('eval "$(specsot completion zsh)"', "In ~/.zshrc, after compinit"),
    Example("specsot completion fish > ~/.config/fish/completions/specsot.fish", "Once, for fish"),
)


@command(CompletionOptions, examples=SHELLS)
def completion(options: CompletionOptions) -> int:
    """Print a completion script for bash, zsh or fish.

    \f The options name the shell. The script is printed on stdout, and the exit status is 0. A shell that is
    none of the three is refused before, as a wrong argument.
    """
    shell_class = get_completion_class(options.shell)
    assert shell_class is not None
    source = shell_class(specsot(), {}, "specsot", COMPLETE).source()
    # The script for fish splits at every comma, but help texts may have commas.
    print(source.replace('string split ","', 'string split -m1 ","'))
    return 0


@click.command(short_help=COMMANDS["Shell"]["version"])
def version() -> int:
    """Print the versions of SpecSoT, Python and torch, for a bug report.

    \f The line is printed on stdout, with the platform; without torch it says "no torch". The exit status is
    0.
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of
    from platform import platform, python_version

    try:
        torch = f"torch {version_of('torch')}"
    except PackageNotFoundError:
        torch = "no torch"
    print(f"specsot {__version__}, Python {python_version()}, {torch}, {platform()}")
    return 0


def main(arguments: Sequence[str] | None = None, only: click.Command | None = None) -> int:
    """Run one command; return the exit status, for which see `run`.

    Before the command runs, settings of the runtime are set, and warnings of options without effect are
    printed as one line each; other warnings are shown as usual. An exception that `run` does not know is
    passed on.

    arguments: The words after the program's name; None takes those of this process.
    only: The command to run, whose name is then not among `arguments`; None: the whole `specsot` command.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    set_runtime_defaults()
    with warnings.catch_warnings():
        warnings.simplefilter("always", InactiveOption)
        warnings.showwarning = Warnings(warnings.showwarning)
        return run(words, only)


class Warnings:
    """Shows a warning of an inactive option as one line on stderr, once for each message.

    show_other: The function that shows every other warning: the former `warnings.showwarning`.
    """

    def __init__(self, show_other: Callable[..., None]) -> None:
        self._show_other = show_other
        self._shown = set[str]()

    def __call__(
        self, message: Warning | str, category: type[Warning], *location: Any, **further: Any
    ) -> None:
        """Show one warning. The arguments are those of `warnings.showwarning`.

        The line is "specsot: " and the message.

        message: The warning. A message of an inactive option that was shown before is not shown again.
        category: The warning's class. A class other than InactiveOption is passed on to `show_other`.
        location: File name and line number of the code that warned.
        further: Further arguments that the warnings module passes, such as `file` and `line`.
        """
        if not issubclass(category, InactiveOption):
            self._show_other(message, category, *location, **further)
        elif str(message) not in self._shown:
            self._shown.add(str(message))
            print(f"specsot: {message}", file=sys.stderr)


def run(words: list[str], only: click.Command | None = None) -> int:
    """Run one command; return the exit status, and print an error as one line on stderr.

    The status is what the command returns, 0 if it returns nothing, WRONG_INPUT for unusable arguments or
    models, INTERRUPTED after Ctrl-C or a cancelled call, TERMINATED after SIGTERM, and FAILED for other known
    errors. An unknown exception is passed on. If the environment variable COMPLETE is set, completions for
    the shell are printed instead.

    An OSError is printed with its file's name, if it has one. A command that was called without its
    arguments prints its help on stderr and gives WRONG_INPUT. A result that is no whole number counts as 0.

    words: Arguments of the command, without the program's name.
    only: The command to run; None: the whole `specsot` command.
    """
    try:
        command = only or specsot()
        # A shell's completion script asks for completions.
        if COMPLETE in os.environ:
            return shell_complete(command, {}, "specsot", COMPLETE, os.environ[COMPLETE])
        result: Any = command(args=words, prog_name="specsot", standalone_mode=False)
    # click turns KeyboardInterrupt into Abort.
    except (KeyboardInterrupt, click.Abort) as error:
        return TERMINATED if isinstance(error.__cause__ or error, Terminated) else INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return WRONG_INPUT
    except (InvalidRequest, ModelError) as error:
        return print_error(error, WRONG_INPUT)
    except Cancelled as error:
        return print_error(error, INTERRUPTED)
    except SpecsotError as error:
        return print_error(error, FAILED)
    except OSError as error:
        file_prefix = f"{error.filename}: " if error.filename else ""
        return print_error(f"{file_prefix}{error.strerror or error}", FAILED)
    except click.ClickException as error:
        return print_error(wording(error), WRONG_INPUT)
    return result if isinstance(result, int) else 0


def print_error(error: object, status: int) -> int:
    """Print an error as one line on stderr, and return the exit status that was passed.

    error: The error or its text, which is printed after "specsot: ".
    status: The exit status to return.
    """
    print(f"specsot: {error}", file=sys.stderr)
    return status


# Group of entry points with which distributions add commands.
GROUP = "specsot.commands"
# Entry points of this distribution, in specsot_bench.
BENCH = ("verify", "bench.quick", "bench.full")
# Paths of the commands that the lab's distribution provides.
LAB = ("train", "eval", *(path for name in BENCHES if (path := f"bench.{name}") not in BENCH))
# Settings with which a command that is not installed accepts any arguments.
ACCEPT_ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}


def command_of(path: str) -> click.Command:
    """Return the command with this path. If the command is not installed, return a command that fails and
    says what to install.

    path: Path of the command, such as "train" or "bench.load".
    """
    entry_point = _points().get(path)
    return (_load(entry_point) if entry_point else None) or _refusing(path)


def paths_below(group: str) -> Iterator[str]:
    """Yield the paths of a group's commands: first those that are known here, then other installed ones.

    group: Name of the group: "bench" yields "bench.quick", "bench.load" and so on.
    """
    yield from dict.fromkeys(path for path in (*BENCH, *LAB, *_points()) if path.startswith(f"{group}."))


@cache
def _points() -> dict[str, EntryPoint]:
    """Return the installed entry points of the group `specsot.commands`, by name. The result is cached."""
    # Imported here, since a health probe needs no entry points and must be quick.
    from importlib.metadata import entry_points

    return {entry_point.name: entry_point for entry_point in entry_points(group=GROUP)}


def _load(entry_point: EntryPoint) -> click.Command | None:
    """Import the command of an entry point. Return None if its distribution is still registered but its files
    are gone.

    The distribution's own package missing gives None; any other missing module is an error.

    entry_point: The entry point; its object is a click command.
    Raises ModuleNotFoundError if the command's own imports are missing.
    """
    try:
        return entry_point.load()
    except ModuleNotFoundError as error:
        if error.name != entry_point.module.partition(".")[0]:
            raise
        return None


def _refusing(path: str) -> click.Command:
    """Return a command that accepts any arguments and fails with InvalidRequest, which says what to install.

    A command of BENCH is part of SpecSoT itself, so that the message asks for a new install of SpecSoT;
    every other command belongs to the lab.

    path: Path of the command, such as "bench.load"; it decides between a new install and the lab's install.
    """
    missing = "a new install: pip install ." if path in BENCH else "the lab: pip install ./lab"
    message = f"`specsot {path.replace('.', ' ')}` needs {missing}, in SpecSoT's repository"

    def refuse() -> int:
        """Raise InvalidRequest with what to install."""
        raise InvalidRequest(message)

    name = path.rpartition(".")[2]
    return click.Command(
        name, callback=refuse, help=message, context_settings=ACCEPT_ANYTHING, add_help_option=False
    )
