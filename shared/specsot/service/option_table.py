"""Describes a field of a settings dataclass once: flag, help, kind of value, bounds, default, other names.

    kv_memory: int | None = option(None, "Memory for KV pages.", kind=MEMORY)

This field defines the flag --kv-memory, the variable SPECSOT_KV_MEMORY, the key kv-memory of a file, a Python
keyword, an argument of a child process, and a line of --help and of the reference. If a field's type is
itself a settings dataclass, that dataclass's options are included."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from inspect import get_annotations
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Final,
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
# Packages that know other systems' names of options provide a mapping {(class, field): OtherNames} here.
OTHER_NAMES_GROUP: Final = "specsot.option_names"
Tier = Literal["common", "expert"]

# Bytes of each unit of memory.
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of option values: how text becomes a value, and a value text.

    metavar: the placeholder in --help. Empty if `choices` are shown instead.
    read: returns the value of a text, or raises ValueError, which says what is wrong.
    write: returns the text of a value.
    choices: the possible texts, if they can be listed; otherwise empty.
    """

    metavar: str
    read: Callable[[str], T]
    write: Callable[[T], str] = str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Option:
    """The description of one option: a field of a settings dataclass.

    help: one or two sentences for --help.
    flag: name of the flag, without dashes in front. None: the field's name with dashes for underscores.
    aliases: flags of other systems, such as vLLM, with the same meaning.
    former: earlier names of the flag. They keep their meaning, as flags, as keys of a file and as variables.
    tier: "common" options are shown by `--help`, "expert" ones by `--help=all`. None: the tier of the class
        that declares the field (its TIER), else that of the field which holds the class, else "common".
    kind: how text becomes a value. None: the field's type determines it.
    metavar: the placeholder in --help. None: that of the kind.
    min_value: the smallest possible number. None: no lower bound.
    max_value: the largest possible number. None: no upper bound.
    unset: what applies if no value is given and the default is None, for --help. None: nothing is shown.
    words: how "off" and "on" are written if a switch takes a value.
    paired: True if a switch also has the flag `--no-x`.
    keywords: names of the option in other systems' Python calls, each with a function that converts their
        value. These names are also flags of commands, which --help does not show (docs/migrating.md does).
    fills: a function of the option's value and of all given values, by flag. Returns the given values with
        additional ones that this option implies. None: the option implies none.
    positional: True for an argument without a flag.
    secret: True if the value comes only from the environment, because all users of a machine can read command
        lines, and files are copied.
    keyword_only: True if the option exists only in Python calls.
    """

    help: str
    flag: str | None = None
    aliases: tuple[str, ...] = ()
    former: tuple[str, ...] = ()
    tier: Tier | None = None
    kind: Kind[Any] | None = None
    metavar: str | None = None
    min_value: float | None = None
    max_value: float | None = None
    unset: str | None = None
    words: tuple[str, str] = ("off", "on")
    paired: bool = False
    keywords: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Callable[[Any], Any]])
    fills: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]] | None = None
    positional: bool = False
    secret: bool = False
    keyword_only: bool = False


def option(default: T, description: Option | str, **option_fields: Any) -> T:
    """Return the dataclass field of an option with a default.

    default: the default.
    description: the option, or its help text.
    option_fields: further fields of the `Option`, which replace those of `description`.

    A field without a default is annotated with its `Option` instead.

    If the option is secret, its value is left out of the dataclass's `repr`.
    """
    described = (
        replace(description, **option_fields)
        if isinstance(description, Option)
        else Option(description, **option_fields)
    )
    return field(default=default, repr=not described.secret, metadata={"option": described})


@dataclass(frozen=True, slots=True)
class OtherNames:
    """The names that other systems give to one option.

    flags: flags of other systems, such as vLLM, with the same meaning and the same values.
    keywords: names of the option in other systems' Python calls, each with a function that returns this
        project's value for their value.
    """

    flags: tuple[str, ...] = ()
    keywords: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict[str, Callable[[Any], Any]])


@cache
def other_names() -> Mapping[tuple[str, str], OtherNames]:
    """Return the names that installed packages give to options, by (name of the settings class, field).

    Returns an empty mapping if no installed package provides names. If several packages name one option, the
    last package by the name of its entry point wins.
    """
    points = sorted(entry_points(group=OTHER_NAMES_GROUP), key=lambda point: point.name)
    return {key: names for point in points for key, names in point.load().items()}


@dataclass(frozen=True, slots=True)
class Offer:
    """A selection of a settings dataclass's options: which of them a program offers, and how they differ.
    Keys are names of fields.

    only: the offered fields. Empty: all.
    without: fields that are not offered.
    defaults: other defaults, by field.
    unset: other descriptions of what applies without a value, by field.
    flags: other flags, by field.
    help: other help texts, by field.
    choices: fewer choices, by field.
    inner: what is offered of the nested dataclass in a field.
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
        """Return whether a field is offered.

        name: name of the field.
        """
        return name not in self.without and (not self.only or name in self.only)

    def of(self, name: str, annotations: tuple[Any, ...]) -> Offer:
        """Return the offer of the nested dataclass in a field: from `inner`, else from the field's
        annotation, else `ALL`.

        name: name of the field.
        annotations: the annotations of the field's type.
        """
        annotated = next((annotation for annotation in annotations if isinstance(annotation, Offer)), ALL)
        return self.inner.get(name, annotated)


# The offer of all options, unchanged.
ALL = Offer()


@dataclass(frozen=True, slots=True)
class Entry:
    """One option of a program: an `Option` with its flag, kind and default as the program offers it.

    path: the attribute names that lead from the settings to the option's value.
    flag: name of the flag, without dashes in front.
    option: the option's description.
    kind: how text becomes a value.
    default: the default, or MISSING if the option is required.
    several: True if the option may be given more than once.
    switch: True if the value is a bool.
    heading: the group in which --help shows the option.
    tier: "common" or "expert".
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
        """Name of the field."""
        return self.path[-1]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the flag, without dashes in front: the present one first, then aliases and former
        ones.
        """
        return (self.flag, *self.option.aliases, *self.option.former)

    @property
    def keyword(self) -> str:
        """Name of the option in Python calls."""
        return self.name if len(self.path) == 1 else self.flag.replace("-", "_")

    @property
    def required(self) -> bool:
        """True if the option has no default."""
        return self.default is MISSING

    def read(self, value: Any) -> Any:
        """Return the value of a text; other objects are returned unchanged.

        value: the text of the option's value. If `several`, a sequence of texts, or a single text for one
            value.

        Raises ValueError, which says what is wrong, for an invalid text.

        A value among several that is no text is returned unchanged too; several values are returned as a
        tuple.
        """
        if self.several:
            listed = (value,) if isinstance(value, str) else tuple(value)
            return tuple(self.kind.read(one) if isinstance(one, str) else one for one in listed)
        return self.kind.read(value) if isinstance(value, str) else value

    def write(self, value: Any) -> str:
        """Return a value as text; several values are joined by commas.

        value: the option's value.
        """
        return ",".join(map(self.kind.write, value)) if self.several else self.kind.write(value)


@cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields by name, with their annotations. The result is cached.

    kind: the dataclass.
    """
    return get_type_hints(kind, include_extras=True)


def entries_of(kind: type, offer: Offer = ALL, heading: str = "Options") -> tuple[Entry, ...]:
    """Return the options of a settings dataclass and of its nested ones, in the order of the fields. Empty if
    no field has an option.

    kind: the dataclass.
    offer: which options are offered, and how they differ.
    heading: the group of options whose class names none (HEADING).
    """
    return tuple(_entries(kind, offer, heading, "common", ()))


def _entries(kind: type, offer: Offer, heading: str, tier: Tier, path: tuple[str, ...]) -> Iterator[Entry]:
    """Yield the options of a dataclass and of its nested ones, in the order of the fields.

    kind: the dataclass.
    offer: which options are offered, and how they differ.
    heading: the group of options whose class names none.
    tier: the tier of options whose class and description name none.
    path: the attribute names that lead from the settings to this dataclass.

    Fields that are not offered are left out, and so are fields that have no description and are no settings
    dataclass. A description in the field's metadata has precedence over one in its type.
    """
    for each in fields(kind):
        if not offer.offers(each.name):
            continue
        hint, annotations = _parts(hints_of(kind)[each.name])
        candidates = (each.metadata.get("option"), *annotations)
        found = next((candidate for candidate in candidates if isinstance(candidate, Option)), None)
        nested = _settings_class(hint)
        owner = _declaring(kind, each.name)
        group = owner.__dict__.get("HEADING", heading)
        level = owner.__dict__.get("TIER", tier)
        if found is not None:
            named = _with_other_names(found, owner.__name__, each.name)
            yield replace(
                _entry(each, named, hint, offer, group, (*path, each.name)), tier=found.tier or level
            )
        elif nested is not None:
            yield from _entries(nested, offer.of(each.name, annotations), group, level, (*path, each.name))


def _with_other_names(option: Option, owner: str, name: str) -> Option:
    """Return the option with the names that other systems give to it added to its aliases and keywords.
    Return the option unchanged if no other system's names are installed for it.

    option: the field's description.
    owner: name of the settings class that declares the field.
    name: name of the field.
    """
    found = other_names().get((owner, name))
    if found is None:
        return option
    return replace(
        option, aliases=(*option.aliases, *found.flags), keywords={**option.keywords, **found.keywords}
    )


def _declaring(kind: type, name: str) -> type:
    """Return the class that declares a field: `kind` or one that it inherits from.

    kind: the dataclass.
    name: name of the field, which one of the classes declares.
    """
    return next(one for one in kind.__mro__ if name in get_annotations(one))


def _entry(
    each: Field[Any], option: Option, hint: Any, offer: Offer, heading: str, path: tuple[str, ...]
) -> Entry:
    """Return the entry of one field.

    each: the dataclass field.
    option: the field's description.
    hint: the type of the field, without "or None".
    offer: how the option differs in this program.
    heading: the group in which --help shows the option.
    path: the attribute names that lead from the settings to the option's value.

    What `offer` gives for the field has precedence over the description: choices, flag, help, default, and
    the text shown if there is no value. A field whose type is a tuple may be given several times, unless the
    description has a kind of its own; a bool without a kind of its own is a switch.
    """
    several = get_origin(hint) is tuple and option.kind is None
    inner = get_args(hint)[0] if several else hint
    choices = offer.choices.get(each.name)
    return Entry(
        path,
        offer.flags.get(each.name) or option.flag or each.name.replace("_", "-"),
        replace(
            option,
            help=offer.help.get(each.name, option.help),
            unset=offer.unset.get(each.name, option.unset),
        ),
        choice_of(choices) if choices else kind_of(inner, option),
        offer.defaults.get(each.name, default_of(each)),
        several,
        inner is bool and option.kind is None,
        heading,
    )


def default_of(dataclass_field: Field[Any]) -> Any:
    """Return the default of a dataclass field, or MISSING if it has none.

    dataclass_field: the field, of `dataclasses.fields`.
    """
    return (
        dataclass_field.default
        if dataclass_field.default_factory is MISSING
        else dataclass_field.default_factory()
    )


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a field's type without "or None", and the annotations of `Annotated`.

    hint: the type as `hints_of` returns it.

    Without `Annotated`, the annotations are (). Of a union, only the first type that is not None is returned.
    """
    annotations = hint.__metadata__ if get_origin(hint) is Annotated else ()
    bare = hint.__origin__ if annotations else hint
    if get_origin(bare) in (Union, UnionType):
        types = [each for each in get_args(bare) if each is not NoneType]
        bare = types[0]
    return bare, annotations


@cache
def _settings_class(hint: Any) -> type | None:
    """Return a field's type if it is a settings dataclass, otherwise None. The result is cached.

    hint: the type of the field, without "or None".

    A settings dataclass has at least one option, its own or of a nested dataclass.
    """
    if not (isinstance(hint, type) and is_dataclass(hint)):
        return None
    return hint if any(True for _ in _entries(hint, ALL, "", "common", ())) else None


def kind_of(hint: Any, option: Option) -> Kind[Any]:
    """Return how text becomes a value: the option's own kind, else the kind of the field's type.

    hint: the type of the field, without "or None".
    option: the field's description, which bounds numbers and names the words of a switch.

    Without a kind of its own: the choices of a Literal, the two words of a switch for bool, a path, a bounded
    whole number for int, a bounded number for float, and unchanged text for every other type.
    """
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
    """Return the kind of an option with a fixed set of texts.

    choices: the possible texts.

    Reading any other text raises ValueError, which lists the choices. `--help` shows the choices in the place
    of a placeholder.
    """

    def read(text: str) -> str:
        """Return the text if it is one of the choices. Raises ValueError otherwise.

        text: the text.
        """
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(map(repr, choices))}")
        return text

    return Kind("", read, str, choices)


def number_kind(
    metavar: str,
    cast: Callable[[str], Any],
    complaint: str,
    holds: Callable[[Any], bool],
    write: Callable[[Any], str] = str,
) -> Kind[Any]:
    """Return the kind of a number.

    metavar: the placeholder in --help.
    cast: converts a text; may raise ValueError.
    complaint: the end of the error message `'...' is ...` if a text cannot be converted or `holds` is false.
    holds: returns whether a number is allowed.
    write: returns the text of a number.

    Reading raises ValueError for an invalid text; `write` is not checked.
    """

    def read(text: str) -> Any:
        """Return the number of a text. Raises ValueError if it cannot be converted or is not allowed.

        text: the text.
        """
        with suppress(ValueError):
            if holds(value := cast(text)):
                return value
        raise ValueError(f"{text!r} is {complaint}")

    return Kind(metavar, read, write)


def _bounded(cast: Callable[[str], Any], option: Option, type_name: str) -> Kind[Any]:
    """Return the kind of a number within the option's `min_value` and `max_value`.

    cast: converts a text, int or float.
    option: the field's description.
    type_name: what the number is, for the error message, such as "a whole number".

    Without `least` and `most`, every number is allowed. The placeholder is that of the option, else "N" for
    int and "X" for float. The error message names the bounds.
    """
    min_value, max_value = option.min_value, option.max_value
    bound = "" if min_value is None else f" >= {min_value:g}"
    bound = bound if max_value is None else f" in {min_value or 0:g} .. {max_value:g}"

    def holds(value: float) -> bool:
        """Return whether a number is within the bounds, which are allowed themselves.

        value: the number.
        """
        return (min_value is None or value >= min_value) and (max_value is None or value <= max_value)

    return number_kind(
        option.metavar or ("N" if cast is int else "X"), cast, f"not {type_name}{bound}", holds
    )


def switch(words: tuple[str, str]) -> Kind[bool]:
    """Return the kind of a switch.

    words: how off and on are written.

    Reading any other text raises ValueError.
    """
    word = choice_of((words[1], words[0]))
    return Kind("", lambda text: word.read(text) == words[1], lambda value: words[value], word.choices)


def counted(offset: int) -> Kind[int]:
    """Return the kind of a number > 0 whose value is `offset` larger than the number in the text.

    `counted(1)` is for a field that counts the root of a tree, where the flag does not: "23" <-> 24.

    offset: what is added to the number in the text.
    """
    return Kind(
        POSITIVE.metavar,
        lambda text: POSITIVE.read(text) + offset,
        lambda value: POSITIVE.write(value - offset),
    )


def is_word(chosen: str, *others: str) -> Kind[bool]:
    """Return the kind of a bool that is written as a word: `chosen` is True, any of `others` is False.

    False is written as the first of `others`.

    chosen: the word for True.
    others: the words for False; at least one.

    Reading any other text raises ValueError.
    """
    word = choice_of((*others, chosen))
    return Kind(
        "|".join(word.choices),
        lambda text: word.read(text) == chosen,
        lambda value: chosen if value else others[0],
    )


def in_words(entry: Entry, text: str) -> str:
    """Return a switch's text from a file or a variable as on a command line: "true" or "1" becomes "on".

    entry: the option.
    text: the text of its value; unchanged if the option is no switch, or if the text is another one.
    """
    off, on = entry.option.words
    return {"true": on, "1": on, "false": off, "0": off}.get(text, text) if entry.switch else text


def build(kind: type[T], values: Mapping[str, Any], offer: Offer = ALL) -> T:
    """Return a settings dataclass with the given values. Fields without a value have their defaults.

    kind: the dataclass.
    values: the values by flag. None counts as not given. Flags that are not offered are ignored.
    offer: which options are offered, and how they differ.

    Raises what the `__post_init__` of a dataclass raises.

    A value that implies further values adds those before the dataclass is built. A missing value of a
    required field raises TypeError.
    """
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
    """Return one dataclass, and build nested ones of which any option is offered.

    kind: the dataclass.
    values: the values by flag.
    offer: how the options differ in this program.
    entries: the offered options of all dataclasses, by path.
    path: the attribute names that lead from the settings to this dataclass.

    A field's value is the given one, else the default of the offer, else the nested dataclass built in the
    same way, if any of its options is offered, else the default of the field. Raises TypeError if a required
    field has no value, and what the `__post_init__` of a dataclass raises.
    """
    arguments: dict[str, Any] = {}
    for each in fields(kind):
        field_path, (hint, annotations) = (*path, each.name), _parts(hints_of(kind)[each.name])
        entry = entries.get(field_path)
        if entry is not None and values.get(entry.flag) is not None:
            arguments[each.name] = values[entry.flag]
        elif offer.defaults.get(each.name, MISSING) is not MISSING:
            arguments[each.name] = offer.defaults[each.name]
        elif entry is None and any(other[: len(field_path)] == field_path for other in entries):
            arguments[each.name] = _build(hint, values, offer.of(each.name, annotations), entries, field_path)
    return kind(**arguments)


def arguments_of(settings: Any, offer: Offer = ALL) -> tuple[str, ...]:
    """Return settings as command line arguments, for a child process.

    Options without a value, secrets, options of Python calls only, and switches that are off by default and
    off are left out.

    settings: a settings dataclass.
    offer: which options the child process offers, and how they differ there.

    Each value is preceded by its flag, and a repeatable option has its flag before each value. The values are
    not compared with the defaults, except for switches.
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
    """Return the bytes of an amount such as "512M"; K, M, G, T are powers of 1024, with or without "B" or
    "iB" after them, in any case; without a unit, the number is bytes. Fractions such as "1.5G" are allowed,
    and the result is rounded down.

    text: a number > 0 with an optional unit. Raises ValueError for anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no amount of memory; write 512M or 2G")
    return int(float(match[1]) * UNITS[match[2].upper()])


def written_memory(amount: int) -> str:
    """Return a number of bytes as `memory` reads it, in the largest unit that divides it: 2**30 becomes "1G".

    amount: number of bytes.

    An amount that no larger unit divides has no unit.
    """
    unit = next(unit for unit, size in reversed(UNITS.items()) if amount % size == 0)
    return f"{amount // UNITS[unit]}{unit}"


def layer_numbers(text: str) -> tuple[int, ...]:
    """Return the layer numbers of a text such as "2,16,29". Raises ValueError if the text is not numbers of
    at most six digits that are separated by commas, without spaces, or if the numbers do not ascend or one
    repeats.

    text: numbers separated by commas.
    """
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise ValueError(f"{text!r} are no layers; write their numbers, such as 2,16,29")
    found = tuple(map(int, text.split(",")))
    if list(found) != sorted(set(found)):
        raise ValueError(f"{text!r} must be different layers in ascending order")
    return found


def list_kind(metavar: str, pattern: str, complaint: str, cast: Callable[[str], Any] = str) -> Kind[Any]:
    """Return the kind of a list of values separated by commas.

    metavar: the placeholder in --help.
    pattern: regular expression that each value must match.
    complaint: the error message for other texts, with {} in the place of the text.
    cast: converts each value.

    Spaces around a value are dropped. A value that does not match the pattern, such as an empty one, gives
    ValueError with the complaint.
    """

    def read(text: str) -> tuple[Any, ...]:
        """Return the values of a text. Raises ValueError if one of them does not match the pattern.

        text: values separated by commas, with or without spaces.
        """
        parts = [part.strip() for part in text.split(",")]
        if not all(re.fullmatch(pattern, part) for part in parts):
            raise ValueError(complaint.format(repr(text)))
        return tuple(map(cast, parts))

    return Kind(metavar, read, listed)


def listed(values: tuple[Any, ...]) -> str:
    """Return values as text, joined by commas.

    values: the values.
    """
    return ",".join(map(str, values))


def number(value: float) -> str:
    """Return a number as text: as few digits as give the same number again.

    value: the number.
    """
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


# A whole number > 0.
POSITIVE = number_kind("N", int, "not a whole number > 0", lambda value: value > 0)
# A number of seconds >= 0.
SECONDS = number_kind("SECONDS", float, "no number of seconds", lambda value: 0 <= value < 1e9, number)
# A finite number > 0.
ABOVE_ZERO = number_kind("X", float, "not a number > 0", lambda value: 0 < value < math.inf, number)
# An amount of memory in bytes, such as 512M.
MEMORY = Kind("BYTES", memory, written_memory)
# Ascending layer numbers, such as 2,16,29.
LAYER_NUMBERS = Kind("LAYERS", layer_numbers, listed)
# Host names, separated by commas.
HOST_NAMES = list_kind("NAMES", r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})", "{} is not a host name")
# Origins of web pages, or * for all, separated by commas.
ORIGINS = list_kind(
    "ORIGINS", r"\*|https?://[^\s/,*]+", "{} is no origin; write https://chat.example, or * for all"
)


class InactiveOption(UserWarning):
    """A warning that an option was given that has no effect under the other settings."""


def warn_inactive(reason: str) -> None:
    """Warn in one line that an option has no effect. Commands print the line once, see `specsot_app.cli`.

    reason: the line, which names the option and why it has no effect.
    """
    warnings.warn(reason, InactiveOption, stacklevel=2)


def made_of(kind: type[T], keywords: Mapping[str, Any], offer: Offer = ALL) -> T:
    """Return a settings dataclass from Python keywords, which are flags with underscores.

    Texts are read as on a command line.

    kind: the dataclass.
    keywords: the values by keyword. None counts as not given.
    offer: which options are offered, and how they differ.

    Raises InvalidRequest for an unknown option or an invalid value.

    InvalidRequest names the keyword in its `field`. Raises what the `__post_init__` of a dataclass raises.
    """
    entries = {entry.keyword: entry for entry in entries_of(kind, offer)}
    values: dict[str, Any] = {}
    for name, given in keywords.items():
        entry = entries.get(name)
        if entry is None:
            known_names = ", ".join(sorted(entries))
            raise InvalidRequest(f"no option is called {name!r}; known: {known_names}", field=name)
        if given is not None:
            values[entry.flag] = checked(entry, name, given)
    return build(kind, values, offer)


# Words that other systems use for True and for False, in lower case.
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def truth(value: Any) -> bool:
    """Return True for true, yes, on and 1, and False for false, no, off and 0, as text in any case, as a bool
    or as a number, as other systems accept them.

    value: the value in another system's call. Raises ValueError for any other value.
    """
    word = str(value).lower()
    if word not in (*YES, *NO):
        raise ValueError(f"{value!r} is not True or False")
    return word in YES


def same(value: T) -> T:
    """Return another system's value unchanged, because it has the same meaning.

    value: the value in another system's call.
    """
    return value


def checked(entry: Entry, name: str, value: Any) -> Any:
    """Return the value of a Python keyword.

    entry: the option.
    name: the keyword.
    value: a text, which is read as on a command line, or another object.

    Raises InvalidRequest, which names the keyword, for an invalid value.

    A list or tuple for an option that is not repeatable is read as its elements joined by commas. A number
    for an option with a kind of its own is read as its text. Any other object that is no text is returned
    unchanged, except that an option with choices accepts only these.
    """
    if entry.kind.choices and not entry.switch and value not in entry.kind.choices:
        choices = ", ".join(entry.kind.choices)
        raise InvalidRequest(f"{name} must be one of {choices}, got {value!r}", field=name)
    if isinstance(value, (list, tuple)) and not entry.several:
        value = ",".join(map(str, value))
    if entry.option.kind is not None and isinstance(value, int | float):
        value = str(value)
    try:
        return entry.read(value)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", field=name) from None
