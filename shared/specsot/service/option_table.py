"""Describes a field of a settings dataclass once: flag, help, kind of value, bounds, default, other names.

    kv_memory: int | None = option(None, "Memory for KV pages.", kind=MEMORY)

gives --kv-memory, SPECSOT_KV_MEMORY, kv-memory in a file, a Python keyword, a child's argument, a line of
--help and of the reference. A field that is itself such a dataclass brings the options it holds."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from specsot.errors import InvalidRequest

T = TypeVar("T")
Tier = Literal["common", "expert"]

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """How text becomes a value and a value text. read raises ValueError, which says what is wrong."""

    metavar: str
    read: Callable[[str], T]
    write: Callable[[T], str] = str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """help: one or two sentences. flag: where it is not the field's name. aliases: flags of other systems
    (vLLM's) that mean the same.

    kind: where the field's type does not say how text becomes a value. least, most: bounds of
    a number.
    unset: what holds when nothing is given and the default is None, for --help.
    words: how "off" and "on" are written where a switch takes a value. paired: `--no-x` exists, too.
    keywords: names that other systems have for it in Python calls, and what makes our value of theirs;
    also flags of commands, which --help does not show (docs/seeds.md does).
    fills: with its value and all that is given, by flag: what is given with what it fills in.
    former: earlier names of the flag. They mean the same, as flags, as keys of a file and as variables.
    tier: "common" options are shown by `--help`, "expert" ones by `--help=all`. None: the tier of the class
    that declares the field (its TIER), else that of the field which holds the class, else "common".
    positional: an argument without a flag. secret: from the environment alone, since everybody on a machine
    may read command lines and files travel. keyword_only: in Python calls alone.
    """

    help: str
    flag: str | None = None
    aliases: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    tier: Tier | None = None
    kind: Kind[Any] | None = None
    metavar: str | None = None
    least: float | None = None
    most: float | None = None
    unset: str | None = None
    words: tuple[str, str] = ("off", "on")
    paired: bool = False
    keywords: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Callable[[Any], Any]])
    fills: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    positional: bool = False
    secret: bool = False
    keyword_only: bool = False


def option(default: T, told: Option | str, **more: Any) -> T:
    """The default of a field that is an option: an Option, or its help and what else it says. A field without
    a default is annotated with its Option.
    """
    said = replace(told, **more) if isinstance(told, Option) else Option(told, **more)
    return field(default=default, repr=not said.secret, metadata={"option": said})


@dataclass(frozen=True, slots=True)
class Offer:
    """What a program offers of a dataclass it holds. only, without: by the names of fields.

    defaults, unset, flags, help, choices: other ones here, by the names of fields.
    inner: of dataclasses within it.
    """

    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unset: Mapping[str, str] = field(default_factory=dict[str, str])
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    help: Mapping[str, str] = field(default_factory=dict[str, str])
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    inner: Mapping[str, Offer] = field(default_factory=dict[str, "Offer"])

    def offers(self, name: str) -> bool:
        return name not in self.without and (not self.only or name in self.only)

    def of(self, name: str, notes: tuple[Any, ...]) -> Offer:
        """What is offered of a dataclass within it: as here, else as the field is annotated."""
        noted = next((note for note in notes if isinstance(note, Offer)), ALL)
        return self.inner.get(name, noted)


ALL = Offer()


@dataclass(frozen=True, slots=True)
class Entry:
    """One option of a program. path: attribute names that lead to it. default: MISSING where it is required.

    several: it may be given more than once. heading: the group it is shown in.
    """

    path: tuple[str, ...]
    flag: str
    option: Option
    kind: Kind[Any]
    default: Any
    several: bool = False
    switch: bool = False
    heading: str = "Options"
    tier: Tier = "common"

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """Without dashes; the first one is ours."""
        return (self.flag, *self.option.aliases, *self.option.former)

    @property
    def keyword(self) -> str:
        return self.name if len(self.path) == 1 else self.flag.replace("-", "_")

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def read(self, given: Any) -> Any:
        """The value that text means; what is no text is a value already. Raises ValueError."""
        if self.several:
            listed = (given,) if isinstance(given, str) else tuple(given)
            return tuple(self.kind.read(one) if isinstance(one, str) else one for one in listed)
        return self.kind.read(given) if isinstance(given, str) else given

    def write(self, value: Any) -> str:
        return ",".join(map(self.kind.write, value)) if self.several else self.kind.write(value)


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def entries_of(kind: type, offer: Offer = ALL, heading: str = "Options") -> tuple[Entry, ...]:
    """The options of a settings dataclass, in the order of its fields, those it holds included."""
    return tuple(_entries(kind, offer, heading, "common", ()))


def _entries(kind: type, offer: Offer, heading: str, tier: Tier, path: tuple[str, ...]) -> Iterator[Entry]:
    for one in fields(kind):
        if not offer.offers(one.name):
            continue
        hint, notes = _parts(hints_of(kind)[one.name])
        noted = (one.metadata.get("option"), *notes)
        found = next((note for note in noted if isinstance(note, Option)), None)
        held = _held(hint)
        declared = _declaring(kind, one.name).__dict__
        here = declared.get("HEADING", heading)
        level = declared.get("TIER", tier)
        if found is not None:
            yield replace(_entry(one, found, hint, offer, here, (*path, one.name)), tier=found.tier or level)
        elif held is not None:
            yield from _entries(held, offer.of(one.name, notes), here, level, (*path, one.name))


def _declaring(kind: type, name: str) -> type:
    """Return the class that declares a field: `kind` or one that it inherits from."""
    return next(one for one in kind.__mro__ if name in get_annotations(one))


def _entry(
    one: Field[Any], option: Option, hint: Any, offer: Offer, heading: str, path: tuple[str, ...]
) -> Entry:
    several = get_origin(hint) is tuple and option.kind is None
    inner = get_args(hint)[0] if several else hint
    fewer = offer.choices.get(one.name)
    return Entry(
        path,
        offer.flags.get(one.name) or option.flag or one.name.replace("_", "-"),
        replace(
            option, help=offer.help.get(one.name, option.help), unset=offer.unset.get(one.name, option.unset)
        ),
        choice_of(fewer) if fewer else kind_of(inner, option),
        offer.defaults.get(one.name, default_of(one)),
        several,
        inner is bool and option.kind is None,
        heading,
    )


def default_of(one: Field[Any]) -> Any:
    """MISSING where there is none."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The type without "or None", and what is annotated."""
    notes = hint.__metadata__ if get_origin(hint) is Annotated else ()
    bare = hint.__origin__ if notes else hint
    if get_origin(bare) in (Union, UnionType):
        some = [one for one in get_args(bare) if one is not NoneType]
        bare = some[0]
    return bare, notes


@cache
def _held(hint: Any) -> type | None:
    if not (isinstance(hint, type) and is_dataclass(hint)):
        return None
    return hint if any(True for _ in _entries(hint, ALL, "", "common", ())) else None


def kind_of(hint: Any, option: Option) -> Kind[Any]:
    if option.kind is not None:
        return option.kind
    if get_origin(hint) is Literal:
        return choice_of(get_args(hint))
    if hint is bool:
        return switch(option.words)
    if hint is Path:
        return Kind(option.metavar or "PATH", Path)
    if hint is int:
        return _bounded(int, option, "a whole number")
    if hint is float:
        return _bounded(float, option, "a number")
    return Kind(option.metavar or "TEXT", str)


def choice_of(choices: tuple[str, ...]) -> Kind[str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(map(repr, choices))}")
        return text

    return Kind("", read, str, choices)


def number_kind(
    metavar: str,
    cast: Callable[[str], Any],
    told: str,
    holds: Callable[[Any], bool],
    write: Callable[[Any], str] = str,
) -> Kind[Any]:
    """told: what a text is not that cannot be cast, or for whose number `holds` is false."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if holds(value := cast(text)):
                return value
        raise ValueError(f"{text!r} is {told}")

    return Kind(metavar, read, write)


def _bounded(cast: Callable[[str], Any], option: Option, told: str) -> Kind[Any]:
    least, most = option.least, option.most
    bound = "" if least is None else f" >= {least:g}"
    bound = bound if most is None else f" in {least or 0:g} .. {most:g}"

    def holds(value: float) -> bool:
        return (least is None or value >= least) and (most is None or value <= most)

    return number_kind(option.metavar or ("N" if cast is int else "X"), cast, f"not {told}{bound}", holds)


def switch(words: tuple[str, str]) -> Kind[bool]:
    """words: how off and on are written."""
    word = choice_of((words[1], words[0]))
    return Kind("", lambda text: word.read(text) == words[1], lambda value: words[value], word.choices)


def counted(more: int) -> Kind[int]:
    """A number > 0 whose value counts `more` than what is written.

    `counted(1)` is for a field that counts the root of a tree, where the flag does not: "23" <-> 24.
    """
    return Kind(
        POSITIVE.metavar, lambda text: POSITIVE.read(text) + more, lambda value: POSITIVE.write(value - more)
    )


def is_word(chosen: str, *others: str) -> Kind[bool]:
    """One of several words; the value is whether it is the first one. False is written as the second."""
    word = choice_of((*others, chosen))
    return Kind(
        "|".join(word.choices),
        lambda text: word.read(text) == chosen,
        lambda value: chosen if value else others[0],
    )


def in_words(entry: Entry, text: str) -> str:
    """Files and variables say true and 1, too, where a command line says on or yes."""
    off, on = entry.option.words
    return {"true": on, "1": on, "false": off, "0": off}.get(text, text) if entry.switch else text


def build(kind: type[T], values: Mapping[str, Any], offer: Offer = ALL) -> T:
    """A settings dataclass of what is given, by flag. Raises what its `__post_init__` raises."""
    entries = {entry.path: entry for entry in entries_of(kind, offer)}
    for entry in entries.values():
        if entry.option.fills and values.get(entry.flag) is not None:
            values = entry.option.fills(values[entry.flag], values)
    return cast("T", _build(kind, values, offer, entries, ()))


def _build(
    kind: type,
    values: Mapping[str, Any],
    offer: Offer,
    entries: Mapping[tuple[str, ...], Entry],
    path: tuple[str, ...],
) -> Any:
    made: dict[str, Any] = {}
    for one in fields(kind):
        here, (hint, notes) = (*path, one.name), _parts(hints_of(kind)[one.name])
        entry = entries.get(here)
        if entry is not None and values.get(entry.flag) is not None:
            made[one.name] = values[entry.flag]
        elif offer.defaults.get(one.name, MISSING) is not MISSING:
            made[one.name] = offer.defaults[one.name]
        elif entry is None and any(other[: len(here)] == here for other in entries):
            made[one.name] = _build(hint, values, offer.of(one.name, notes), entries, here)
    return kind(**made)


def arguments_of(settings: Any, offer: Offer = ALL) -> tuple[str, ...]:
    """A child's arguments: every option that has a value, as on a command line; of switches those that are
    not what they are by default.
    """
    words: list[str] = []
    for entry in entries_of(type(settings), offer):
        value: Any = settings
        for name in entry.path:
            value = getattr(value, name)
        if value is None or value == () or (value is False and entry.default is False):
            continue
        if entry.option.secret or entry.option.keyword_only:
            continue
        for one in cast("tuple[Any, ...]", value if entry.several else (value,)):
            words += (f"--{entry.flag}", entry.kind.write(one))
    return tuple(words)


def memory(text: str) -> int:
    """ "512M" -> bytes; K, M, G, T are powers of 1024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ValueError(f"{text!r} is no amount of memory; write 512M or 2G")
    return int(float(found[1]) * UNITS[found[2].upper()])


def written_memory(amount: int) -> str:
    unit = next(unit for unit, size in reversed(UNITS.items()) if amount % size == 0)
    return f"{amount // UNITS[unit]}{unit}"


def layer_numbers(text: str) -> tuple[int, ...]:
    """ "2,16,29" -> those layers; ascending."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise ValueError(f"{text!r} are no layers; write their numbers, such as 2,16,29")
    found = tuple(map(int, text.split(",")))
    if list(found) != sorted(set(found)):
        raise ValueError(f"{text!r} must be different layers in ascending order")
    return found


def list_kind(metavar: str, pattern: str, wrong: str, cast: Callable[[str], Any] = str) -> Kind[Any]:
    """Several values, separated by commas. wrong: what is said of others, with {} for them."""

    def read(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(re.fullmatch(pattern, part) for part in parts):
            raise ValueError(wrong.format(repr(text)))
        return tuple(map(cast, parts))

    return Kind(metavar, read, listed)


def listed(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values))


def number(value: float) -> str:
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


POSITIVE = number_kind("N", int, "not a whole number > 0", lambda value: value > 0)
SECONDS = number_kind("SECONDS", float, "no number of seconds", lambda value: 0 <= value < 1e9, number)
ABOVE_ZERO = number_kind("X", float, "not a number > 0", lambda value: 0 < value < math.inf, number)
MEMORY = Kind("BYTES", memory, written_memory)
LAYER_NUMBERS = Kind("LAYERS", layer_numbers, listed)
COUNTS = list_kind("N,N", r"0*[1-9]\d*", "must be numbers > 0, such as 1,2,4, got {}", int)
HOST_NAMES = list_kind("NAMES", r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})", "{} is no host's name")
ORIGINS = list_kind(
    "ORIGINS", r"\*|https?://[^\s/,*]+", "{} is no origin; write https://chat.example, or * for all"
)


class InactiveOption(UserWarning):
    """An option was given that has no effect under the other settings."""


def warn_inactive(why: str) -> None:
    """Warn in one line. Commands print the line once, see `specsot_app.cli`."""
    warnings.warn(why, InactiveOption, stacklevel=2)


def made_of(kind: type[T], keywords: Mapping[str, Any], offer: Offer = ALL) -> T:
    """A settings dataclass from Python keywords, by the names of flags with underscores.

    Text is read as on a command line. Raises InvalidRequest: no such option, or no such value.
    """
    entries = {entry.keyword: entry for entry in entries_of(kind, offer)}
    values: dict[str, Any] = {}
    for name, given in keywords.items():
        entry = entries.get(name)
        if entry is None:
            known = ", ".join(sorted(entries))
            raise InvalidRequest(f"no option is called {name!r}; known: {known}", field=name)
        if given is not None:
            values[entry.flag] = checked(entry, name, given)
    return build(kind, values, offer)


YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def truth(given: Any) -> bool:
    """True, "True", "yes", 1, as other systems' command lines say it. Raises ValueError."""
    said = str(given).lower()
    if said not in (*YES, *NO):
        raise ValueError(f"{given!r} is not True or False")
    return said in YES


def mode_of(parallel: Any) -> Literal["auto", "direct"]:
    """enable_parallel, as other systems say it."""
    return "auto" if truth(parallel) else "direct"


def same(value: T) -> T:
    """Another system's value, where it is ours."""
    return value


def checked(entry: Entry, name: str, given: Any) -> Any:
    """The value that a keyword means. Raises InvalidRequest."""
    if entry.kind.choices and not entry.switch and given not in entry.kind.choices:
        said = ", ".join(entry.kind.choices)
        raise InvalidRequest(f"{name} must be one of {said}, got {given!r}", field=name)
    if isinstance(given, (list, tuple)) and not entry.several:
        given = ",".join(map(str, given))
    if entry.option.kind is not None and isinstance(given, int | float):
        given = str(given)
    try:
        return entry.read(given)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from None
