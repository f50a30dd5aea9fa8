"""How many forward passes a frame takes when nothing is drafted.

Without drafts, each forward pass gives every sequence one token. With many sequences, handling their outcomes
keeps the host busier than the GPU (seen in a profile: 64 clients, 1.5B, H200). So the host gives the GPU
several passes at once: each feeds the tokens that the pass before has chosen, on the device
(`NextStep.run_ahead`). Only the code that runs the passes treats such a frame specially. All other code sees
chains of drafted tokens, which are accepted as a whole, or up to the first token that a grammar changes.

The tokens are the same as those of single passes: every pass runs the same kernels, and chooses by the same
rule. What a sequence gets beyond its end is dropped.

The device does not know what a grammar allows. So the host verifies the tokens of a sequence with a grammar
as if they had been drafted: they are accepted up to the first one that the grammar changes. A model that has
been asked for JSON mostly writes what its grammar allows. Plans are written in single passes, unless many
sequences decode (`FEW_SEQUENCES`).

A frame with prompts has one pass. So that few frames have, prompts and trees take turns while sequences can
run ahead:

    frames   | 8 passes | prompts | 8 passes | 8 passes | prompts | 8 passes |
"""

from __future__ import annotations

from typing import Final

from specsot.core.frames import Opening

# Forward passes. Chosen by measurement: with 64 clients (1.5B, H200), 1, 4 and 8 passes give 11,600, 13,700
# and 15,500 tokens/s (mean of two rounds).
MAX_PASSES: Final = 8
# Seconds. All passes of a frame together take about this long. The time is bounded because a new prompt waits
# for all passes, and a client gets their tokens at once. Chosen such that up to 8 sequences get 8 passes and
# 64 get 5, with or without the features for a paused drafter. One pass takes 1.43 to 1.56 ms with up to 8
# sequences, and 2.28 to 2.35 ms with 64 (1.5B, H200).
PASSES_SECONDS: Final = 0.012
# Seconds. While prompts and trees take turns, a turn of prompts takes about this long at most. With one pass
# per frame, the next turn of prompts begins at least this long after the newest frame with prompts. A plan
# that has ended has this long to open its branches before frames take several passes. Untuned.
MAX_SECONDS: Final = 0.02
# Sequences. While at most so many decode, frames have one pass as long as a plan is written or its branches
# begin, because several passes save little then. Chosen by measurement (lab/results/h200-passes.json): 8
# passes save 10 % of the time of 8 sequences, and 25 % of that of 64. The number itself is untuned.
FEW_SEQUENCES: Final = 16
# Tokens. While a branch of a plan (a sequence with a soft end) has fewer, its frames have at most
# OPENING_PASSES passes, and one if few sequences decode: its first words decide whether it is closed and
# opened again. Untuned: three words and the beginning of a fourth have so many tokens at most in most
# languages.
OPENING_TOKENS: Final = 8
# Forward passes. Most of a frame with a branch that has fewer than OPENING_TOKENS tokens: a branch that is
# opened again waits for the passes of two frames. Untuned.
OPENING_PASSES: Final = 4


def num_passes(seconds: float) -> int:
    """Return how many forward passes a frame takes: the number whose time is nearest to PASSES_SECONDS, at
    least 1 and at most MAX_PASSES.

    seconds: Seconds that one pass takes. 0 if unknown: MAX_PASSES is returned then.

        # 1.5 ms -> 8; 2.3 ms -> 5; 10 ms -> 1
    """
    return max(1, min(MAX_PASSES, round(PASSES_SECONDS / seconds))) if seconds > 0 else MAX_PASSES


def next_max_passes(max_passes: int, passes: int, num_tokens: int) -> int:
    """Return how many forward passes the next frame of a sequence may take, at least 1.

    max_passes: As many as this frame was allowed to take.
    passes: Number of passes that it took.
    num_tokens: Number of tokens that the sequence gained by it, the one that a grammar changed included; at
        least 1.

    Passes after the first token that a grammar changes are wasted. So the next frame takes no more passes
    than this one gained tokens. After a frame that is accepted as a whole, the limit never falls: it is the
    larger of `max_passes` and twice `passes`, the latter at most MAX_PASSES.

        # 8 passes, 3 accepted -> 3; 3 passes, 3 accepted -> 6; then 8
    """
    if num_tokens < passes:
        return num_tokens
    return max(max_passes, min(2 * passes, MAX_PASSES))


def feeds_forced_tokens(opening: Opening) -> bool:
    """Return whether the tokens that a grammar forces are fed in one pass, together with the token before
    them. Return False for the plan of a list, and True for any other sequence, with or without a grammar.
    This rule is for stages that launch steps before their frames are composed; other stages always feed
    forced tokens together.

    Neither a frame with forced tokens nor the frame after it can be launched that early. A list forces only
    numbers and full stops, so that feeding each of these in a pass of its own takes less time.

    opening: The opening of the sequence.
    """
    return opening.plan is None or not opening.plan.listed


def can_run_ahead(opening: Opening) -> bool:
    """Return whether the device can choose several tokens of a sequence by itself: not if a token depends on
    the tokens before it by more than the model and a grammar, not under a KV policy, and not if
    log-probabilities are asked for. Biases are the same for every token, so that the device adds them; tokens
    that must not be the first concern the prompt's frame alone.

    opening: The opening of the sequence: its penalties, least number of tokens, KV policy.
    """
    sampling = opening.sampling
    constrained = opening.min_tokens or opening.logprobs is not None
    has_policy = opening.window or opening.pruning or opening.heads
    return not (constrained or has_policy or sampling.penalises)
