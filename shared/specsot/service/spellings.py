"""vLLM's names of flags that mean the same here, in one table: second names on command lines and in files.

Where vLLM means something else, there is no second name.
"""

from __future__ import annotations

from collections.abc import Mapping

SPELLINGS: Mapping[str, str] = {
    "block-size": "page-rows",
    "data-parallel-size": "replicas",
    "kv-cache-memory-bytes": "kv-memory",
    "max-num-batched-tokens": "rows",
    "max-num-seqs": "max-requests",
    "num-speculative-tokens": "draft-tokens",
    "pipeline-parallel-size": "stages",
    "served-model-name": "name",
    "ssl-ca-certs": "tls-ca",
    "ssl-certfile": "tls-cert",
    "ssl-keyfile": "tls-key",
}


def spellings_of(flag: str) -> tuple[str, ...]:
    """Other names of a flag of ours; names are written without their dashes."""
    return tuple(other for other, ours in SPELLINGS.items() if ours == flag)
