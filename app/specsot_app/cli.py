"""The `specsot` command: its words, and one clear line for whatever goes wrong.

Refuses to know what the words do, and imports nothing heavy: `specsot health` must be quick.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from specsot.errors import Cancelled, InvalidRequest, ModelError, SpecsotError
from specsot_app.commands import bench, health, infer, info, serve, verify

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    name="specsot",
    help="One long answer, planned, written in parallel, verified by trees.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("infer")(infer.infer)
app.command("serve")(serve.serve)
app.command("health")(health.health)
app.command("info")(info.info)
app.command("verify")(verify.verify)
app.add_typer(bench.app, name="bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        return app(args=arguments, standalone_mode=False) or 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except (InvalidRequest, ModelError) as error:
        return complain(error, WRONG_INPUT)
    except Cancelled as error:
        return complain(error, INTERRUPTED)
    except (SpecsotError, OSError) as error:
        return complain(error, FAILED)
    except (typer.Abort, typer.TyperException) as error:
        return complain(wording(error), WRONG_INPUT)


def wording(error: Exception) -> str:
    """What the option parser has to say, on one line."""
    said = error.format_message() if isinstance(error, typer.TyperException) else "aborted"
    return " ".join(said.replace("Value error, ", "").split())


def complain(error: object, status: int) -> int:
    """One line to the user."""
    print(f"specsot: {error}", file=sys.stderr)
    return status
