"""`specsot eval --router`: measures from which score on mode auto plans, and keeps that beside the model."""

from __future__ import annotations

import asyncio
import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import TextIO

from specsot.checkpoint.resolving import folder_of_model
from specsot.errors import InvalidRequest
from specsot.params import Ask, Message
from specsot_app.fleet.opening import FleetClient, Opener, final_view
from specsot_app.fleet.options import FleetOptions, models_of
from specsot_app.terminal.show import counting_bar
from specsot_bench.core.tables import figure, markdown, text
from specsot_master.core.plans.router import UNDECIDED, decide_question, score_of, scoring
from specsot_master.prompts import ROUTER_FILE, Prompts
from specsot_master.text import Text

# Fraction of the prompts for one answer that may score as high as the threshold. Untuned.
FALSE_PLANS = 0.02  # share of the prompts for one answer that may score as high as the threshold
# Fraction of the prompts for several points that must score so high; fewer are not worth a step. Untuned.
LEAST_FOUND = 0.1  # share of the prompts for several points that must; fewer are not worth a step


@dataclass(frozen=True, slots=True)
class Scored:
    """A labelled prompt.

    category: its name. planned: whether it asks for several points. rule: what the router's rules say; None
        where none holds. score: the model's; None if the model gave none.
    """

    category: str
    planned: bool
    rule: bool | None
    score: float | None

    def passes(self, threshold: float | None) -> bool:
        """Return whether the score is at least the threshold; False without a score or a threshold."""
        return threshold is not None and self.score is not None and self.score >= threshold

    def decided(self, threshold: float | None) -> bool:
        """Return whether the router plans this prompt: by the rules, then by the score."""
        return self.passes(threshold) if self.rule is None else self.rule


def auc(prompts: Sequence[Scored]) -> float:
    """Return the probability that a prompt for several points scores higher than one for one answer; ties
    count half. 0.5 if either kind is missing.
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


def threshold_of(prompts: Sequence[Scored]) -> float | None:
    """Return the lowest threshold that at most FALSE_PLANS of the prompts for one answer reach; None if it
    would find fewer than LEAST_FOUND of the others.

    It lies halfway to the next prompt below, so that what was measured is not on the edge.
    """
    direct_scores = sorted(_scores(prompts, planned=False), reverse=True)
    planned_scores = _scores(prompts, planned=True)
    allowed = int(FALSE_PLANS * len(direct_scores))
    if not planned_scores or allowed >= len(direct_scores):
        return None
    first_refused = direct_scores[allowed]
    scores_above = [score for score in (*direct_scores[:allowed], *planned_scores) if score > first_refused]
    if not scores_above:
        return None
    threshold = round((first_refused + min(scores_above)) / 2, 2)
    threshold = threshold if threshold > first_refused else min(scores_above)
    return threshold if fmean(score >= threshold for score in planned_scores) >= LEAST_FOUND else None


def rows_of(prompts: Sequence[Scored], threshold: float | None) -> list[dict[str, object]]:
    """Return by category the fraction of prompts that is planned by the rules alone, by the score alone, and
    by both in turn.

    prompts: scored. threshold: None plans nothing by the score.
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
                "router": fmean(prompt.decided(threshold) for prompt in category_prompts),
            }
        )
    return rows


def _scores(prompts: Sequence[Scored], planned: bool) -> list[float]:
    """Return the scores of the prompts with this label that have one."""
    return [prompt.score for prompt in prompts if prompt.planned is planned and prompt.score is not None]


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
    """Score all labelled prompts, write a table by category and router.json, and return the exit status 0.

    options: of the fleet. prompts: file of labelled prompts; None: the bundled ones. at_once: prompts scored
        at a time. opener: opens the fleet. out: gets the table. err: shows a bar.
    Raises InvalidRequest for a model that needs no score, ModelError.
    """
    if options.master is not None:
        raise InvalidRequest("the threshold is kept beside a model here, so there is no --master", "router")
    base = models_of(options).base
    asker = Prompts(base, Text(base))
    if not asker.listed:
        raise InvalidRequest(f"{base} was taught to choose by itself, so no score is asked", "router")
    if not all(asker.score_words):
        raise InvalidRequest("the words of the score are no single tokens of this model", "router")
    labelled = read_labelled(prompts)
    fleet = await opener(options)
    slots = asyncio.Semaphore(at_once)
    with counting_bar(err, "scores", len(labelled)) as advance:

        async def measured(category: str, planned: bool, question: str) -> Scored:
            """Return one prompt with its score and what the rules say."""
            async with slots:
                score = await score_for(fleet, asker, question)
            advance()
            decision = decide_question(question)
            rule = None if decision.reason == UNDECIDED else decision.mode == "sot"
            return Scored(category, planned, rule, score)

        try:
            scored = await asyncio.gather(*(measured(*entry) for entry in labelled))
        finally:
            await fleet.close()
    write_result(scored, folder_of_model(base) / ROUTER_FILE, out)
    return 0


def write_result(scored: Sequence[Scored], file: Path, out: TextIO) -> None:
    """Write the table and what it comes to, and store the threshold in a file.

    scored: all prompts. file: router.json. out: gets the table.
    """
    threshold = threshold_of(scored)
    area = auc(scored)
    rows = rows_of(scored, threshold)
    measured = {"prompts": len(scored), "auc": round(area, 3), "planned": {}}
    measured["planned"] = {row["category"]: round(float(str(row["router"])), 3) for row in rows}
    file.write_text(json.dumps({"threshold": threshold, "measured": measured}, indent=2) + "\n")
    out.write(f"{markdown(COLUMNS, rows)}\n\n")
    worth = f"threshold {threshold}" if threshold is not None else "no threshold: the rules alone do better"
    out.write(f"the score separates with an AUC of {area:.3f}; {worth}; written to {file}\n")


def read_labelled(file: Path | None) -> list[tuple[str, bool, str]]:
    """Return (category, whether it asks for several points, question) of each labelled prompt.

    file: JSON lines; None: the bundled ones. Raises InvalidRequest for an unreadable file.
    """
    source = file or resources.files("specsot_lab.eval") / "data" / "router.jsonl"
    try:
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line]
        return [(str(row["category"]), bool(row["planned"]), str(row["question"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{source}: {type(error).__name__}: {error}", "prompts") from None


async def score_for(fleet: FleetClient, asker: Prompts, question: str) -> float | None:
    """Return the score of a question, asked for as the router does; None if the model gives none.

    fleet: the client. asker: builds prompts. question: plain text.
    """
    prompt = asker.score((Message("user", question),))
    view = await final_view(fleet, scoring(Ask(tokens=prompt.tokens, mode="direct")))
    return score_of(view.logprobs[0], prompt) if view.logprobs else None
