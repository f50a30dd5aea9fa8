"""What outlives a master: of requests that may be resumed, enough to go on where they were.

Refuses to know rings and readers.
"""

from specsot_master.journal.journal import Journal, open_journal
from specsot_master.journal.records import (
    AdmittedRecord,
    BranchRecord,
    CancelledRecord,
    FailedRecord,
    JournaledRequest,
    LapRecord,
    Record,
    ReopenedRecord,
    fingerprint_of,
)

__all__ = [
    "ReopenedRecord",
    "AdmittedRecord",
    "BranchRecord",
    "FailedRecord",
    "LapRecord",
    "Journal",
    "JournaledRequest",
    "Record",
    "CancelledRecord",
    "fingerprint_of",
    "open_journal",
]
