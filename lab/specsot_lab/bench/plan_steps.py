"""Measures what a step of a plan costs, compared with a free step: `python -m specsot_lab.bench.plan_steps`.

The first table has the time of the grammar alone for each state of a list, over the model's own tokens: one
token checked (as at temperature 0, if the model keeps to the grammar) and a whole mask. The second has the
steps of a running model, the first plan of a fresh process included: `--device cuda` on a GPU,
`--quantization int8` on a CPU. It uses no drafter, so that a step is a token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from specsot import SpecSoT
from specsot.checkpoint.config import read_config
from specsot.checkpoint.resolving import resolve_model
from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import Vocabulary, read_vocabulary
from specsot.events import Statistics
from specsot.grammar import TokenAutomaton, prebuild

LISTS = (
    " Reduced carbon emissions\n2. Lower long term costs\n3. Energy independence\n4. New jobs in towns\n",
    " Clear goals\n2. Regular feedback\n3. Open communication\n4. Fair workload for everybody\n5. Tools\n\n",
    " 明确的目标\n2. 定期反馈\n3. 公平的工作量\n\n",
)
QUESTIONS = (
    "What are the benefits of wind energy?",
    "What makes a good team?",
    "Give me tips for learning the piano.",
    "What should I pack for a hiking trip?",
    "What are the causes of traffic jams?",
    "How can I sleep better?",
)
# Tokens of a plan and its branches, and of a direct answer. A plan takes about 40 of them.
TOKENS = 300


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model directory or a GGUF file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many plans are measured")
    parser.add_argument("--grammar-only", action="store_true", help="leave out the steps of the model")
    asked = parser.parse_args(arguments)
    directory = Path(resolve_model(asked.model))
    print_grammar(read_vocabulary(directory, read_config(directory).vocab), directory)
    if not asked.grammar_only:
        print_steps(asked.model, asked.device, asked.quantization, QUESTIONS[: asked.questions])


def print_grammar(vocabulary: Vocabulary, directory: Path) -> None:
    """Print microseconds per state: the first list of a process, the same again, and other lists."""
    began = time.perf_counter()
    prebuild(vocabulary).result()
    print(f"{len(vocabulary):,} tokens, built in {time.perf_counter() - began:.2f} s")
    print("| list | states | one token, us: median, mean, max | mask, us: median, mean, max |")
    print("|---|---:|---:|---:|")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rules = PlanRules(direct=False, max_points=8, listed=True)
    for name, text in (("first", 0), ("again", 0), ("second", 1), ("Chinese", 2)):
        tokens = tokenizer.encode(LISTS[text], add_special_tokens=False).ids
        print(f"| {name} | {len(tokens)} | {times_of(TokenAutomaton(vocabulary, rules), tokens)} |")


def times_of(machine: TokenAutomaton, tokens: Sequence[int]) -> str:
    """Return the times of a list's states as two cells of a table."""
    checks = list[float]()
    masks = list[float]()
    state = machine.start()
    for number, token in enumerate(tokens):
        began = time.perf_counter()
        allowed = machine.allows(state, token, 256 - number)
        checked = time.perf_counter()
        machine.mask(state, 256 - number)
        masks.append(1e6 * (time.perf_counter() - checked))
        following = machine.advance(state, token)
        checks.append(1e6 * (checked - began))
        if not allowed or following is None:
            raise SystemExit(f"the grammar forbids token {token}, number {number} of a list")
        state = following
    return " | ".join(
        f"{statistics.median(each):.0f}, {statistics.mean(each):.0f}, {max(each):.0f}"
        for each in (checks, masks)
    )


def print_steps(model: str, device: str, quantization: str | None, questions: Sequence[str]) -> None:
    """Print the milliseconds of a step in a plan and in a direct answer, question by question."""
    options = {"quantization": quantization} if quantization else {}
    with SpecSoT.from_pretrained(model, device=device, drafter="none", **options) as running:
        print("| plan | steps | ms a step of the plan | ms a free step | ratio |")
        print("|---|---:|---:|---:|---:|")
        for number, question in enumerate(questions, 1):
            plan = running.generate_sync(question, mode="sot", max_new_tokens=TOKENS).statistics
            free = running.generate_sync(question, mode="direct", max_new_tokens=TOKENS).statistics
            planned = step_of(plan, "skeleton", plan.plan_tokens)
            direct = step_of(free, "direct", free.completion_tokens)
            print(
                f"| {number} | {plan.plan_tokens} | {planned:.2f} | {direct:.2f} | {planned / direct:.2f} |",
                flush=True,
            )


def step_of(figures: Statistics, phase: str, tokens: int) -> float:
    """Return the milliseconds of a step of a phase that wrote so many tokens, without its prompt."""
    seconds = figures.phases[phase] - figures.phases[f"{phase}_prefill"]
    return 1e3 * seconds / max(tokens - 1, 1)


if __name__ == "__main__":
    main()
