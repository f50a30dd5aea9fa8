"""A word of the `specsot` command: every flag of it may also be an environment variable, or a key of a file.

Refuses to know which flags there are. What was not on the command line is blamed on where it was found.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from specsot.errors import InvalidRequest
from specsot.service.sources import CONFIG, Found, find_all, variable_of
from specsot.service.spellings import spellings_of

SOURCES = "specsot.sources"  # in a context's meta: parameter -> where its value was found


class Word(TyperCommand):
    """`--max-parallel` may come as SPECSOT_MAX_PARALLEL too, or as max-parallel in --config's file.

    The command line wins, then the environment, then the file.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params += _OF_ALL
        for option in options_of(self):
            option.opts = [*option.opts, *(f"--{other}" for other in spellings_of(flag_of(option)))]
            option.help = f"{option.help or ''} [{variable_of(flag_of(option))}]".strip()

    def invoke(self, ctx: Any) -> Any:
        """Raises what the word raises; a value from elsewhere is named with its source."""
        try:
            return super().invoke(ctx)
        except InvalidRequest as error:
            source = source_of(ctx, error.field)
            if source is None:
                raise
            raise InvalidRequest(f"{source}: {error}", error.field) from None


def options_of(word: Any) -> Sequence[TyperOption]:
    return [one for one in word.params if isinstance(one, TyperOption) and flag_of(one) != CONFIG]


def flag_of(option: TyperOption) -> str:
    """Its name in files: the first one on the command line, without dashes."""
    return option.opts[0].removeprefix("--")


def look_elsewhere(ctx: typer.Context, file: str | None) -> None:
    """Let environment and file stand in for flags that are not on the command line. Raises InvalidRequest."""
    options = {flag_of(option): option for option in options_of(ctx.command)}
    names = {name: flag for flag in options for name in (flag, *spellings_of(flag))}
    found = find_all(program_of(ctx), names, os.environ, file)
    ctx.default_map = {options[flag].name: value_of(options[flag], one) for flag, one in found.items()}
    ctx.meta[SOURCES] = {options[flag].name: one.source for flag, one in found.items()}


def program_of(ctx: Any) -> str:
    """ "bench-demo" for `specsot bench demo`."""
    words: list[str] = []
    while ctx.parent is not None:
        words.insert(0, ctx.info_name)
        ctx = ctx.parent
    return "-".join(words)


def value_of(option: TyperOption, found: Found) -> str | list[str]:
    """As the option's parser takes it. A variable has one value a line, where there may be several."""
    if not option.multiple:
        return ",".join(found.words)
    return [line for word in found.words for line in word.splitlines()]


def source_of(ctx: Any, parameter: str | None) -> str | None:
    """Where its value was found; None: on the command line, or nowhere."""
    if parameter is None or getattr(ctx.get_parameter_source(parameter), "name", "") != "DEFAULT_MAP":
        return None
    sources: Mapping[str, str] = ctx.meta[SOURCES]
    return sources[parameter]


def _with_what_all_have(
    config: Annotated[
        str | None,
        typer.Option(
            f"--{CONFIG}",
            metavar="FILE",
            help=f"TOML file with flags as its keys. [{variable_of(CONFIG)}]",
            is_eager=True,
            expose_value=False,
            callback=look_elsewhere,
        ),
    ] = None,
) -> None:
    """Never run; typer makes options only of functions."""


def _options_of_all() -> list[Any]:
    small = typer.Typer(add_completion=False)
    small.command()(_with_what_all_have)
    return typer.main.get_command(small).params


_OF_ALL = _options_of_all()
