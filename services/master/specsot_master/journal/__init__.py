"""What outlives a master: of requests that may be resumed, enough to go on where they were.

Refuses to know rings and readers.
"""

from specsot_master.journal.journal import Journal, open_journal
from specsot_master.journal.records import (
    Again,
    Begun,
    Branched,
    Failed,
    Heard,
    Kept,
    Record,
    Stopped,
    fingerprint_of,
)

__all__ = [
    "Again",
    "Begun",
    "Branched",
    "Failed",
    "Heard",
    "Journal",
    "Kept",
    "Record",
    "Stopped",
    "fingerprint_of",
    "open_journal",
]
