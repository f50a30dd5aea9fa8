"""Defines the methods of writing that `specsot bench quick` and `full` compare, each a row of their tables.

Names, sizes and defaults are those of the benchmarks whose tables these continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from specsot.drafting import DraftOptions
from specsot.params import DrafterName, Window
from specsot.service.option_table import Kind, Option, list_kind, listed, option

# The options of a drafter if none are given.
DEFAULT = DraftOptions()
# Whole numbers > 0, such as 1,2,4.
COUNTS = list_kind("N,N", r"0*[1-9]\d*", "must be numbers > 0, such as 1,2,4, got {}", int)
# How Transformers writes: alone, or assisted by a small model.
HfMode = Literal["generate", "assisted"]

# Tokens. Number of first tokens that every window keeps. Precedent: the benchmarks that are continued.
SINKS = 4
# Name and family of the baseline, which decodes without drafts, window or plan.
PLAIN = "plain"
FAMILIES = (
    *("plain", "transformers", "linear", "linear-window", "tree", "pruned", "window", "pruned-window"),
    *("eagle", "sot", "sot-eagle"),
)
# Levels of a usual tree, and tokens of a usual chain. Precedent: the benchmarks that are continued.
DEPTH = 5
# Children of a node of a usual tree. Precedent: the benchmarks that are continued.
BREADTH = 2
# Probability below which a node of a usual pruned tree has no children. Precedent: the benchmarks that
# are continued.
THRESHOLD = 0.03


@dataclass(frozen=True, slots=True)
class Method:
    """One way of writing an answer.

    name: Name of the method in the tables.
    drafter: Kind of drafter that the method uses.
    options: Options of drafting.
    window: Window of positions that tokens attend to; None: all positions before them.
    planned: True if the answer is written as branches of a plan.
    rival: How Transformers writes the answer: alone ("generate") or assisted by the small model ("assisted");
        None: SpecSoT writes it.
    lengthy: True if the method is measured at every length, False if at the shortest alone.
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
        """Return whether the method must write the baseline's text (in fp32): it neither has a window nor
        plans.
        """
        return self.window is None and not self.planned

    @property
    def family(self) -> str:
        """Return the family, one of FAMILIES: by whether Transformers writes, then by plan, drafter and
        window; PLAIN without any of these.

        A method with the small model is named by its draft mode ("linear", "tree", "pruned"), with "-window"
        if it has a window; "window" alone is a method without drafts.
        """
        if self.rival:
            return "transformers"
        if self.planned:
            return "sot" if self.drafter == "none" else "sot-eagle"
        if self.drafter == "eagle":
            return "eagle"
        draft_mode = self.options.mode if self.drafter == "model" else None
        return "-".join(filter(None, (draft_mode, "window" if self.window else None))) or PLAIN

    @property
    def small(self) -> bool:
        """Return whether the method needs the small model: to draft, or to assist Transformers."""
        return self.drafter == "model" or self.rival == "assisted"


@dataclass(frozen=True, slots=True)
class MethodTable:
    """What is measured.

    methods: The methods.
    lengths: Numbers of tokens of the answers, ascending.
    rounds: Number of answers of each method at each length, each to another question.
    """

    methods: tuple[Method, ...]
    lengths: tuple[int, ...]
    rounds: int

    def lengths_of(self, method: Method) -> tuple[int, ...]:
        """Return the numbers of tokens at which a method is measured: all, or the shortest alone.

        A method whose `lengthy` is False is measured at the shortest length alone.

        method: A method of the table.
        """
        return self.lengths if method.lengthy else self.lengths[:1]


def read_families(families: str) -> tuple[str, ...]:
    """Return the families of methods in a text: "linear,window" -> ("linear", "window").

    White space around a name is ignored. The error names the first unknown name.

    families: Names separated by commas.
    Raises ValueError for a name that is not in FAMILIES.
    """
    names = tuple(part.strip() for part in families.split(","))
    if unknown := [name for name in names if name not in FAMILIES]:
        raise ValueError(f"unknown methods {unknown[0]!r}; known: {', '.join(FAMILIES)}")
    return names


# Options that several tables share, each declared once.
SAMPLES = Option(
    "Measured runs of each row.", flag="samples", aliases=("num-samples", "num-runs"), min_value=1
)
# Length of all answers.
LENGTH = Option("Tokens of each answer.", flag="max-new-tokens", min_value=1)
# Lengths of the answers, one or several.
LENGTHS = Option("Tokens of the answers, such as 500,1000,2000.", flag="max-new-tokens", kind=COUNTS)
# Chain lengths of the linear methods.
CHAINS = Option("K of the linear methods, such as 4,6.", flag="k", aliases=("k-value",), kind=COUNTS)
# Windows of the windowed methods.
WINDOWS = Option(
    "Tokens that a windowed method attends to, such as 256,1024.",
    flag="windows",
    aliases=("max-cache-lens",),
    kind=COUNTS,
)


def shared(option: Option, flag: str, help_text: str) -> Option:
    """Return a shared option for a table that has always called it `flag`; its other names become aliases.

    option: The option, declared once for several tables.
    flag: Name of the flag without dashes.
    help_text: Help text of the option in this table.
    """
    names = tuple(name for name in (option.flag, *option.aliases) if name and name != flag)
    return replace(option, help=help_text, flag=flag, aliases=names)


@dataclass(frozen=True, slots=True)
class TableOptions:
    """What a table contains instead of its default rows; None keeps the default.

    rounds: Runs of each method.
    lengths: Numbers of tokens of the answers.
    chains: Chain lengths K of the linear methods.
    windows: Numbers of tokens that windowed methods attend to.
    families: Families of FAMILIES; the baseline is always measured.
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
    """Return a method that always drafts a chain of so many tokens.

    The method's name is "linear K=4", with ", window 256" if there is a window.

    tokens: K, the drafted tokens of a step.
    lengthy: True: the method is measured at every length.
    window: Number of tokens that are attended to; None: all.
    """
    options = DraftOptions("linear", tokens, tuner="fixed", blend=False)
    name = f"linear K={tokens}"
    attention = None
    if window is not None:
        name = f"{name}, window {window}"
        attention = window_of(window)
    return Method(name, "model", options, attention, lengthy=lengthy)


def tree(depth: int, breadth: int, nodes: int = 32, lengthy: bool = False) -> Method:
    """Return tree V1: every drafted node has `breadth` children, down to a depth or a number of nodes.

    depth: Number of levels of a tree.
    breadth: Number of children of a node.
    nodes: Maximum number of nodes of a tree.
    lengthy: True: the method is measured at every length.
    """
    options = DraftOptions("tree", depth, breadth, nodes, tuner="fixed", blend=False)
    return Method(f"tree V1 D={depth} B={breadth}", "model", options, lengthy=lengthy)


def pruned(
    depth: int, breadth: int, threshold: float, lengthy: bool = False, window: int | None = None
) -> Method:
    """Return tree V2: nodes less likely than the threshold have no children.

    A tree has at most 32 nodes. The method's name is "tree V2 D=5 B=2 p=0.03", with ", window 256" if there
    is a window.

    depth: Number of levels of a tree.
    breadth: Number of children of a node.
    threshold: Probability below which a node gets no children.
    lengthy: True: the method is measured at every length.
    window: Number of tokens that are attended to; None: all.
    """
    options = DraftOptions("pruned", depth, breadth, 32, threshold, "fixed", blend=False)
    name = f"tree V2 D={depth} B={breadth} p={threshold:g}"
    attention = None
    if window is not None:
        name = f"{name}, window {window}"
        attention = window_of(window)
    return Method(name, "model", options, attention, lengthy=lengthy)


def windowed(tokens: int) -> Method:
    """Return a method without drafts that attends to a window.

    tokens: Number of tokens in the window, sinks included.
    """
    return Method(f"window {tokens}", window=window_of(tokens))


def window_of(tokens: int) -> Window:
    """Return a window that keeps SINKS sinks and recent tokens.

    tokens: Number of tokens in the window, sinks included; more than SINKS.
    """
    return Window(SINKS, tokens - SINKS)


# The baseline.
PLAINLY = Method(PLAIN)
# Methods that Transformers runs.
HF_BASELINES = (
    Method("Transformers generate", rival="generate"),
    Method("Transformers assisted", rival="assisted"),
)
# Methods that use the EAGLE head, a plan, or both.
HEAD = (Method("EAGLE", "eagle"), Method("SoT", planned=True), Method("SoT + EAGLE", "eagle", planned=True))
# The EAGLE head with the largest tree in every step.
EVERY_TREE = Method("EAGLE, every tree", "eagle", DraftOptions(tuner="fixed", blend=False), lengthy=False)


def quick(options: TableOptions = TableOptions()) -> MethodTable:
    """Return the table of a run of minutes on two cores.

    By default there are 2 rounds of 200 and 400 tokens.

    options: Options that replace the default rows.
    """
    drafting_methods = (
        linear(4, lengthy=True),
        linear(8, lengthy=True),
        tree(DEPTH, BREADTH, lengthy=True),
        pruned(DEPTH, BREADTH, THRESHOLD, lengthy=True),
        windowed(256),
        pruned(DEPTH, BREADTH, THRESHOLD, lengthy=True, window=256),
    )
    return _with_options(
        MethodTable((PLAINLY, *HF_BASELINES, *drafting_methods, *HEAD), (200, 400), 2), options
    )


def full(options: TableOptions = TableOptions()) -> MethodTable:
    """Return the table of all methods.

    By default there are 2 rounds of 500, 1000 and 2000 tokens.

    options: Options that replace the default rows.
    """
    methods = (PLAINLY, *HF_BASELINES, *_drafting_methods(), *HEAD, EVERY_TREE)
    return _with_options(MethodTable(methods, (500, 1000, 2000), 2), options)


def _drafting_methods() -> Iterator[Method]:
    """Yield the drafting and window methods; each family's usual member is measured at every length.

    These are chains of 4 to 8 tokens, three trees V1, four trees V2, three windows, a tree V2 with a window,
    and two chains with a window.
    """
    yield from (linear(tokens, lengthy=tokens == DEPTH) for tokens in range(4, 9))
    yield from (tree(DEPTH, BREADTH, lengthy=True), tree(4, 3), tree(6, BREADTH))
    yield pruned(DEPTH, BREADTH, THRESHOLD, lengthy=True)
    yield from (pruned(DEPTH, BREADTH, 0.1), pruned(6, BREADTH, 0.02), pruned(4, 3, THRESHOLD))
    yield from (windowed(tokens) for tokens in (256, 512, 1024))
    yield pruned(DEPTH, BREADTH, THRESHOLD, lengthy=True, window=512)
    yield from (linear(DEPTH, window=tokens) for tokens in (256, 1024))


def _with_options(default_table: MethodTable, options: TableOptions) -> MethodTable:
    """Return the table with the lengths, chains, windows and families that were asked for.

    Methods that were asked for are measured at every length. Chains with windows are every K with every
    window.

    Without an option, the default rows stay. `windows` replaces the windows, the pruned trees with a window
    and the chains with a window; `chains` replaces the chains, and also the chains with a window if that
    family is asked for. Families filter the rows last, and the baseline always stays. Lengths are sorted,
    and duplicates dropped.

    default_table: The table without options.
    options: Options that replace the default rows.
    """
    methods = default_table.methods
    chains = options.chains
    windows = options.windows
    if chains:
        methods = _with_family(methods, "linear", (linear(tokens, True) for tokens in chains))
    if windows:
        methods = _with_family(methods, "window", map(windowed, windows))
        pruned_windows = (pruned(DEPTH, BREADTH, THRESHOLD, True, tokens) for tokens in windows)
        methods = _with_family(methods, "pruned-window", pruned_windows)
    if windows or (chains and "linear-window" in (options.families or ())):
        window_sizes = windows or tuple(
            _window_of(method) for method in default_table.methods if method.family == "window"
        )
        combined = (linear(tokens, True, window) for tokens in chains or (DEPTH,) for window in window_sizes)
        methods = _with_family(methods, "linear-window", combined)
    if options.families:
        methods = tuple(method for method in methods if method.family in (PLAIN, *options.families))
    lengths = tuple(sorted(set(options.lengths or default_table.lengths)))
    return MethodTable(methods, lengths, options.rounds or default_table.rounds)


def _with_family(
    methods: Sequence[Method], family: str, replacements: Iterable[Method]
) -> tuple[Method, ...]:
    """Return the methods with other members of a family, in the families' order.

    Methods of the same family keep their order.

    methods: Methods of the table.
    family: Name of the family that is replaced.
    replacements: The family's new methods.
    """
    remaining = [method for method in methods if method.family != family]
    return tuple(sorted([*remaining, *replacements], key=lambda method: FAMILIES.index(method.family)))


def _window_of(method: Method) -> int:
    """Return the number of tokens that a windowed method attends to, sinks included.

    method: A method that has a window.
    """
    assert method.window is not None
    return method.window.sinks + method.window.recent
