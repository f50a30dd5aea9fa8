"""`specsot train`: trains an EAGLE-3 head for a base model, from text."""

from __future__ import annotations

import sys
from typing import Final

from specsot.service.command import Example, command
from specsot_lab.train.settings import TrainOptions

# Examples at the end of the help.
EXAMPLES: Final = (
    Example(
        "specsot train --model models/llama --output models/llama-eagle3 --questions questions.txt", "New"
    ),
    Example(
        "specsot train --model models/llama --output head --start head --steps 0 --data chats.jsonl",
        "Measure",
    ),
)


@command(TrainOptions, examples=EXAMPLES)
def train(options: TrainOptions) -> int:
    """Train an EAGLE-3 head on the base model's own answers or on conversations; show its acceptance.

    \fReturns the exit status 0. With 0 steps, the head to start from is only measured. Raises what
    `specsot_lab.train.running.train` raises: InvalidRequest, ModelError or HeadMismatch.

    options: Options of the command line; see `TrainOptions`.
    """
    from specsot_lab.train import running

    return running.train(options, sys.stdout, sys.stderr)
