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
from typing import Final

from tokenizers import Tokenizer

from specsot import SpecSoT
from specsot.checkpoint.config import read_config
from specsot.checkpoint.resolving import resolve_model
from specsot.core.skeleton import PlanRules
from specsot.core.vocabulary import Vocabulary, read_vocabulary
from specsot.events import Statistics
from specsot.grammar import TokenAutomaton, prebuild

# Lists as a model writes them after "1.": two in English, one in Chinese.
LISTS: Final = (
    " Reduced carbon emissions\n2. Lower long term costs\n3. Energy independence\n4. New jobs in towns\n",
    " Clear goals\n2. Regular feedback\n3. Open communication\n4. Fair workload for everybody\n5. Tools\n\n",
    " 明确的目标\n2. 定期反馈\n3. 公平的工作量\n\n",
)
# Questions whose plans are measured.
QUESTIONS: Final = (
    "What are the benefits of wind energy?",
    "What makes a good team?",
    "Give me tips for learning the piano.",
    "What should I pack for a hiking trip?",
    "What are the causes of traffic jams?",
    "How can I sleep better?",
)
# Tokens of a plan and its branches, and of a direct answer. A plan takes about 40 of them.
TOKENS: Final = 300


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both tables.

    arguments: The command line; None: that of this process.

    --model is required. With --grammar-only, the second table is left out. The process ends with status 2 for
    an unknown option, and with 1 and a message if the grammar forbids a token of the lists. A model that
    cannot be read raises ModelError.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model directory or a GGUF file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization", default=None)
    parser.add_argument("--questions", type=int, default=len(QUESTIONS), help="how many plans are measured")
    parser.add_argument("--grammar-only", action="store_true", help="leave out the steps of the model")
    options = parser.parse_args(arguments)
    directory = Path(resolve_model(options.model))
    print_grammar(read_vocabulary(directory, read_config(directory).vocab), directory)
    if not options.grammar_only:
        print_steps(options.model, options.device, options.quantization, QUESTIONS[: options.questions])


def print_grammar(vocabulary: Vocabulary, directory: Path) -> None:
    """Print the microseconds of the grammar at each state: for the first list of a process, for the same list
    again, and for other lists.

    vocabulary: The bytes of every token.
    directory: The model's directory, which has the tokenizer.

    Before the table, a line says how many tokens there are and how long the shared part of the grammar took
    to build. Raises SystemExit with a message if the grammar forbids a token.
    """
    start_time = time.perf_counter()
    prebuild(vocabulary, rest=0).result()
    print(f"{len(vocabulary):,} tokens, built in {time.perf_counter() - start_time:.2f} s")
    print("| list | states | one token, us: median, mean, max | mask, us: median, mean, max |")
    print("|---|---:|---:|---:|")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rules = PlanRules(direct=False, max_points=8, listed=True)
    for name, list_index in (("first", 0), ("again", 0), ("second", 1), ("Chinese", 2)):
        tokens = tokenizer.encode(LISTS[list_index], add_special_tokens=False).ids
        print(f"| {name} | {len(tokens)} | {times_of(TokenAutomaton(vocabulary, rules), tokens)} |")


def times_of(automaton: TokenAutomaton, tokens: Sequence[int]) -> str:
    """Return the times of a list's states as two cells of a table: checking one token, and making a mask.

    automaton: The grammar over the model's tokens.
    tokens: The list's token ids.

    Raises SystemExit with a message if the grammar forbids one of the tokens.

    Each cell has the median, the mean and the maximum, in microseconds. At least one token is needed. The
    mask is made for a limit of 256 tokens, less one for each token before.
    """
    check_times = list[float]()
    mask_times = list[float]()
    state = automaton.start()
    for number, token in enumerate(tokens):
        start_time = time.perf_counter()
        allowed = automaton.allows(state, token, 256 - number)
        check_end = time.perf_counter()
        automaton.mask(state, 256 - number)
        mask_times.append(1e6 * (time.perf_counter() - check_end))
        next_state = automaton.advance(state, token)
        check_times.append(1e6 * (check_end - start_time))
        if not allowed or next_state is None:
            raise SystemExit(f"the grammar forbids token {token}, number {number} of a list")
        state = next_state
    return " | ".join(
        f"{statistics.median(microseconds):.0f}, {statistics.mean(microseconds):.0f}, {max(microseconds):.0f}"
        for microseconds in (check_times, mask_times)
    )


def print_steps(model: str, device: str, quantization: str | None, questions: Sequence[str]) -> None:
    """Print the milliseconds of a step in a plan and in a direct answer, question by question.

    model: The model: a directory, a GGUF file, or a name on the hub.
    device: The device to compute on.
    quantization: The quantization; None: none.
    questions: The questions.

    Each question is answered twice, with a plan and directly, without drafts. The last column is the time of
    a plan's step divided by that of a direct one. Raises ModelError if the model cannot be loaded, and
    KeyError if an answer's statistics lack the phase "skeleton" or "direct".
    """
    options = {"quantization": quantization} if quantization else {}
    with SpecSoT.from_pretrained(model, device=device, drafter="none", **options) as model_api:
        print("| plan | steps | ms a step of the plan | ms a free step | ratio |")
        print("|---|---:|---:|---:|---:|")
        for number, question in enumerate(questions, 1):
            plan_statistics = model_api.generate_sync(question, mode="sot", max_new_tokens=TOKENS).statistics
            direct_statistics = model_api.generate_sync(
                question, mode="direct", max_new_tokens=TOKENS
            ).statistics
            plan_milliseconds = step_of(plan_statistics, "skeleton", plan_statistics.plan_tokens)
            direct_milliseconds = step_of(direct_statistics, "direct", direct_statistics.completion_tokens)
            print(
                f"| {number} | {plan_statistics.plan_tokens} | {plan_milliseconds:.2f} |"
                f" {direct_milliseconds:.2f} | {plan_milliseconds / direct_milliseconds:.2f} |",
                flush=True,
            )


def step_of(request_statistics: Statistics, phase: str, tokens: int) -> float:
    """Return the mean milliseconds of a step of one phase, its prompt left out.

    request_statistics: The statistics of the request.
    phase: "skeleton" or "direct".
    tokens: Number of tokens that the phase wrote.
    """
    seconds = request_statistics.phases[phase] - request_statistics.phases[f"{phase}_prefill"]
    return 1e3 * seconds / max(tokens - 1, 1)


if __name__ == "__main__":
    main()
