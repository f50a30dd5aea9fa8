"""How near any forecast of a direct answer's length can come: what recorded answers let one foresee.

python tools/lengths.py --tokenizer tokenizer.json --limit 224 ANSWERS.jsonl...

ANSWERS: conversations whose last message is the answer, or records of `specsot eval` (--limit as there).
Every way learns from half of the answers and foretells the other half, twenty times. Shown is the share of
answers that are within 20 % of what is foretold.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from specsot_master.core.plans.forecast import NEAR, likeliest
from specsot_master.core.plans.router import decide_question, points_asked

HALVES = 20
FEWEST = 3  # answers of a class, below which all are asked
STRENGTH = 6.0  # of the ridge
ALIKE = 15  # answers to the questions that are most like one
WORDS = (
    r"list|steps|tips",
    r"brief|short|one sentence",
    r"explain|describe|discuss",
    r"why|how",
    r"write",
    r"what is|define",
)


def read(path: Path, count: Callable[[str], int]) -> Iterator[tuple[str, float]]:
    """Yield questions, and how many tokens their direct answers have.

    path: JSON lines: conversations, or records of `specsot eval`.
    count: Counts the tokens of a text.
    """
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "messages" in row:
            yield row["messages"][-2]["content"], count(row["messages"][-1]["content"])
        elif row.get("mode") == "direct" and row.get("turns"):
            yield row["questions"][0], row["turns"][0]["tokens"]


def counting(tokenizer: Path) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text.

    tokenizer: Its tokenizer.json.
    """
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(tokenizer))
    return lambda text: len(known.encode(text, add_special_tokens=False).ids)


def features(question: str, kinds: Sequence[str]) -> list[float]:
    """Return the features of a question: its class by the router, its length, and words that tell of its
    form.

    question: Plain text.
    kinds: All classes.
    """
    low, kind = question.lower(), decide_question(question).reason
    about = [math.log(len(low.split()) + 1), math.log(len(low) + 1), float(points_asked(question) or 0)]
    marks = [low.rstrip().endswith("?"), "\n" in low, *(re.search(words, low) for words in WORDS)]
    return [*(float(reason == kind) for reason in kinds), *about, *(float(bool(mark)) for mark in marks)]


def ridge(known: Any, lengths: Any) -> Callable[[Any], Any]:
    """Return a function that predicts lengths [n] from features [n, num_features], by ridge regression on
    their logarithm.

    known: [n, num_features] features to learn from.
    lengths: [n] tokens.
    """
    middle, wide, logs = known.mean(0), known.std(0) + 1e-6, np.log(lengths)
    scaled = (known - middle) / wide
    square = scaled.T @ scaled + STRENGTH * np.eye(scaled.shape[1])
    weights = np.linalg.solve(square, scaled.T @ (logs - logs.mean()))
    return lambda asked: np.exp((asked - middle) / wide @ weights + logs.mean())


def shares(questions_and_lengths: Sequence[tuple[str, float]], limit: int) -> dict[str, float]:
    """Return, by way of forecasting, the fraction of answers that are near the forecast.

    questions_and_lengths: All answers.
    limit: Tokens at which answers were cut.
    """
    lengths = np.array([length for _, length in questions_and_lengths])
    kinds = [decide_question(question).reason for question, _ in questions_and_lengths]
    names = sorted(set(kinds))
    plain = np.array([features(question, names) for question, _ in questions_and_lengths])
    near = defaultdict[str, list[float]](list)
    for turn in range(HALVES):
        order = np.random.default_rng(turn).permutation(len(questions_and_lengths))
        learned, tested = order[: len(questions_and_lengths) // 2], order[len(questions_and_lengths) // 2 :]
        forecasts: dict[str, Any] = {}
        for name, choose in (("median", median), ("likeliest", likeliest)):
            of_all = choose(lengths[learned].tolist())
            classes = {kind: [float(lengths[at]) for at in learned if kinds[at] == kind] for kind in names}
            by_class = [
                choose(classes[k]) if len(classes[k := kinds[at]]) >= FEWEST else of_all for at in tested
            ]
            forecasts[f"{name} of all"] = of_all
            forecasts[f"{name} of the class"] = np.array(by_class)
        line = ridge(plain[learned], lengths[learned])
        forecasts["a line over its words"] = np.minimum(line(plain[tested]), limit)
        scaled = (plain - plain[learned].mean(0)) / (plain[learned].std(0) + 1e-6)
        scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
        alike = np.argsort(-scaled[tested] @ scaled[learned].T, axis=1)[:, :ALIKE]
        among = [likeliest(forecast.tolist()) for forecast in lengths[learned][alike]]
        forecasts[f"likeliest of {ALIKE} with words like its own"] = np.array(among)
        for way, forecast in forecasts.items():
            near[way].append(float((abs(lengths[tested] / forecast - 1) <= NEAR).mean()))
    return {way: float(np.mean(forecast)) for way, forecast in near.items()}


def main() -> None:
    """Read the command line and print the fractions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=1024, help="tokens at which answers were cut")
    parser.add_argument("--tokenizer", type=Path, help="to count tokens of conversations with")
    options = parser.parse_args()
    count = counting(options.tokenizer) if options.tokenizer else len
    found = [one for path in options.answers for one in read(path, count) if one[1] > 0]
    cut = sum(length >= options.limit - 2 for _, length in found)
    print(f"{len(found)} answers, {cut} at the limit; within {NEAR:.0%} are")
    best = likeliest([length for _, length in found])
    near = sum(abs(length / best - 1) <= NEAR for _, length in found) / len(found)
    print(f"  {near:.2f} one number that knows them all")
    for way, share in shares(found, options.limit).items():
        print(f"  {share:.2f} {way}")


if __name__ == "__main__":
    main()
