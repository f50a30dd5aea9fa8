"""Makes a command line program of a settings dataclass: parsing, help, sources of values, errors, completion.

A value on the command line has precedence, then the environment, then the file of --config, then the default.
A program is a click command, so click does the parsing, the suggestions and the shell completion."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from specsot._version import __version__
from specsot.errors import InvalidRequest, ModelError
from specsot.service.option_table import Entry, build, entries_of, in_words

T = TypeVar("T")

# Exit status.
WRONG_INPUT = 2
# Columns. Bounds the width of --help.
MAX_HELP_COLUMNS = 120
# The column of --help at which descriptions begin. Untuned.
COLUMN = 32
# Key in a context's meta: for each parameter, where its value was found.
SOURCES = "specsot.sources"
# Key in a context's meta: whether --help=all was given.
EVERY_OPTION = "specsot.every_option"
# The group of --help for options that all programs have.
OWN = "Common options"
# Flags. A program with more of them shows only the common ones, unless --help=all is given. Untuned.
MAX_SHORT = 22
# The value of --help that shows every option.
EVERYTHING = "all"

# Returns the values, by flag, with what names of other systems imply.
Spelled = Callable[[dict[str, Any]], Mapping[str, Any]]
# How a switch is given: "values" for `--insecure [on|off]`, "flags" for `--insecure` alone.
Switches = Literal["values", "flags"]  # --insecure [on|off], or --insecure alone


@dataclass(frozen=True, slots=True)
class Example:
    """An example in the help: a command line, and what it is for.

    line: the command line.
    purpose: what the command line is for.
    """

    line: str
    purpose: str


class Typed(click.ParamType[Any, Any]):
    """The click type of an option: reads and completes its values.

    name: the placeholder of a value in click's messages.
    """

    def __init__(self, entry: Entry) -> None:
        """Create the type of one option's values.

        entry: the option whose values are read.
        """
        self._entry = entry
        self.name = entry.kind.metavar or "|".join(entry.kind.choices)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text; an object that is no str is returned unchanged. Fails with click's
        error for an invalid text.

        value: the text, or a value that was read already.
        param: the parameter, for the error.
        ctx: the context of the call, for the error.
        """
        if not isinstance(value, str):
            return value
        try:
            return self._entry.kind.read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return completions of a value: one item of type "dir" for a directory, one of type "file" for a
        file, a model or a schema, which the shell replaces by names of its own, or else those of the option's
        choices that begin with `incomplete`. Return an empty list if no choice does, or if the option has no
        choices.

        ctx, param: given by click, not needed.
        incomplete: the beginning of the value.
        """
        if self._entry.kind.metavar in ("PATH", "DIR", "FILE", "MODEL", "SCHEMA"):
            kind = "dir" if self._entry.kind.metavar == "DIR" else "file"
            return [CompletionItem(incomplete, type=kind)]
        words = self._entry.kind.choices
        return [CompletionItem(one) for one in words if one.startswith(incomplete)]


class TableOption(click.Option):
    """A click option whose line of help shows its default, its variable, and its other names."""

    def __init__(self, entry: Entry, names: Sequence[str], **click_options: Any) -> None:
        """Create the click option.

        entry: the option.
        names: its flags, with dashes.
        click_options: further arguments of click's Option.
        """
        super().__init__([*names, entry_key(entry)], **click_options)
        self.entry = entry

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the option's line of help: the flag with its placeholder, and the description with its
        notes.

        ctx: given by click, not needed.

        The flag is followed by " / --no-..." if the option has such a flag, otherwise by the placeholder or
        the choices joined by "|", in brackets if the option is a switch. A flag that takes no
        value has neither.
        """
        entry = self.entry
        name = f"--{entry.flag}"
        if self.secondary_opts:
            name += f" / {self.secondary_opts[0]}"
        elif not self.is_flag:
            value = entry.kind.metavar or "|".join(entry.kind.choices)
            name += f" [{value}]" if entry.switch else f" {value}"
        return name, " ".join((entry.option.help, *notes_of(entry, bool(self.is_flag))))


class ForeignName(click.Option):
    """A hidden click option with another system's name and values, as Python calls accept them too."""

    def __init__(self, entry: Entry, keyword: str) -> None:
        """Create the hidden option, which takes a text.

        entry: the option of this project.
        keyword: the other system's name of it.
        """
        super().__init__([f"--{with_dashes(keyword)}", f"spelled_{keyword}"], hidden=True, type=str)
        self.entry = entry
        self.keyword = keyword

    def meaning(self, foreign_value: str, ctx: click.Context) -> Any:
        """Return this project's value for another system's value. Raises click.BadParameter if the value has
        no meaning here.

        foreign_value: the other system's value.
        ctx: the context of the call, for the error.
        """
        try:
            return self.entry.read(self.entry.option.keywords[self.keyword](foreign_value))
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, self) from None


def notes_of(entry: Entry, flag: bool = False) -> list[str]:
    """Return the notes that follow an option's help text, in this order: that it may be repeated, that it is
    required or its default, its environment variable, and the other names of its flag.

    entry: the option.
    flag: True if the option takes no value.

    A note that does not apply is left out. The variable is always present.
    """
    notes = ["May be repeated."] if entry.several else []
    if entry.required:
        notes.append("[required]")
    elif (default := shown_default(entry, flag)) is not None:
        notes.append(f"[default: {default}]")
    notes.append(f"[{variable_of(entry.flag)}]")
    if others := entry.names[1:]:
        notes.append(f"[also {', '.join(f'--{other}' for other in others)}]")
    return notes


def shown_default(entry: Entry, flag: bool = False) -> str | None:
    """Return the default as --help shows it, or None if none is shown.

    entry: the option.
    flag: True if the option takes no value; its default is then shown as the flag itself.

    If there is no default (None or ""), the text `unset` of the option's description is shown, if it has one.
    Nothing is shown for None, "" and () without such a text, nor for a flag that is off by default.
    """
    if entry.option.unset is not None and entry.default in (None, ""):
        return entry.option.unset
    if entry.default in (None, "", ()) or (flag and entry.default is False):
        return None
    if flag:
        return f"--{entry.flag}"
    return entry.write(entry.default)


def entry_key(entry: Entry) -> str:
    """Return the parameter's name in click, which is the flag's, because flags are unique within a program.

    entry: the option.
    """
    return entry.flag.replace("-", "_")


class TableCommand(click.Command, Generic[T]):
    """A program with one settings dataclass, as a click command.

    settings: the settings dataclass.
    run: called with the settings; its result is the program's result.
    table: the program's table in a file.
    environment: the environment variables.
    examples: examples for the end of the help.
    entries: the options of the settings dataclass.
    """

    def __init__(
        self,
        name: str,
        settings: type[T],
        run: Callable[[T], Any],
        about: str,
        *,
        table: str | None = None,
        switches: Switches = "flags",
        examples: Sequence[Example] = (),
        environment: Mapping[str, str] = os.environ,
        spelled: Spelled = dict,
    ) -> None:
        """Create the command, with one parameter for each option of the settings and `--config`.

        name: the program's name.
        settings: the settings dataclass.
        run: called with the settings; its result is the exit status.
        about: the description in the help.
        table: the program's table in a file. None: `name`.
        switches: "values" if a switch takes a value, "flags" if it takes none.
        examples: examples for the end of the help.
        environment: the environment variables, in which values of options and secrets are found.
        spelled: applied to the values, by flag, if names of other systems were used; returns the values with
            what those names imply.

        Secret options and options of Python calls only get no parameter.
        """
        self.settings = settings
        self.run = run
        self.table = table or name
        self.environment = environment
        self.examples = examples
        self.entries = entries_of(settings)
        self._spelled = spelled
        shown = [one for one in self.entries if not (one.option.secret or one.option.keyword_only)]
        parameters = [parameter_of(entry, switches) for entry in shown]
        super().__init__(
            name,
            params=[*parameters, *spellings_of(self.entries), config_option()],
            help=about,
            context_settings={"max_content_width": MAX_HELP_COLUMNS, "token_normalize_func": with_dashes},
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the program and return its result.

        ctx: the context of the call, with the parsed parameters.

        Raises what the program raises. An InvalidRequest whose value is from the environment or a file is
        raised again with that source in front of its message.
        """
        try:
            return self.run(build(self.settings, self.values(ctx)))
        except InvalidRequest as error:
            source = source_of(ctx, error.field)
            if source is None:
                raise
            raise InvalidRequest(f"{source}: {error}", error.field) from None

    def values(self, ctx: click.Context) -> dict[str, Any]:
        """Return the given values by flag, without options that have no value.

        ctx: the context of the call, with the parsed parameters.

        Values that are None or () are left out. An empty text is kept, except of a secret: secrets are read
        from the environment only, without surrounding spaces, and an empty one counts as not given. Values
        that were given under names of other systems are added under this project's flags.

        Raises InvalidRequest if an option is given under both names with different values.
        """
        values: dict[str, Any] = {}
        for entry in self.entries:
            value = ctx.params.get(entry_key(entry))
            if entry.option.secret:
                found = in_environment(entry.flag, self.environment)
                value = found and found.words[0].strip()
            if value not in (None, (), "") or (value == "" and not entry.option.secret):
                values[entry.flag] = value
        return self._with_foreign_names(ctx, values)

    def _with_foreign_names(self, ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values with those that were given under names of other systems.

        ctx: the context of the call, with the parsed parameters.
        values: the values by flag, which were given under this project's names.

        Raises InvalidRequest if an option is given under both names with different values.

        `values` is changed and, if at least one such name was given, passed through the function `spelled`;
        otherwise it is returned as it is. Only a value from the command line contradicts another name; one
        from the environment or a file is replaced.
        """
        meanings = [
            (one, one.meaning(given, ctx))
            for one in self.params
            if isinstance(one, ForeignName) and (given := ctx.params.get(str(one.name))) is not None
        ]
        for spelling, meant in meanings:
            flag = spelling.entry.flag
            ours = ctx.get_parameter_source(entry_key(spelling.entry)) is ParameterSource.COMMANDLINE
            if ours and values.get(flag) != meant:
                raise InvalidRequest(
                    f"{spelling.opts[0]} is another name of --{flag}, which is given too", flag
                )
            values[flag] = meant
        return dict(self._spelled(values)) if meanings else values

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """Return the option `--help`, which is created at the first call; never None, although click allows
        that.

        ctx: given by click, not needed.
        """
        if self._help_option is None:
            self._help_option = help_option(self._count() if self._expert() else 0)
        return self._help_option

    def _count(self) -> int:
        """Return the number of options that `--help=all` shows, `--help` included."""
        return sum(isinstance(one, click.Option) and not one.hidden for one in self.params) + 1

    def _expert(self) -> set[click.Parameter]:
        """Return the options that only `--help=all` shows: those of the tier "expert", and `--config`.

        The set is empty if the program has at most MAX_SHORT options, or no option of the tier "expert".
        """
        if self._count() <= MAX_SHORT:
            return set()
        expert = {one for one in self.params if isinstance(one, TableOption) and one.entry.tier == "expert"}
        return {one for one in self.params if one.name == CONFIG} | expert if expert else set()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by their groups, in the order in which those first appear.

        ctx: the context of the call, which says whether `--help=all` was given.
        formatter: collects the lines of the help.

        Positional arguments form the group "Arguments". `--help`, `--version` and `--config` are in the group
        OWN at the end. Hidden options and, without `--help=all`, expert options are left out.
        """
        groups: dict[str, list[tuple[str, str]]] = {}
        others: list[tuple[str, str]] = []
        left_out = set() if ctx.meta.get(EVERY_OPTION) else self._expert()
        for one in (one for one in self.get_params(ctx) if one not in left_out):
            if isinstance(one, click.Argument):
                entry = next(entry for entry in self.entries if entry_key(entry) == one.name)
                groups.setdefault("Arguments", []).append((one.make_metavar(ctx), entry.option.help))
            elif (record := one.get_help_record(ctx)) is not None:
                own = isinstance(one, TableOption)
                (groups.setdefault(one.entry.heading, []) if own else others).append(record)
        for heading, records in (*groups.items(), (OWN, others)):
            with formatter.section(heading):
                write_list(formatter, records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples at the end of the help, if there are any.

        ctx: given by click, not needed.
        formatter: collects the lines of the help.

        Each example is its purpose, followed by its command line on a line of its own. Without examples,
        nothing is written.
        """
        if self.examples:
            with formatter.section("Examples"):
                for one in self.examples:
                    formatter.write_text(f"{one.purpose}:")
                    formatter.write(f"{'':{formatter.current_indent}}  {one.line}\n")


def write_list(
    formatter: click.HelpFormatter, records: Sequence[tuple[str, str]], column: int = COLUMN
) -> None:
    """Write a list like `formatter.write_dl`, with the same columns in every group and without broken names.

    formatter: collects the lines of the help.
    records: (name, description) of each entry. A name that is too long for its column has a line of its own.
    column: the column at which descriptions begin.

    A description that is too long continues on further lines, which begin at the same column. An empty
    description gives an empty one.
    """
    indent = formatter.current_indent
    left = " " * column
    for name, description in records:
        lines = textwrap.wrap(description, formatter.width - column, break_on_hyphens=False) or [""]
        head = f"{'':{indent}}{name}"
        if len(head) + 2 > column:
            formatter.write(f"{head}\n{left}{lines[0]}\n")
        else:
            formatter.write(f"{head:{column}}{lines[0]}\n")
        formatter.write("".join(f"{left}{line}\n" for line in lines[1:]))


def command(
    settings: type[T], *, table: str | None = None, examples: Sequence[Example] = (), spelled: Spelled = dict
) -> Callable[[Callable[[T], Any]], TableCommand[T]]:
    """Return a decorator that makes a command of a function of these settings.

    The function's name and docstring become the command's name and description.

    settings: the settings dataclass.
    table: the command's table in a file. None: the function's name.
    examples: examples for the end of the help.
    spelled: applied to the values if names of other systems were used, see `TableCommand`.

    A function without a docstring gets an empty description.
    """

    def made(run: Callable[[T], Any]) -> TableCommand[T]:
        """Return the command of a function.

        run: called with the settings; its result is the exit status.
        """
        about = inspect.cleandoc(run.__doc__ or "")
        return TableCommand(
            run.__name__, settings, run, about, table=table, examples=examples, spelled=spelled
        )

    return made


def with_dashes(token: str) -> str:
    """Return a flag with dashes, because --layer_splits means the same as --layer-splits. A flag without
    underscores is returned unchanged.

    token: the flag as it was written.
    """
    return token.replace("_", "-")


def spellings_of(entries: Sequence[Entry]) -> list[ForeignName]:
    """Return options for the names of other systems, without those that are names of this program's options.

    entries: the program's options.
    """
    own = {with_dashes(name) for entry in entries if not entry.option.keyword_only for name in entry.names}
    return [
        ForeignName(entry, keyword)
        for entry in entries
        for keyword in entry.option.keywords
        if with_dashes(keyword) not in own
    ]


def parameter_of(entry: Entry, switches: Switches) -> click.Parameter:
    """Return the click parameter of an option.

    entry: the option.
    switches: "values" if a switch takes a value, "flags" if it takes none.

    A positional option becomes an argument without a flag. A switch becomes a flag without a value if
    `switches` is "flags", also with `--no-x` if the option is paired; otherwise it takes a value, and `--x`
    alone means "on" if the words of the option are "off" and "on". All other options take a value, and may be
    repeated if the entry says so.
    """
    if entry.option.positional:
        return click.Argument([entry_key(entry)], required=entry.required, type=Typed(entry))
    names = [f"--{one}" for one in entry.names]
    if entry.switch and switches == "flags":
        if entry.option.paired:
            names[0] += f"/--no-{entry.flag}"
        return TableOption(entry, names, is_flag=True, default=None)
    bare = (
        {"is_flag": False, "flag_value": "on"} if entry.switch and entry.option.words == ("off", "on") else {}
    )
    return TableOption(
        entry,
        names,
        type=click.Choice(entry.kind.choices) if entry.kind.choices and not entry.switch else Typed(entry),
        multiple=entry.several,
        required=entry.required,
        **bare,
    )


def config_option() -> click.Option:
    """Return the option `--config`, which names a file with values of options."""
    return click.Option(
        [f"--{CONFIG}"],
        metavar="FILE",
        help=f"TOML file whose keys are these options. [{variable_of(CONFIG)}]",
        is_eager=True,
        expose_value=False,
        callback=look_elsewhere,
    )


def help_option(count: int) -> click.Option:
    """Return the option `--help`, or `--help=all`.

    count: number of all options, if `--help` leaves some of them out; otherwise 0.

    With a count, the help text says how to show all options, and `--help` accepts the value EVERYTHING.
    """
    more = f"--help={EVERYTHING} shows all {count} options, among them --{CONFIG} FILE." if count else ""
    return click.Option(
        ["--help", "_shown_help"],
        is_flag=False,
        flag_value="common",
        metavar=f"[{EVERYTHING}]" if count else "",
        is_eager=True,
        expose_value=False,
        callback=show_help,
        shell_complete=lambda _ctx, _parameter, incomplete: (
            [EVERYTHING] if EVERYTHING.startswith(incomplete) else []
        ),
        help=f"Show this message and exit. {more}".strip(),
    )


def show_help(ctx: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Write the help and exit. Does nothing if --help was not given.

    ctx: the context of the call.
    parameter: given by click, not needed.
    value: the value of --help, or None if it was not given.

    Nothing is written either while click only completes a line. The help has the expert options too if the
    value is EVERYTHING.
    """
    if value is not None and not ctx.resilient_parsing:
        ctx.meta[EVERY_OPTION] = value == EVERYTHING
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def look_elsewhere(ctx: click.Context, parameter: click.Parameter, file: str | None) -> None:
    """Make values from the environment and the file the defaults of the command line.

    ctx: the context of the call, which gets the defaults and their sources.
    parameter: given by click, not needed.
    file: the value of --config, or None.

    Raises InvalidRequest if the file cannot be read or has a key that is no flag of this program.

    A value in the environment has precedence over one in the file. Without `file`, the variable of `--config`
    names the file; without that variable, none is read.
    """
    command = ctx.command
    assert isinstance(command, TableCommand)
    options = {one.entry.flag: one for one in command.params if isinstance(one, TableOption)}
    names = {name: flag for flag, one in options.items() for name in one.entry.names}
    former = {name: flag for flag, one in options.items() for name in one.entry.option.former}
    found = find_all(command.table, names, command.environment, file, former)
    ctx.default_map = {str(options[flag].name): _text_of(options[flag], one) for flag, one in found.items()}
    ctx.meta[SOURCES] = {str(options[flag].name): one.source for flag, one in found.items()}


def _text_of(option: TableOption, found: Found) -> str | list[str]:
    """Return a value as the option's type reads it. If an option is repeatable, each line is one value.

    option: the option.
    found: its value from the environment or the file.

    The words of a flag without a value are its first word. The words of an option that is not repeatable are
    joined by commas, and on and off are written as the option's own words.
    """
    if option.is_flag:
        return found.words[0]
    if not option.multiple:
        return in_words(option.entry, ",".join(found.words))
    return [line for word in found.words for line in word.splitlines()]


def source_of(ctx: click.Context, parameter: str | None) -> str | None:
    """Return the source of a parameter's value, or None if it is the command line or the default.

    ctx: the context of the call.
    parameter: name of the parameter in click, or None, for which None is returned.

    Raises KeyError if `ctx` has no sources of values. A source is the name of a variable, or a file's path
    and key.
    """
    if parameter is None or ctx.get_parameter_source(parameter) is not ParameterSource.DEFAULT_MAP:
        return None
    return ctx.meta[SOURCES][parameter]


def wording(error: click.ClickException) -> str:
    """Return click's error on one line, with the value's source if that is not the command line.

    error: the error that click raised.

    Line breaks and repeated spaces of the message become single spaces.
    """
    message = error.format_message()
    if isinstance(error, click.BadParameter) and error.ctx and error.param:
        source = source_of(error.ctx, error.param.name)
        message = f"{source}: {error.message}" if source else message
    return " ".join(message.split())


def read(
    program: str,
    settings: type[T],
    about: str,
    arguments: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
    check: Callable[[T], None] = lambda settings: None,
) -> T:
    """Read a service's settings from the command line, the environment and a file, and return them.

    Exits with status 2 and one line if a value is invalid, and with status 0 after showing help or version.

    program: the program's name; the table of "specsot-worker" in a file is "worker".
    settings: the settings dataclass.
    about: the description in the help.
    arguments: the command line. None: that of this process.
    environment: the environment variables.
    check: raises InvalidRequest for values that exclude each other, ModelError for missing packages.

    The error is written to stderr. Status 2 also follows a ModelError that `check` raises. Any other
    exception is raised unchanged.
    """

    def keep(given: T) -> T:
        """Check the settings and return them, in the place of running a program.

        given: the settings.
        """
        check(given)
        return given

    table = program.removeprefix("specsot-")
    command = TableCommand(
        program, settings, keep, about, table=table, switches="values", environment=environment
    )
    add_version(command, program)
    return parsed(command, program, arguments)


def add_version(command: click.Command, program: str) -> None:
    """Add the option `--version` to a command.

    command: the command.
    program: name of the program, which is printed with the version.
    """
    click.version_option(__version__, prog_name=program, message="%(prog)s %(version)s")(command)


def parsed(command: TableCommand[T], program: str, arguments: Sequence[str] | None) -> T:
    """Run a command and return its result.

    command: the command.
    program: name of the program, for the line.
    arguments: the command line. None: that of this process.

    Raises SystemExit with status 2, after one line on stderr, if a value is invalid; with status 0 after
    showing help or version.

    Status 2 also follows an InvalidRequest or a ModelError that the program raises; any other exception of
    the program is raised unchanged.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with command.make_context(program, list(given)) as ctx:
            return command.invoke(ctx)
    except click.exceptions.Exit as done:
        raise SystemExit(done.exit_code) from None
    except (InvalidRequest, ModelError) as error:
        refuse(program, str(error))
    except click.ClickException as error:
        refuse(program, wording(error))


def refuse(program: str, message: str) -> NoReturn:
    """Write one line to stderr and raise SystemExit with status WRONG_INPUT.

    program: name of the program.
    message: what is wrong, one line.
    """
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(WRONG_INPUT)


# The flag that names the file.
CONFIG = "config"
# The programs, each of which may have a table in the file.
PROGRAMS = (
    *("master", "worker", "drafter"),
    *("infer", "chat", "demo", "serve", "join", "status", "info", "health", "rebalance", "plan", "verify"),
    *("train", "eval"),
    *("bench-quick", "bench-full", "bench-policies", "bench-precision"),
    *("bench-demo", "bench-load", "bench-ring", "bench-ablation", "bench-steps"),
    *("bench-tuner", "bench-ranks", "bench-kernels", "bench-llamacpp"),
)


@dataclass(frozen=True, slots=True)
class Found:
    """A value from the environment or the file, with its source.

    words: the value as on a command line; several words if the option is repeated.
    source: where the value was found: the name of the variable, or the file's path and the key.
    """

    words: tuple[str, ...]
    source: str


def variable_of(flag: str) -> str:
    """Return the variable of a flag, which is the same for all programs: SPECSOT_MAX_PARALLEL for
    "max-parallel".

    flag: name of the flag, without dashes in front.
    """
    return "SPECSOT_" + flag.upper().replace("-", "_")


def in_environment(flag: str, environment: Mapping[str, str]) -> Found | None:
    """Return the value of a flag's variable, or None if the variable is empty or not set.

    flag: name of the flag, without dashes in front.
    environment: the environment variables.
    """
    variable = variable_of(flag)
    text = environment.get(variable)
    return Found((text,), variable) if text else None


def find_all(
    program: str,
    flags: Mapping[str, str],
    environment: Mapping[str, str],
    file: str | None,
    former: Mapping[str, str] | None = None,
) -> dict[str, Found]:
    """Return the values from the environment and the file, by flag. The environment has precedence. Flags
    without a value are left out.

    program: the program's table in the file.
    flags: the flag of every name, aliases and former names included.
    environment: the environment variables.
    file: the file that the command line names, or None.
    former: the flag of every former name, or None if there are none. Its variable applies if the present
        variable is not set.

    Raises InvalidRequest if the file cannot be read or has a key that is no flag of this program.

    Without `file`, the variable of `--config` names the file; without that variable, no file is read. If a
    flag's variable and the variable of its former name are both set, the former one is ignored.
    """
    config_file = in_environment(CONFIG, environment) if file is None else Found((file,), f"--{CONFIG}")
    found = read_file(config_file, program, flags) if config_file else {}
    from_variables = {flag: in_environment(name, environment) for name, flag in (former or {}).items()}
    from_variables |= {flag: one for flag in flags.values() if (one := in_environment(flag, environment))}
    return found | {flag: one for flag, one in from_variables.items() if one}


def read_file(config_file: Found, program: str, flags: Mapping[str, str]) -> dict[str, Found]:
    """Return the values in a TOML file, by flag. Keys of the program's own table have precedence over keys
    outside of tables.

    Tables of other programs are ignored.

    config_file: the file's path, and where the path was found.
    program: the program's table in the file.
    flags: the flag of every name, aliases and former names included.

    Raises InvalidRequest if the file cannot be read, has a table of no program, or has a key that is no flag
    of this program.

    Keys may be written with dashes or underscores. Without a table of the program, only the keys outside of
    tables apply.
    """
    path = config_file.words[0]
    content = _parsed(config_file)
    tables = {key: cast("dict[str, Any]", value) for key, value in content.items() if isinstance(value, dict)}
    for table in tables:
        if table not in PROGRAMS:
            raise InvalidRequest(f"{path}: no program has a table [{table}]; they are {', '.join(PROGRAMS)}")
    top = {key: value for key, value in content.items() if key not in tables}
    own = tables.get(program, {})
    return _flags(path, "", top, program, flags) | _flags(path, f"{program}.", own, program, flags)


def _parsed(config_file: Found) -> dict[str, Any]:
    """Return the content of a TOML file. Raises InvalidRequest if it cannot be read.

    config_file: the file's path, and where the path was found.

    It cannot be read if it is missing, is not encoded in UTF-8, or is no valid TOML. The error for a missing
    or protected file also names where the path was found.
    """
    path = config_file.words[0]
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{config_file.source}: {path}: {error.strerror or error}") from None
    except ValueError as error:  # TOML's errors, and bytes that are no text
        raise InvalidRequest(f"{path}: {error}") from None


def _flags(
    path: str, table: str, keys: Mapping[str, Any], program: str, flags: Mapping[str, str]
) -> dict[str, Found]:
    """Return the values of a table, by flag. Raises InvalidRequest for a key that is no flag, or a value that
    is no text, number, bool or list of these.

    path: path of the file, for the sources.
    table: the table's name and a dot, or "" outside of tables.
    keys: the values by key, with dashes or underscores.
    program: name of the program, for error messages.
    flags: the flag of every name.

    The error for an unknown key suggests a flag with a similar name, if there is one. If a flag is given
    under two of its names, the last one in the file applies.
    """
    found: dict[str, Found] = {}
    for key, value in keys.items():
        source = f"{path}: {table}{key}"
        flag = flags.get(key.replace("_", "-"))
        if flag is None:
            raise InvalidRequest(f"{source} is no flag of {program}{_suggestion(key, flags)}")
        found[flag] = Found(_words(value, source), source)
    return found


def _suggestion(key: str, flags: Collection[str]) -> str:
    """Return "; did you mean X?" for the flag that is most similar to a key, or "" if none is.

    key: the unknown key.
    flags: the known names.
    """
    similar = get_close_matches(key.replace("_", "-"), flags, 1)
    return f"; did you mean {similar[0]}?" if similar else ""


def _words(value: Any, source: str) -> tuple[str, ...]:
    """Return a TOML value as words of a command line; a list becomes several words.

    value: the value.
    source: where the value was found, for error messages.

    Raises InvalidRequest for a value of another type.

    An empty list gives no words.
    """
    listed = cast("Sequence[Any]", value) if isinstance(value, list) else (value,)
    return tuple(_word(one, source) for one in listed)


def _word(value: Any, source: str) -> str:
    """Return a TOML value as a word of a command line. Raises InvalidRequest unless it is text, a number or a
    bool.

    value: the value.
    source: where the value was found, for error messages.

    A bool becomes "true" or "false". Raises for dates, lists and tables too.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise InvalidRequest(f"{source} must be text, a number, true, false, or a list of these")
