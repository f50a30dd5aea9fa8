"""Measures how well the length of a direct answer can be forecast, from recorded answers.

python tools/lengths.py --tokenizer tokenizer.json --limit 224 ANSWERS.jsonl...

ANSWERS: conversations whose last message is the answer, or records of `specsot eval` (--limit as there).
Every way of forecasting learns from half of the answers and forecasts the other half, NUM_SPLITS times. The
output is the fraction of answers whose length is within 20 % of the forecast.
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

NUM_SPLITS = 20  # Number of times that the answers are split into halves. Untuned.
MIN_ANSWERS = 3  # Answers. A class with fewer is forecast from all answers. Untuned.
RIDGE_STRENGTH = 6.0  # Factor of the squared weights in the ridge regression. Untuned.
NUM_SIMILAR = 15  # Number of similar questions whose answers give a forecast. Untuned.
# Patterns of words by which a question asks for a certain form or length.
WORDS = (
    r"list|steps|tips",
    r"brief|short|one sentence",
    r"explain|describe|discuss",
    r"why|how",
    r"write",
    r"what is|define",
)


def read(path: Path, count: Callable[[str], int]) -> Iterator[tuple[str, float]]:
    """Yield (question, number of tokens of its direct answer); other lines are left out.

    path: File of JSON lines: conversations, or records of `specsot eval`.
    count: Returns the number of tokens of a text.

    Of a conversation, the question is the last message but one and the answer the last one. Of a record, only
    those of mode "direct" with at least one turn count. Raises ValueError for a line that is not JSON.
    """
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "messages" in row:
            yield row["messages"][-2]["content"], count(row["messages"][-1]["content"])
        elif row.get("mode") == "direct" and row.get("turns"):
            yield row["questions"][0], row["turns"][0]["tokens"]


def counting(tokenizer: Path) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text.

    tokenizer: Path of the tokenizer.json.

    Special tokens are not counted. Raises an error of tokenizers if the file cannot be read.
    """
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


def features(question: str, kinds: Sequence[str]) -> list[float]:
    """Return the features of a question: its class by the router, its length, and words that tell of its
    form.

    question: The question as plain text.
    kinds: Names of all classes of the router.

    The features are, in this order: 1 for the router's class of the question and 0 for every other one of
    `kinds`; the logarithms of its words and characters, each plus one; the number of points that it asks for,
    0 if it names none; then 1 or 0 for a question mark at the end, a line break, and each of WORDS. A class
    that is not in `kinds` gives only zeros.
    """
    lower_case = question.lower()
    kind = decide_question(question).reason
    sizes = [
        math.log(len(lower_case.split()) + 1),
        math.log(len(lower_case) + 1),
        float(points_asked(question) or 0),
    ]
    forms = [
        lower_case.rstrip().endswith("?"),
        "\n" in lower_case,
        *(re.search(words, lower_case) for words in WORDS),
    ]
    return [*(float(reason == kind) for reason in kinds), *sizes, *(float(bool(form)) for form in forms)]


def ridge(known: Any, lengths: Any) -> Callable[[Any], Any]:
    """Return a function that predicts lengths [n] from features [n, num_features], by ridge regression on
    their logarithm.

    known: Features to learn from, [n, num_features].
    lengths: Numbers of tokens of their answers, [n].

    Features are scaled by the mean and the standard deviation of those to learn from.
    """
    means = known.mean(0)
    deviations = known.std(0) + 1e-6
    logs = np.log(lengths)
    scaled = (known - means) / deviations
    square = scaled.T @ scaled + RIDGE_STRENGTH * np.eye(scaled.shape[1])
    weights = np.linalg.solve(square, scaled.T @ (logs - logs.mean()))
    return lambda features: np.exp((features - means) / deviations @ weights + logs.mean())


def shares(questions_and_lengths: Sequence[tuple[str, float]], limit: int) -> dict[str, float]:
    """Return, by way of forecasting, the fraction of answers that are near the forecast.

    questions_and_lengths: Each question, and the number of tokens of its answer.
    limit: Number of tokens at which answers were cut.

    "Near" means that the length differs from the forecast by at most the fraction NEAR of it. The ways are
    the median and the likeliest length of all answers and of the question's class, a ridge regression on
    features (at most `limit`), and the likeliest length of the NUM_SIMILAR most similar questions. The
    fractions are means over NUM_SPLITS halves.
    """
    lengths = np.array([length for _, length in questions_and_lengths])
    kinds = [decide_question(question).reason for question, _ in questions_and_lengths]
    names = sorted(set(kinds))
    question_features = np.array([features(question, names) for question, _ in questions_and_lengths])
    hit_rates = defaultdict[str, list[float]](list)
    for turn in range(NUM_SPLITS):
        order = np.random.default_rng(turn).permutation(len(questions_and_lengths))
        half = len(questions_and_lengths) // 2
        learned, tested = order[:half], order[half:]
        forecasts: dict[str, Any] = {}
        for name, choose in (("median", median), ("likeliest", likeliest)):
            of_all = choose(lengths[learned].tolist())
            classes = {
                kind: [float(lengths[index]) for index in learned if kinds[index] == kind] for kind in names
            }
            by_class = [
                choose(classes[k]) if len(classes[k := kinds[index]]) >= MIN_ANSWERS else of_all
                for index in tested
            ]
            forecasts[f"{name} of all"] = of_all
            forecasts[f"{name} of the class"] = np.array(by_class)
        line = ridge(question_features[learned], lengths[learned])
        forecasts["a line over its words"] = np.minimum(line(question_features[tested]), limit)
        scaled = (question_features - question_features[learned].mean(0)) / (
            question_features[learned].std(0) + 1e-6
        )
        scaled /= np.linalg.norm(scaled, axis=1, keepdims=True)
        most_similar = np.argsort(-scaled[tested] @ scaled[learned].T, axis=1)[:, :NUM_SIMILAR]
        of_similar = [likeliest(forecast.tolist()) for forecast in lengths[learned][most_similar]]
        forecasts[f"likeliest of {NUM_SIMILAR} with words like its own"] = np.array(of_similar)
        for way, forecast in forecasts.items():
            hit_rates[way].append(float((abs(lengths[tested] / forecast - 1) <= NEAR).mean()))
    return {way: float(np.mean(forecast)) for way, forecast in hit_rates.items()}


def main() -> None:
    """Read the command line and print the fractions.

    Answers without tokens are left out. Without --tokenizer, the length of a conversation's answer is counted
    in characters. The first lines say how many answers there are, how many reached --limit, and what fraction
    the best single forecast of all would reach. An unknown option or a missing file argument ends the process
    with the status 2.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("answers", nargs="+", type=Path)
    parser.add_argument("--limit", type=int, default=1024, help="tokens at which answers were cut")
    parser.add_argument("--tokenizer", type=Path, help="to count tokens of conversations with")
    options = parser.parse_args()
    count = counting(options.tokenizer) if options.tokenizer else len
    answers = [
        (question, length) for path in options.answers for question, length in read(path, count) if length > 0
    ]
    cut = sum(length >= options.limit - 2 for _, length in answers)
    print(f"{len(answers)} answers, {cut} at the limit; within {NEAR:.0%} are")
    best = likeliest([length for _, length in answers])
    fraction_near = sum(abs(length / best - 1) <= NEAR for _, length in answers) / len(answers)
    print(f"  {fraction_near:.2f} one number that knows them all")
    for way, share in shares(answers, options.limit).items():
        print(f"  {share:.2f} {way}")


if __name__ == "__main__":
    main()
