"""What `specsot serve` and `--fleet processes` start: every child's command line and variables.

Knows the flags as users do, and the children by what would be typed to start them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.golden.surface import services_started

LINES = (
    "serve",
    "serve --model models/demo/base",
    "serve --model models/demo/base --draft-model models/demo/eagle3",
    "serve --drafter none",
    "serve --drafter ngram",
    "serve --model models/demo/base --draft-model models/demo/base --drafter model",
    "serve --stages 3",
    "serve --layers 0:3,3:",
    "serve --layer-splits 2,4",
    "serve --replicas 2 --stages 1",
    "serve --device cuda --dtype bf16 --quantization int8 --kv-cache-dtype int8 --batch-invariant",
    "serve --kv-memory 256M --model-format bin --draft-format bin",
    "serve --draft-dtype fp16 --draft-quantization int4 --aux-layers 1,2,3 --drafter-rope-theta 500000",
    "serve --draft-mode linear --draft-depth 6 --draft-breadth 3 --draft-nodes 30 --draft-threshold 0.2",
    "serve --tuner fixed --blend",
    "serve --preset short",
    "serve --preset long",
    "serve --preset small --draft-tokens 5",
    "serve --transport zmq --comm-mode ring",
    "serve --name other --max-requests 8 --max-queue 9 --default-mode auto --http-names a.example,b",
    "serve --journal journal --grace 3",
    "serve --host 0.0.0.0 --port 50070 --http-port 8070 --insecure",
    "serve --certificates certificates",
    "serve --certificates certificates --fleet-listen 127.0.0.1:50077",
    "serve --devices 127.0.0.1#cpu,127.0.0.1#cpu",
    "serve --devices 127.0.0.1#0,127.0.0.1#1,127.0.0.1#2,127.0.0.1#3 --replicas 2",
    "serve --devices 10.0.0.1#0,10.0.0.2#1 --certificates certificates",
    "serve --devices 10.0.0.1#0,10.0.0.2#cpu --insecure",
    "infer --fleet processes x",
    "infer --fleet processes --stages 1 --transport direct --branch-layout packed x",
)


def record() -> dict[str, Any]:
    """By what is typed: the children in order, or why none is started."""
    with tempfile.TemporaryDirectory() as folder:
        return {line: services_started(line.split(), Path(folder)) for line in LINES}
