"""What every test may ask for: the demo model, the reference folder, a quiet torch.

The one place that reads SPECSOT_REFERENCE.
"""

from __future__ import annotations

import gc
import importlib.abc
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import structlog
from hypothesis import settings

from tests import drawn, times, untraced

REPOSITORY = Path(__file__).resolve().parents[1]
REFERENCE = os.environ.get("SPECSOT_REFERENCE")
MARKERS = ("torch", "processes", "slow")  # left out by `--pure`
HEAVY = ("torch", "grpc", "transformers", "openai", "schemathesis")
SHOWN = 40  # slowest tests in the summary
# Changes constants for all tests, and raises AttributeError if one of them has got another name.
FOR_GOOD = pytest.MonkeyPatch()
YOUNG = 20_000, 5, 5  # objects, then rounds, between two looks of the garbage collector: half of its 3 %
NO_REFERENCE = "SPECSOT_REFERENCE names no folder of reference data"

# Modules that import one of those, and by which most files of tests do.
DOORS = (
    r"specsot\.transport\.grpc_\w+",
    r"specsot_master\.grpc_api",
    r"tests\.(?:endpoints\.front|http\.house|http\.test_\w+|rpc\.test_uplink)",
)

# What a file of tests says at its top that `--pure` leaves out: then it need not even be imported.
LEFT_OUT = re.compile(
    rf"^(?:(?:import|from) (?:{'|'.join((*HEAVY, *DOORS))})\b"
    rf"|pytestmark = \[?pytest\.mark\.(?:{'|'.join(MARKERS)})\b)",
    re.MULTILINE,
)

settings.register_profile("steady", deadline=None, derandomize=True)
settings.register_profile("usual", settings.get_profile("steady"), max_examples=25)  # 100 by `--full`
settings.register_profile("quick", settings.get_profile("steady"), max_examples=12)
settings.load_profile("steady")
if not Path("/dev/nvidiactl").exists():  # read when Triton is imported, by whomever
    os.environ.setdefault("TRITON_INTERPRET", "1")
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it would print comes as a status too
os.environ.setdefault("SPECSOT_DEMO", "small")  # nothing is fetched but by tests/app/test_smollm2.py
CACHES, NUMBERS = TemporaryDirectory(prefix="specsot-tests-"), count()
os.environ["XDG_CACHE_HOME"] = f"{CACHES.name}/all"  # of what outlives a test; see `own_cache`
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small matrices; also for the services that tests start
os.environ.setdefault("SPECSOT_KV_MEMORY", "128M")  # of those services: a GiB takes a while to be wiped


def seeds(many: int, quick: int) -> list[Any]:
    """0 ... many - 1 for `parametrize`; `--pure` has time for the first `quick` ones, and CI for a quarter,
    as for Hypothesis's examples. All others are left to `make test-all`.
    """
    kept = max(quick, many // 4)
    slow, full = pytest.mark.slow, pytest.mark.full
    marks = [[slow] * (seed >= quick) + [full] * (seed >= kept) for seed in range(many)]
    return [pytest.param(seed, marks=own) for seed, own in enumerate(marks)]


def some(values: Iterable[Any], *kept: int) -> list[Any]:
    """Values for `parametrize`: those at these places; all others are left to `make test-all`."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=[pytest.mark.full] * (n not in kept)) for n, row in enumerate(rows)]


class HeavyRefusal(importlib.abc.MetaPathFinder):
    """Skips whatever imports tensors or the network: a module at collection, a test while it runs."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in HEAVY:
            pytest.skip(f"needs {fullname}", allow_module_level=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pure", action="store_true", help="only what needs no tensors, network, processes")
    parser.addoption("--quick", action="store_true", help="with --pure: without the tests of tests/slow.txt")
    parser.addoption("--forks", type=int, default=0, help="processes that take file after file")
    parser.addoption("--full", action="store_true", help="the full grids too, which CI leaves out")
    parser.addoption(
        "--times", type=Path, help="longest files first; how long every test took goes into this file"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--pure"):
        sys.meta_path.insert(0, HeavyRefusal())
        settings.load_profile("quick")
    elif not config.getoption("--full"):
        settings.load_profile("usual")
    drawn.install(constants=config.getoption("--full"))
    untraced.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --pure, files of which nothing would be left."""
    if not config.getoption("--pure") or not collection_path.match("test_*.py"):
        return None
    return LEFT_OUT.search(collection_path.read_text(encoding="utf-8")) is not None or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What was imported stays: the garbage collector need not look at it, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*YOUNG)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What asks for reference data says so; --pure leaves out what needs tensors, processes or time."""
    for item in items:
        if "reference" in getattr(item, "fixturenames", ()):
            item.add_marker("reference")
    if config.getoption("--pure"):
        leave_out(config, items, markers=MARKERS)
    if config.getoption("--quick"):
        items[:], slow = times.without_slow(items)
        config.hook.pytest_deselected(items=slow)
    if not config.getoption("--full"):
        leave_out(config, items, markers=("full",))
    if config.getoption("--times"):
        items[:] = times.longest_files_first(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    forks, chosen = session.config.getoption("--forks"), session.config.option
    if not forks or chosen.collectonly or session.testsfailed:
        return None
    from tests import spread

    spread.run(session, forks)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_report_teststatus(config: pytest.Config) -> Generator[None, tuple[Any, ...], tuple[Any, ...]]:
    """With --pure only what fails is shown as it comes: two processes write to one screen."""
    category, letter, word = yield
    shown = not config.getoption("--pure") or category in ("failed", "error")
    return (category, letter if shown else "", word)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Generator[None]:
    """Before anything that failed: which tests took longest, with what they set up and took down."""
    path: Path | None = config.getoption("--times")
    if path is not None:
        spent = times.per_test(one for reports in terminalreporter.stats.values() for one in reports)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(times.written(spent))
        terminalreporter.section(f"slowest {SHOWN} tests; the others are in {path}")
        terminalreporter.write(times.written(spent[:SHOWN]))
    yield


def is_full() -> bool:
    """Whether all is asked for, by `--full`."""
    return settings.default is settings.get_profile("steady")


def examples(many: int) -> int:
    """How many examples a test of so many has: a quarter in CI, all by `make test-all`."""
    return many if is_full() else max(many // 4, 1)


def leave_out(config: pytest.Config, items: list[pytest.Item], markers: tuple[str, ...]) -> None:
    """Deselect items that carry one of the markers."""
    kept, gone = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        (gone if any(item.get_closest_marker(name) for name in markers) else kept).append(item)
    config.hook.pytest_deselected(items=gone)
    items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """One torch thread: the sums are then the same on every machine, and tests share cores well. Members of
    fleets that are processes of their own have torch by a fork.
    """
    if "fastapi" in sys.modules:
        from tests import adapters

        adapters.install()
    if (sandbox := sys.modules.get("specsot_master.engine.grammar_sandbox")) is not None:
        sandbox.compile_in_subprocess = cache(compile_here)  # type: ignore[attr-defined]
    if (text := sys.modules.get("specsot_master.text")) is not None:
        text._load_tokenizer = read_once(text._load_tokenizer)  # type: ignore[attr-defined]
    if "triton" in sys.modules:
        from tests import interpreted

        interpreted.install()
    if os.environ.get("TRITON_INTERPRET"):
        run_few_programs()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
        from tests import forked, measuring

        measuring.measure_little(FOR_GOOD.setattr)
        forked.install()


def run_few_programs() -> None:
    """Cut the work of kernels into few programs, because the interpreter runs them one after the other."""
    for name, constant, value in (
        ("gpu.attention", "MAX_MERGE_PROGRAMS", 8),
        ("gpu.lines", "MAX_MERGE_PROGRAMS", 8),
        ("gpu.attention", "SLOTS_MERGED_AT_ONCE", 2),  # Most rows of tests have one slot or two.
        ("attention_tables", "PROGRAMS", 16),
    ):
        if (module := sys.modules.get(f"specsot_kernels.{name}")) is not None:
            FOR_GOOD.setattr(module, constant, value)


def read_once(load: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Of a folder's tokenizer, for all masters, while its file is the same: 10 to 25 ms each."""
    found = cache(lambda folder, version: load(folder))

    def loaded(folder: Path) -> Any:
        path = folder / "tokenizer.json"
        if not path.is_file():
            return load(folder)
        now = path.stat()
        return found(folder, (now.st_ino, now.st_mtime_ns, now.st_size))

    return loaded


def compile_here(form: Any) -> str:
    """What the product does in a process of its own, half a second each: tests/master/test_trying.py."""
    from specsot.errors import InvalidRequest
    from specsot.grammar.sandbox import try_form

    try:
        try_form(form)
    except InvalidRequest as error:
        return str(error)
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where reference data is promised, a skipped reference case is a failure."""
    report = yield
    wanted = item.get_closest_marker("reference") and not item.get_closest_marker("gpu")
    if REFERENCE and wanted and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} needs reference data, which exists, and was skipped"
    return report


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of reference data; the test is skipped where there is none."""
    if not REFERENCE or not Path(REFERENCE).is_dir():
        pytest.skip(NO_REFERENCE)
    return Path(REFERENCE)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """models/demo: `base` and `eagle3` inside it."""
    return REPOSITORY / "models" / "demo"


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    """A configuration file with this in it."""

    def write(text: str) -> str:
        path = tmp_path / "fleet.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What forecasts learn in one test is not there in the next one."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{CACHES.name}/{os.getpid()}-{next(NUMBERS)}")


@pytest.fixture(autouse=True)
def plain_logs() -> Generator[None]:
    """What one test makes of the log, such as an embedded fleet that hushes it, is not the next one's."""
    yield
    structlog.reset_defaults()
