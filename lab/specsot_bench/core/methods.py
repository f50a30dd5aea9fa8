"""Defines the methods of writing that `specsot bench quick` and `full` compare, each a row of their tables.

Names, sizes and defaults are those of the benchmarks whose tables these continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from specsot.drafting import DEFAULT, DraftOptions
from specsot.params import DrafterName, Window
from specsot.service.option_table import COUNTS, Kind, Option, listed, option

HfMode = Literal["generate", "assisted"]

SINKS = 4
PLAIN = "plain"
FAMILIES = (
    *("plain", "transformers", "linear", "linear-window", "tree", "pruned", "window", "pruned-window"),
    *("eagle", "sot", "sot-eagle"),
)
DEPTH = 5
BREADTH = 2
THRESHOLD = 0.03


@dataclass(frozen=True, slots=True)
class Method:
    """One way of writing an answer.

    name: its name in the tables.
    drafter: what drafts.
    options: how it drafts.
    window: what tokens attend to; None: all tokens before them.
    planned: the answer is written as branches of a plan.
    rival: Transformers writes the answer, alone or assisted by the small model.
    lengthy: the method is measured at every length instead of the shortest alone.
    """

    name: str
    drafter: DrafterName = "none"
    options: DraftOptions = DEFAULT
    window: Window | None = None
    planned: bool = False
    rival: HfMode | None = None
    lengthy: bool = True

    @property
    def exact(self) -> bool:
        """Return whether the method must write the baseline's text (in fp32)."""
        return self.window is None and not self.planned

    @property
    def family(self) -> str:
        """Return the family, one of FAMILIES."""
        if self.rival:
            return "transformers"
        if self.planned:
            return "sot" if self.drafter == "none" else "sot-eagle"
        if self.drafter == "eagle":
            return "eagle"
        drafts = self.options.mode if self.drafter == "model" else None
        return "-".join(filter(None, (drafts, "window" if self.window else None))) or PLAIN

    @property
    def small(self) -> bool:
        """Return whether the method needs the small model."""
        return self.drafter == "model" or self.rival == "assisted"


@dataclass(frozen=True, slots=True)
class MethodTable:
    """What is measured.

    methods: the methods.
    lengths: numbers of tokens, ascending.
    rounds: how often each method answers, each time with another question.
    """

    methods: tuple[Method, ...]
    lengths: tuple[int, ...]
    rounds: int

    def lengths_of(self, method: Method) -> tuple[int, ...]:
        """Return the lengths at which a method is measured."""
        return self.lengths if method.lengthy else self.lengths[:1]


def read_families(written: str) -> tuple[str, ...]:
    """Return "linear,window" as families of methods. Raises ValueError."""
    names = tuple(part.strip() for part in written.split(","))
    if unknown := [name for name in names if name not in FAMILIES]:
        raise ValueError(f"no methods are called {unknown[0]!r}, only {', '.join(FAMILIES)}")
    return names


# Options that several tables share, each declared once.
SAMPLES = Option("Measured runs of each row.", flag="samples", aliases=("num-samples", "num-runs"), least=1)
LENGTH = Option("Tokens of each answer.", flag="max-new-tokens", least=1)
LENGTHS = Option("Tokens of the answers, such as 500,1000,2000.", flag="max-new-tokens", kind=COUNTS)
CHAINS = Option("K of the linear methods, such as 4,6.", flag="k", aliases=("k-value",), kind=COUNTS)
WINDOWS = Option(
    "Tokens that a windowed method attends to, such as 256,1024.",
    flag="windows",
    aliases=("max-cache-lens",),
    kind=COUNTS,
)


def shared(option: Option, flag: str, text: str) -> Option:
    """Return a shared option for a table that has always called it `flag`; its other names become aliases."""
    names = tuple(name for name in (option.flag, *option.aliases) if name and name != flag)
    return replace(option, help=text, flag=flag, aliases=names)


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What a table contains instead of its default rows; None keeps the default.

    rounds: runs of each method.
    lengths: numbers of tokens of the answers.
    chains: chain lengths K of the linear methods.
    windows: numbers of tokens that windowed methods attend to.
    families: families of FAMILIES; the baseline is always measured.
    """

    HEADING: ClassVar[str] = "Methods"

    rounds: int | None = option(
        None, shared(SAMPLES, "rounds", "Runs of each method, each with a different question.")
    )
    lengths: tuple[int, ...] | None = option(None, LENGTHS)
    chains: tuple[int, ...] | None = option(None, CHAINS)
    windows: tuple[int, ...] | None = option(None, WINDOWS)
    families: tuple[str, ...] | None = option(
        None,
        f"Methods besides plain decoding, of {', '.join(FAMILIES[1:])}.",
        flag="methods",
        kind=Kind("METHODS", read_families, listed),
    )


def linear(tokens: int, lengthy: bool = False, window: int | None = None) -> Method:
    """Return a method that always drafts a chain of so many tokens."""
    options = DraftOptions("linear", tokens, tuner="fixed", blend=False)
    name = f"linear K={tokens}"
    sight = None
    if window is not None:
        name = f"{name}, window {window}"
        sight = sight_of(window)
    return Method(name, "model", options, sight, lengthy=lengthy)


def tree(depth: int, breadth: int, nodes: int = 32, lengthy: bool = False) -> Method:
    """Return tree V1: every drafted node has `breadth` children, down to a depth or a number of nodes."""
    options = DraftOptions("tree", depth, breadth, nodes, tuner="fixed", blend=False)
    return Method(f"tree V1 D={depth} B={breadth}", "model", options, lengthy=lengthy)


def pruned(
    depth: int, breadth: int, threshold: float, lengthy: bool = False, window: int | None = None
) -> Method:
    """Return tree V2: nodes less likely than the threshold have no children."""
    options = DraftOptions("pruned", depth, breadth, 32, threshold, "fixed", blend=False)
    name = f"tree V2 D={depth} B={breadth} p={threshold:g}"
    sight = None
    if window is not None:
        name = f"{name}, window {window}"
        sight = sight_of(window)
    return Method(name, "model", options, sight, lengthy=lengthy)


def windowed(tokens: int) -> Method:
    """Return a method without drafts that attends to so many tokens."""
    return Method(f"window {tokens}", window=sight_of(tokens))


def sight_of(tokens: int) -> Window:
    """Return a window of so many tokens, sinks included."""
    return Window(SINKS, tokens - SINKS)


PLAINLY = Method(PLAIN)
HF_BASELINES = (
    Method("Transformers generate", rival="generate"),
    Method("Transformers assisted", rival="assisted"),
)
HEAD = (Method("EAGLE", "eagle"), Method("SoT", planned=True), Method("SoT + EAGLE", "eagle", planned=True))
EVERY_TREE = Method("EAGLE, every tree", "eagle", DraftOptions(tuner="fixed", blend=False), lengthy=False)


def quick(options: TableOptions = TableOptions()) -> MethodTable:
    """Return the table of a run of minutes on two cores."""
    middle = (
        linear(4, lengthy=True),
        linear(8, lengthy=True),
        tree(DEPTH, BREADTH, lengthy=True),
        pruned(DEPTH, BREADTH, THRESHOLD, lengthy=True),
        windowed(256),
        pruned(DEPTH, BREADTH, THRESHOLD, lengthy=True, window=256),
    )
    return _asked(MethodTable((PLAINLY, *HF_BASELINES, *middle, *HEAD), (200, 400), 2), options)


def full(options: TableOptions = TableOptions()) -> MethodTable:
    """Return the table of all methods."""
    methods = (PLAINLY, *HF_BASELINES, *_middle(), *HEAD, EVERY_TREE)
    return _asked(MethodTable(methods, (500, 1000, 2000), 2), options)


def _middle() -> Iterator[Method]:
    """Yield the drafting and window methods; each family's usual member is measured at every length."""
    yield from (linear(tokens, lengthy=tokens == DEPTH) for tokens in range(4, 9))
    yield from (tree(DEPTH, BREADTH, lengthy=True), tree(4, 3), tree(6, BREADTH))
    yield pruned(DEPTH, BREADTH, THRESHOLD, lengthy=True)
    yield from (pruned(DEPTH, BREADTH, 0.1), pruned(6, BREADTH, 0.02), pruned(4, 3, THRESHOLD))
    yield from (windowed(tokens) for tokens in (256, 512, 1024))
    yield pruned(DEPTH, BREADTH, THRESHOLD, lengthy=True, window=512)
    yield from (linear(DEPTH, window=tokens) for tokens in (256, 1024))


def _asked(usual: MethodTable, options: TableOptions) -> MethodTable:
    """Return the table with the lengths, chains, windows and families that were asked for.

    Methods that were asked for are measured at every length. Chains with windows are every K with every
    window.
    """
    methods = usual.methods
    chains = options.chains
    windows = options.windows
    if chains:
        methods = _instead(methods, "linear", (linear(tokens, True) for tokens in chains))
    if windows:
        methods = _instead(methods, "window", map(windowed, windows))
        usual_tree = (pruned(DEPTH, BREADTH, THRESHOLD, True, tokens) for tokens in windows)
        methods = _instead(methods, "pruned-window", usual_tree)
    if windows or (chains and "linear-window" in (options.families or ())):
        behind = windows or tuple(_window_of(one) for one in usual.methods if one.family == "window")
        both = (linear(tokens, True, window) for tokens in chains or (DEPTH,) for window in behind)
        methods = _instead(methods, "linear-window", both)
    if options.families:
        methods = tuple(one for one in methods if one.family in (PLAIN, *options.families))
    lengths = tuple(sorted(set(options.lengths or usual.lengths)))
    return MethodTable(methods, lengths, options.rounds or usual.rounds)


def _instead(methods: Sequence[Method], family: str, others: Iterable[Method]) -> tuple[Method, ...]:
    """Return the methods with other members of a family, in the families' order."""
    kept = [one for one in methods if one.family != family]
    return tuple(sorted([*kept, *others], key=lambda one: FAMILIES.index(one.family)))


def _window_of(method: Method) -> int:
    """Return the tokens that a windowed method attends to."""
    assert method.window is not None
    return method.window.sinks + method.window.recent
