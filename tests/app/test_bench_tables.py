"""`specsot bench quick` and `full`: what is counted, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsot.core.frames import PromptChunk, TreeSegment
from specsot.core.tree import Tree
from specsot.errors import InvalidRequest
from specsot.params import Window
from specsot_app.fleet.options import FleetOptions
from specsot_bench.commands.bench import OutputOptions
from specsot_bench.core.aggregate import (
    Perplexities,
    Recording,
    Runs,
    StepSample,
    baseline_of,
    committed_by,
    evicted_by,
    name_of,
    perplexity,
    row_of,
    runs_of,
    skipped,
    unwritten,
)
from specsot_bench.core.method_page import ADVICE, columns_of, latex_of, page_of, recommend
from specsot_bench.core.methods import (
    FAMILIES,
    HEAD,
    HF_BASELINES,
    PLAINLY,
    Method,
    MethodTable,
    TableOptions,
    full,
    linear,
    quick,
    window_of,
    windowed,
)
from specsot_bench.core.tables import escape, markdown, pipes

pytestmark = pytest.mark.timeout(120)


def answer(*steps: tuple[float, int], proposed: int | None = None, planned: bool = False) -> Recording:
    """Behind so many seconds so many tokens; four drafts a step, two of them accepted, where some were."""
    moments = [
        StepSample(
            seconds,
            tokens,
            tokens - 1,
            step,
            proposed and 4 * step,
            proposed and 2 * step,
            1 << 20,
            step,
            64 * step,
        )
        for step, (seconds, tokens) in enumerate(steps)
    ]
    text = tuple(range(steps[-1][1]))
    return Recording(tuple(moments), text, steps[-1][0] + 0.5, planned, (9, 9))


PLAIN = answer((0.5, 1), (1.0, 2), (1.5, 3), (2.0, 4))
DRAFTED = answer((0.5, 1), (1.0, 4), proposed=4)


def test_a_length_is_read_off_a_longer_answer() -> None:
    one = PLAIN.up_to(3)
    assert (one.tokens, one.seconds, one.first, one.token_ids) == (3, 1.5, 0.5, (0, 1, 2))
    assert one.rate == 2
    assert one.per_token == 0.5
    assert one.per_step == 1, "the first token came with the prompt, not with a step"
    over = DRAFTED.up_to(3)
    assert over.tokens == 4, "a step that goes beyond counts with all it brought"
    assert over.per_step == 3


def test_a_planned_answer_counts_its_own_tokens_over_the_whole_time() -> None:
    planned = answer((0.5, 1), (1.0, 6), planned=True)
    one = Recording(planned.samples, (1, 2, 3), 3.0, planned=True).up_to(2)
    assert (one.tokens, one.seconds, one.first) == (3, 3.0, 0.5)


def test_a_row_has_every_figure() -> None:
    method = linear(4)
    plain = Runs(PLAINLY, 4, (PLAIN.up_to(4),) * 2)
    runs = Runs(method, 4, (DRAFTED.up_to(4), answer((0.5, 1), (2.0, 4), proposed=4).up_to(4)))
    row = row_of(runs, plain, Perplexities(2.0, 3.5))
    assert row["name"] == "linear K=4, 4 tokens"
    assert row["tokens_per_second"] == 3.0
    assert row["tokens_per_second_sd"] == 1.41
    assert (row["speedup"], row["speedup_range"]) == (1.5, [1.0, 2.0]), "each against its own round"
    assert (row["ttft_ms"], row["tpot_ms"]) == (500.0, 333.333)
    assert row["accept_percent"] == 50.0
    assert row["tokens_per_round"] == 3.0
    assert (row["memory_mib"], row["evictions"], row["evicted_tokens"]) == (1.0, 1, 64)
    assert (row["as_plain"], row["runs"]) == (2, 2)


def test_a_value_that_was_not_reported_is_left_empty() -> None:
    row = row_of(
        Runs(HF_BASELINES[0], 4, (PLAIN.up_to(4),)), Runs(PLAINLY, 4, (PLAIN.up_to(4),)), Perplexities()
    )
    assert row["accept_percent"] is None
    assert row["tokens_per_second_sd"] is None
    assert row["ppl"] is None


def test_perplexity_is_over_tokens_not_over_sequences() -> None:
    assert perplexity([[0.0], [0.6931471805599453] * 3]) == pytest.approx(2**0.75)
    assert perplexity([]) is None


def test_runs_come_by_length_and_plans_are_asked_for_each() -> None:
    sot, short = HEAD[1], linear(4)
    course = MethodTable((PLAINLY, short, sot), (2, 4), 1)
    answers = {("plain", 4): [PLAIN], (short.name, 2): [DRAFTED], ("SoT", 2): [PLAIN], ("SoT", 4): [DRAFTED]}
    found = runs_of(answers, course)
    assert [one.name for one in found] == [
        "plain, 2 tokens", "linear K=4, 2 tokens", "SoT, 2 tokens", "plain, 4 tokens", "SoT, 4 tokens"
    ]  # fmt: skip
    assert baseline_of(found, 2).excerpts[0].tokens == 2


def test_the_tables_have_what_the_seeds_had() -> None:
    names = [method.name for method in full().methods]
    assert len(set(names)) == len(names)
    chains = [method.name for method in full().methods if method.family == "linear"]
    assert chains == [f"linear K={k}" for k in range(4, 9)]
    assert {"linear K=5, window 256", "linear K=5, window 1024"} <= set(names)
    for wanted in ("plain", "Transformers generate", "Transformers assisted", "EAGLE", "SoT", "SoT + EAGLE",
                   "window 256", "window 512", "window 1024"):  # fmt: skip
        assert wanted in names
    assert full().lengths == (500, 1000, 2000)
    assert {method.name for method in quick().methods if method.window} == {
        "window 256", "tree V2 D=5 B=2 p=0.03, window 256"
    }  # fmt: skip
    assert all(method.options.tuner == "fixed" for method in full().methods if method.drafter == "model")
    assert window_of(256).recent == 252


def test_lengths_chains_windows_and_families_are_as_asked() -> None:
    asked = TableOptions(3, (2000, 500), (5, 6), (256, 1024), ("linear-window", "window"))
    table = full(asked)
    assert (table.lengths, table.rounds) == ((500, 2000), 3)
    assert [method.name for method in table.methods] == [
        "plain",
        *(f"linear K={k}, window {window}" for k in (5, 6) for window in (256, 1024)),
        *("window 256", "window 1024"),
    ]
    assert all(table.lengths_of(method) == (500, 2000) for method in table.methods)


def test_chains_after_windows_need_no_windows_of_their_own() -> None:
    table = quick(TableOptions(chains=(3,), families=("linear-window",)))
    assert [method.name for method in table.methods] == ["plain", "linear K=3, window 256"]


def test_nothing_asked_for_is_the_usual_table_and_every_method_has_a_family() -> None:
    assert all(method.family in FAMILIES for method in full().methods)
    everything = quick(TableOptions(families=FAMILIES))
    assert everything.methods == quick().methods


def test_a_reason_spans_the_last_columns_after_all_names() -> None:
    shown = pipes(
        ("a", "what", "x", "y"), [["one", "two", "1", "2"], ["three", "four", "none", ""]], num_text_columns=2
    )
    assert shown.splitlines() == [
        "| a     | what | x | y |",
        "|-------|------|--:|--:|",
        "| one   | two  | 1 | 2 |",
        "| three | four | none | |",
    ]


def table_row(method: Method, **figures: object) -> dict[str, object]:
    figures = {"tokens_per_second": 10.0, "tokens_per_second_sd": 1.0,
               "speedup": 1.0, "speedup_range": [1.0, 1.0],
               "ttft_ms": 10.0, "tpot_ms": 5.0, "ppl": 2.0, "ppl_reference": None, "accept_percent": None,
               "tokens_per_round": 1.0, "memory_mib": 4.0, "evictions": 0.0, "evicted_tokens": 0.0,
               "as_plain": 2, "runs": 2} | figures  # fmt: skip
    exact = method.exact and method.rival is None
    name = {"name": name_of(method, 4), "method": method.name, "tokens": 4, "rival": bool(method.rival)}
    return name | {"exact": exact} | figures


ROWS = [
    table_row(PLAINLY),
    table_row(HF_BASELINES[0], speedup=0.5, tokens_per_second=5.0, memory_mib=0.1, ttft_ms=1.0),
    table_row(
        linear(4), speedup=1.5, tokens_per_second=15.0, memory_mib=9.0, ttft_ms=10.4, accept_percent=40.0
    ),
    table_row(windowed(256), speedup=0.9, tokens_per_second=9.0, memory_mib=2.0, ttft_ms=12.0),
    table_row(HEAD[1], speedup=2.0, tokens_per_second=20.0, memory_mib=8.0, ttft_ms=30.0),
    skipped(HF_BASELINES[1], 4, "needs --small-model"),
]


def test_advice_is_read_off_the_rows() -> None:
    said = {(one["goal"], one["text"]): one["method"] for one in recommend(ROWS)}
    assert said == {
        ("throughput", "any text"): "SoT",
        ("throughput", "plain's text"): "linear K=4",
        ("latency", "any text"): "linear K=4",
        ("latency", "plain's text"): "linear K=4",
        ("memory", "any text"): "window 256",
        ("memory", "plain's text"): "plain",
    }, "a rival is no setting of ours; of those nearly as good the fastest"
    slower = [row | {"tokens_per_second": 1.0} if row["method"] == "SoT" else row for row in ROWS]
    assert recommend(slower)[0]["method"] == "linear K=4"


def test_a_row_is_left_out_once() -> None:
    sot, long = HEAD[1], linear(4, lengthy=True)
    course = MethodTable((PLAINLY, long, sot), (2, 4, 8), 1)
    broken = {(long.name, 4): "cannot write: died", (sot.name, 2): "cannot write: too"}
    found = unwritten(course, broken, {name_of(long, 8), name_of(sot, 8)})
    assert [(row["name"], row["skipped"]) for row in found] == [
        ("linear K=4, 2 tokens", "cannot write: died"),
        ("linear K=4, 4 tokens", "cannot write: died"),
        ("SoT, 2 tokens", "cannot write: too"),
    ]


def test_where_figures_go_is_known_before_they_are_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "run.md", tmp_path / "run.tex"):
        with pytest.raises(InvalidRequest, match="cannot be the JSON file"):
            _ = OutputOptions(wrong).place
    with pytest.raises(FileExistsError):
        _ = OutputOptions(tmp_path / "file" / "run.json").place
    assert OutputOptions(tmp_path / "new" / "run.json").place == tmp_path / "new" / "run.json"


@pytest.mark.torch
def test_a_reference_text_of_fewer_than_two_tokens_is_refused() -> None:
    from specsot_bench.perplexity import Scores
    from specsot_bench.rounds import models_of

    with pytest.raises(InvalidRequest, match="fewer than two tokens"):
        Scores(models_of(FleetOptions(), None), "")


def test_tables_as_markdown_and_latex() -> None:
    page = page_of("a title", "said", ROWS, recommend(ROWS))
    lines = [line for line in page.splitlines() if line.startswith("| linear K=4")]
    assert lines[0].split("|")[2].strip() == "15.0 ± 1.0"
    assert lines[0].split("|")[3].strip() == "1.50 (1.00 .. 1.00)"
    assert "not measured: needs --small-model" in page
    table = [line for line in page.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table[: len(ROWS) + 2]}) == 1, "every row has all columns"
    assert "| throughput |" in markdown(ADVICE, recommend(ROWS)).replace("   ", " ").replace("  ", " ")
    written = latex_of("50 % & more", ROWS)
    assert r"\caption{50 \% \& more: 4 tokens}" in written
    assert r"15.0 $\pm$ 1.0" in written
    assert written.count(r"\\") == len(ROWS) + 1
    assert f"\\multicolumn{{{len(columns_of(ROWS)) - 1}}}" in written
    assert escape("a_b#{c}") == r"a\_b\#\{c\}"


def test_a_model_that_is_named_needs_no_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specsot_app.fleet import demo

    monkeypatch.chdir(tmp_path)
    assert demo.is_small(demo.small_pair() / "base"), "found beside the source"
    monkeypatch.setattr(demo, "PLACES", (tmp_path,))
    assert not demo.is_small(tmp_path)


def test_a_token_that_leaves_the_window_is_counted_at_once() -> None:
    """Not when its page of 256 rows is free, which a window of 64 tokens never makes it."""
    window = Window(4, 60)
    chunk = PromptChunk(1, 60, tuple(range(10)), True)
    tree = TreeSegment(1, 1, 100, (0,), Tree((5,), (0,)))
    assert [evicted_by(window, committed_by(one)) for one in (chunk, tree)] == [6, 36]
    assert evicted_by(window, 64) == evicted_by(None, 10_000) == 0


def test_a_page_has_no_column_for_a_reference_text_that_was_not_scored() -> None:
    told = {"ppl_reference": None}, {"ppl_reference": 3.5}
    assert ["PPL text" in {column.heading for column in columns_of([one])} for one in told] == [False, True]
    assert "PPL text" in {column.heading for column in columns_of(told)}
