"""The `specsot` command: its words, and one clear line for whatever goes wrong.

Refuses to know what the words do, and imports nothing heavy: `specsot health` must be quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_group

from specsot._version import __version__
from specsot.errors import Cancelled, InvalidRequest, ModelError, SpecsotError
from specsot_app.extensions import LAB, add_word
from specsot_app.words import Word, source_of

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130

WORDS = ("infer", "chat", "serve", "status", "info", "rebalance", "health", "verify", "train", "eval")
GROUPS = ("bench",)  # of words


def tell_version(asked: bool) -> None:
    if asked:
        print(f"specsot {__version__}")
        raise typer.Exit


def specsot(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=tell_version, help="Tell it and end.")
    ] = False,
) -> None:
    """One long answer, planned, written in parallel, verified by trees."""


@cache
def command_with(words: tuple[str, ...]) -> TyperGroup:
    """The command, with these of its words. Each takes its time to import: a probe pays for one alone."""
    command = typer.Typer(
        name="specsot",
        add_completion=False,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )
    command.callback()(specsot)
    for name in words:
        if name in LAB:
            add_word(command, name)
            continue
        module = import_module(f"specsot_app.commands.{name}")
        if name in GROUPS:
            command.add_typer(module.group(), name=name)
        else:
            command.command(name, cls=Word)(getattr(module, name))
    return get_group(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    known = (*WORDS, *GROUPS)
    command = command_with(tuple(word for word in given[:1] if word in known) or known)
    try:
        return command(args=given, standalone_mode=False) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (InvalidRequest, ModelError) as error:
        return complain(error, WRONG_INPUT)
    except Cancelled as error:
        return complain(error, INTERRUPTED)
    except (SpecsotError, OSError) as error:
        return complain(error, FAILED)
    except (typer.Abort, typer.TyperException) as error:
        said = wording(error)
        return offer_help(error) if said.startswith("Usage: ") else complain(said, WRONG_INPUT)


def wording(error: Exception) -> str:
    """What the option parser has to say, on one line; where the value came from, if not from here."""
    said = error.format_message() if isinstance(error, typer.TyperException) else "aborted"
    if isinstance(error, typer.BadParameter) and error.ctx and error.param:
        source = source_of(error.ctx, error.param.name)
        said = f"{source}: {error.message}" if source else said
    return " ".join(said.replace("Value error, ", "").split())


def offer_help(error: Exception) -> int:
    """Nothing was asked for: all there is to ask for, on as many lines as it takes."""
    print(error, file=sys.stderr)
    return WRONG_INPUT


def complain(error: object, status: int) -> int:
    """One line to the user."""
    print(f"specsot: {error}", file=sys.stderr)
    return status
