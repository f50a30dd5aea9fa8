"""`specsot eval --router`: measures from which score the mode "auto" should plan, and stores it next to the
model.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from specsot.checkpoint.resolving import folder_of_model
from specsot.errors import InvalidRequest
from specsot.params import Ask, Message
from specsot_app.fleet.opening import FleetClient, Opener, final_view
from specsot_app.fleet.options import FleetOptions
from specsot_bench.core.tables import figure, markdown, text
from specsot_lab.eval.local_model import answer_each, open_local, read_rows
from specsot_master.core.plans.router import UNDECIDED, decide_question, score_of, scoring
from specsot_master.prompts import ROUTER_FILE, Prompts

# Fraction. So many of the prompts that ask for one answer may reach the threshold. Untuned.
MAX_FALSE_PLANS = 0.02
# Fraction. So many of the prompts that ask for several points must reach the threshold; for fewer, computing
# the score is not worth a step. Untuned.
MIN_FOUND = 0.1


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A labelled prompt with its score.

    category: Name of the prompt's category.
    planned: True if the prompt asks for several points, by its label.
    rule: True or False if a rule of the router decides to plan or not to plan. None if no rule applies.
    score: The model's score for planning. None if the model gave none.
    """

    category: str
    planned: bool
    rule: bool | None
    score: float | None

    def passes(self, threshold: float | None) -> bool:
        """Return True if the score is at least the threshold; False if there is no score or no threshold.

        threshold: The lowest score that is planned. None: the score plans nothing.
        """
        return threshold is not None and self.score is not None and self.score >= threshold

    def is_planned(self, threshold: float | None) -> bool:
        """Return True if the router plans this prompt: as the rule decides, or by the score if no rule
        applies.

        threshold: The lowest score that is planned. None: the score plans nothing.
        """
        return self.passes(threshold) if self.rule is None else self.rule


def auc(prompts: Sequence[ScoredPrompt]) -> float:
    """Return the probability that a prompt for several points scores higher than a prompt for one answer;
    ties count half. Return 0.5 if there are no scores of one of the two kinds.

    prompts: The scored prompts.

    Prompts without a score are left out.
    """
    direct_scores = sorted(_scores(prompts, planned=False))
    planned_scores = _scores(prompts, planned=True)
    if not direct_scores or not planned_scores:
        return 0.5
    num_below = [
        bisect_left(direct_scores, score) + sum(other == score for other in direct_scores) / 2
        for score in planned_scores
    ]
    return fmean(num_below) / len(direct_scores)


def threshold_of(prompts: Sequence[ScoredPrompt]) -> float | None:
    """Return the lowest threshold that at most MAX_FALSE_PLANS of the prompts for one answer reach. Return
    None if no threshold is useful: if it would find fewer than MIN_FOUND of the prompts for several points,
    or one of the two kinds has no scores.

    The threshold lies halfway between the lowest score that is planned and the next lower score, so that no
    measured score is on the edge.

    prompts: The scored prompts.

    The threshold is rounded to two decimal places, unless that would let the next lower score pass; then it
    is the lowest score that is planned.
    """
    direct_scores = sorted(_scores(prompts, planned=False), reverse=True)
    planned_scores = _scores(prompts, planned=True)
    allowed = int(MAX_FALSE_PLANS * len(direct_scores))
    if not planned_scores or allowed >= len(direct_scores):
        return None
    first_refused = direct_scores[allowed]
    scores_above = [score for score in (*direct_scores[:allowed], *planned_scores) if score > first_refused]
    if not scores_above:
        return None
    threshold = round((first_refused + min(scores_above)) / 2, 2)
    threshold = threshold if threshold > first_refused else min(scores_above)
    return threshold if fmean(score >= threshold for score in planned_scores) >= MIN_FOUND else None


def rows_of(prompts: Sequence[ScoredPrompt], threshold: float | None) -> list[dict[str, object]]:
    """Return a row for each category: the fractions of its prompts that are planned by the rules alone, by
    the score alone, and by the rules and then the score.

    prompts: The scored prompts.
    threshold: The lowest score that is planned. None: the score plans nothing.

    The order is that in which the categories first occur. "rules", "undecided", "score" and "router" are
    fractions, 0 to 1: of prompts that a rule plans, that no rule decides, that reach the threshold, and that
    are planned in the end.
    """
    rows: list[dict[str, object]] = []
    for name in dict.fromkeys(prompt.category for prompt in prompts):
        category_prompts = [prompt for prompt in prompts if prompt.category == name]
        rows.append(
            {
                "category": name,
                "prompts": len(category_prompts),
                "rules": fmean(prompt.rule is True for prompt in category_prompts),
                "undecided": fmean(prompt.rule is None for prompt in category_prompts),
                "score": fmean(prompt.passes(threshold) for prompt in category_prompts),
                "router": fmean(prompt.is_planned(threshold) for prompt in category_prompts),
            }
        )
    return rows


def _scores(prompts: Sequence[ScoredPrompt], planned: bool) -> list[float]:
    """Return the scores of the prompts with one label; prompts without a score are left out.

    prompts: The scored prompts.
    planned: The label: True for prompts that ask for several points.
    """
    return [prompt.score for prompt in prompts if prompt.planned is planned and prompt.score is not None]


# Columns of the table of scored prompts by category.
COLUMNS = (
    text("category", "category"),
    figure("n", "prompts", 0),
    figure("by rules", "rules"),
    figure("no rule", "undecided"),
    figure("by score", "score"),
    figure("planned", "router"),
)


async def evaluate(
    options: FleetOptions, prompts: Path | None, at_once: int, opener: Opener, out: TextIO, err: TextIO
) -> int:
    """Score all labelled prompts, write a table by category to the output and the threshold to router.json
    next to the model, and return the exit status 0.

    options: Options of the fleet.
    prompts: File of labelled prompts. None: the bundled ones.
    at_once: Number of prompts that are scored concurrently.
    opener: Opens the fleet.
    out: Gets the table.
    err: Gets a progress bar.
    Raises InvalidRequest if a running master is named, if the model was taught to plan and so needs no score,
    if the words of the score are not single tokens, or if the prompts cannot be read. Raises ModelError if
    the model cannot be read.

    The fleet is opened only after the prompts have been read, and is closed in every case. An existing
    router.json is replaced. If no threshold is useful, null is stored.
    """
    base, _, prompt_builder = open_local(
        options, "router", "the threshold is", "choose by itself, so it needs no score"
    )
    if not all(prompt_builder.score_words):
        raise InvalidRequest("the words of the score are not single tokens of this model", "router")

    async def scored_prompt(fleet: FleetClient, entry: tuple[str, bool, str]) -> ScoredPrompt:
        """Return one labelled prompt with its score and the decision of the rules.

        fleet: Client of the open fleet.
        entry: See `read_labelled`.
        """
        category, planned, question = entry
        score = await score_for(fleet, prompt_builder, question)
        decision = decide_question(question)
        rule = None if decision.reason == UNDECIDED else decision.mode == "sot"
        return ScoredPrompt(category, planned, rule, score)

    labelled = read_labelled(prompts)
    scored = await answer_each(options, opener, labelled, scored_prompt, at_once, ("scores", err))
    write_result(scored, folder_of_model(base) / ROUTER_FILE, out)
    return 0


def write_result(scored: Sequence[ScoredPrompt], file: Path, out: TextIO) -> None:
    """Write the table and its conclusion to the output, and store the threshold in a file.

    scored: All scored prompts.
    file: The file, router.json of the model.
    out: Gets the table.

    The threshold is null in the file, and the output says that the rules alone do better, if no threshold is
    useful. The file also has the number of prompts, the AUC, and the planned fraction of each category. An
    existing file is replaced.
    """
    threshold = threshold_of(scored)
    area = auc(scored)
    rows = rows_of(scored, threshold)
    measured_figures = {"prompts": len(scored), "auc": round(area, 3), "planned": {}}
    measured_figures["planned"] = {row["category"]: round(float(str(row["router"])), 3) for row in rows}
    file.write_text(json.dumps({"threshold": threshold, "measured": measured_figures}, indent=2) + "\n")
    out.write(f"{markdown(COLUMNS, rows)}\n\n")
    conclusion = (
        f"threshold {threshold}" if threshold is not None else "no threshold: the rules alone do better"
    )
    out.write(f"the score separates with an AUC of {area:.3f}; {conclusion}; written to {file}\n")


def read_labelled(file: Path | None) -> list[tuple[str, bool, str]]:
    """Return (category, True if it asks for several points, question) of each labelled prompt.

    file: JSON lines with "category", "planned" and "question". None: the bundled ones.
    Raises InvalidRequest if the file cannot be read.

    Blank lines are skipped. A single line that is not JSON, or lacks a field, raises the error for the whole
    file. Values of other types are converted.
    """

    def labelled(row: Any) -> tuple[str, bool, str]:
        """Return the fields of a row.

        row: One line of JSON.
        """
        return str(row["category"]), bool(row["planned"]), str(row["question"])

    return read_rows(file, "router.jsonl", labelled)[0]


async def score_for(fleet: FleetClient, prompt_builder: Prompts, question: str) -> float | None:
    """Return the score of a question, computed as the router computes it. Return None if the model gives
    none.

    fleet: Client of the open fleet.
    prompt_builder: Builds the prompts of the model.
    question: The words of the question.

    Raises SpecsotError if the fleet refuses the request.
    """
    prompt = prompt_builder.score((Message("user", question),))
    view = await final_view(fleet, scoring(Ask(tokens=prompt.tokens, mode="direct")))
    return score_of(view.logprobs[0], prompt) if view.logprobs else None
