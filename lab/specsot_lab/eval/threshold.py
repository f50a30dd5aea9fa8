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

FALSE_PLANS = 0.02  # share of the prompts for one answer that may score as high as the threshold
LEAST_FOUND = 0.1  # share of the prompts for several points that must; fewer are not worth a step


@dataclass(frozen=True, slots=True)
class Scored:
    """A labelled prompt. planned: whether it asks for several points. rule: what the rules say, None where
    none holds. score: None where the model gave none."""

    category: str
    planned: bool
    rule: bool | None
    score: float | None

    def passes(self, threshold: float | None) -> bool:
        return threshold is not None and self.score is not None and self.score >= threshold

    def decided(self, threshold: float | None) -> bool:
        """As the router does it: by the rules, then by the score."""
        return self.passes(threshold) if self.rule is None else self.rule


def auc(prompts: Sequence[Scored]) -> float:
    """The chance that a prompt for several points scores higher than one for one answer; ties count half."""
    low = sorted(_scores(prompts, planned=False))
    high = _scores(prompts, planned=True)
    if not low or not high:
        return 0.5
    below = [bisect_left(low, score) + sum(one == score for one in low) / 2 for score in high]
    return fmean(below) / len(low)


def threshold_of(prompts: Sequence[Scored]) -> float | None:
    """The lowest that lets through so few prompts for one answer; halfway to the next prompt below, so that
    what was measured stands off from it. None: it would find too few of the others.
    """
    low = sorted(_scores(prompts, planned=False), reverse=True)
    high = _scores(prompts, planned=True)
    allowed = int(FALSE_PLANS * len(low))
    if not high or allowed >= len(low):
        return None
    first_refused = low[allowed]
    above = [score for score in (*low[:allowed], *high) if score > first_refused]
    if not above:
        return None
    threshold = round((first_refused + min(above)) / 2, 2)
    threshold = threshold if threshold > first_refused else min(above)
    return threshold if fmean(score >= threshold for score in high) >= LEAST_FOUND else None


def rows_of(prompts: Sequence[Scored], threshold: float | None) -> list[dict[str, object]]:
    """By category: the share that is planned by the rules alone, by the score alone, and by both in turn."""
    rows: list[dict[str, object]] = []
    for name in dict.fromkeys(one.category for one in prompts):
        mine = [one for one in prompts if one.category == name]
        rows.append(
            {
                "category": name,
                "prompts": len(mine),
                "rules": fmean(one.rule is True for one in mine),
                "undecided": fmean(one.rule is None for one in mine),
                "score": fmean(one.passes(threshold) for one in mine),
                "router": fmean(one.decided(threshold) for one in mine),
            }
        )
    return rows


def _scores(prompts: Sequence[Scored], planned: bool) -> list[float]:
    return [one.score for one in prompts if one.planned is planned and one.score is not None]


COLUMNS = (
    text("category", "category"),
    figure("n", "prompts", 0),
    figure("by rules", "rules"),
    figure("no rule", "undecided"),
    figure("by score", "score"),
    figure("planned", "router"),
)


async def evaluate(
    wanted: FleetOptions, prompts: Path | None, at_once: int, opener: Opener, out: TextIO, err: TextIO
) -> int:
    """A table by category, and router.json. Raises InvalidRequest, ModelError."""
    if wanted.master is not None:
        raise InvalidRequest("the threshold is kept beside a model here, so there is no --master", "router")
    base = models_of(wanted).base
    asker = Prompts(base, Text(base))
    if not asker.listed:
        raise InvalidRequest(f"{base} was taught to choose by itself, so no score is asked", "router")
    if not all(asker.score_words):
        raise InvalidRequest("the words of the score are no single tokens of this model", "router")
    asked = read_labelled(prompts)
    fleet = await opener(wanted)
    places = asyncio.Semaphore(at_once)
    with counting_bar(err, "scores", len(asked)) as count:

        async def measured(category: str, planned: bool, question: str) -> Scored:
            async with places:
                score = await score_for(fleet, asker, question)
            count()
            decision = decide_question(question)
            rule = None if decision.reason == UNDECIDED else decision.mode == "sot"
            return Scored(category, planned, rule, score)

        try:
            found = await asyncio.gather(*(measured(*one) for one in asked))
        finally:
            await fleet.close()
    tell(found, folder_of_model(base) / ROUTER_FILE, out)
    return 0


def tell(found: Sequence[Scored], file: Path, out: TextIO) -> None:
    """The table, what it comes to, and the file."""
    threshold = threshold_of(found)
    area = auc(found)
    rows = rows_of(found, threshold)
    measured = {"prompts": len(found), "auc": round(area, 3), "planned": {}}
    measured["planned"] = {row["category"]: round(float(str(row["router"])), 3) for row in rows}
    file.write_text(json.dumps({"threshold": threshold, "measured": measured}, indent=2) + "\n")
    out.write(f"{markdown(COLUMNS, rows)}\n\n")
    worth = f"threshold {threshold}" if threshold is not None else "no threshold: the rules alone do better"
    out.write(f"the score separates with an AUC of {area:.3f}; {worth}; written to {file}\n")


def read_labelled(file: Path | None) -> list[tuple[str, bool, str]]:
    """(category, whether it asks for several points, question). Raises InvalidRequest."""
    source = file or resources.files("specsot_lab.eval") / "data" / "router.jsonl"
    try:
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line]
        return [(str(row["category"]), bool(row["planned"]), str(row["question"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{source}: {type(error).__name__}: {error}", "prompts") from None


async def score_for(fleet: FleetClient, asker: Prompts, question: str) -> float | None:
    """As the router asks for it."""
    prompt = asker.score((Message("user", question),))
    view = await final_view(fleet, scoring(Ask(tokens=prompt.tokens, mode="direct")))
    return score_of(view.logprobs[0], prompt) if view.logprobs else None
