"""`specsot verify`: checks base, head and decoding against a reference; exit status 1 if they differ.

`specsot_bench.verify` is imported only when asked for.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from specsot.checkpoint.config import require_torch
from specsot.service.command import Example, command
from specsot.service.option_table import Offer, option
from specsot_app.fleet.options import FleetOptions

# The options of a fleet that a comparison has.
OF_VERIFIED = Offer(
    without=(
        *("demo", "kv_memory", "drafting", "devices", "layout", "transport", "comm_mode", "hop_dtype"),
        "plan_style",
    ),
    defaults={"dtype": "fp32"},
    help={
        "dtype": "Data type to compute in; only fp32 is exact.",
        "master": "Use a running master that serves the same model.",
    },
    unset={"stages": "2"},
)


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """Options of `specsot verify`.

    prompts: File of questions, one a line; None: built-in questions.
    max_new_tokens: Maximum number of tokens of each answer.
    near: Gap of the two largest logits below which a difference counts as a tie.
    json: True: print one JSON object instead of lines.
    fleet: Options of the fleet that is verified.
    """

    HEADING: ClassVar[str] = "Comparison"

    prompts: Path | None = option(
        None, "File of prompts, one per line; built-in questions if not given.", positional=True
    )
    max_new_tokens: int = option(64, "Tokens of each answer.", min_value=1)
    near: float = option(
        1e-4, "Logits that differ by less than this count as a tie, which rounding may decide.", min_value=0
    )
    json: bool = option(False, "Print one JSON object.")
    fleet: Annotated[FleetOptions, OF_VERIFIED] = field(default_factory=FleetOptions)


EXAMPLES = (
    Example("specsot verify --model models/llama --draft-model models/llama-eagle3", "A base and its head"),
    Example("specsot verify --master 10.0.0.1:50050 --model models/llama", "A fleet that runs already"),
)


@command(VerifyOptions, examples=EXAMPLES)
def verify(options: VerifyOptions) -> int:
    """Compare a fleet's answers with Transformers, token for token, and check whether the head fits.

    Exit status 0: all answers agree, and the head fits. A quantized model is compared with itself, computed
    in one pass.

    \f Prints the report as lines, or as one JSON object with --json. The exit status is 1 if an answer
    differs by more than rounding, or the head does not fit. Errors of opening and loading are raised.
    """
    require_torch()
    from specsot_app.terminal.show import open_with_progress
    from specsot_bench.verify import pair

    return pair.verify(
        options.fleet,
        options.prompts,
        options.max_new_tokens,
        options.near,
        options.json,
        open_with_progress(sys.stderr),
    )
