"""Why a connection failed, in words for people, from gRPC's own.

Refuses to know who wanted to connect.
"""

from __future__ import annotations

_WORDS = {
    "certificate has expired": "its certificate has expired",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not vouched for by --tls-ca",
    "Hostname Verification": "its certificate is for another name",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "Socket closed": "it hung up: one side speaks TLS and the other does not, or it wants our certificate",
}


def failure_in_words(details: str) -> str:
    """ " (why)", or nothing where there is nothing to say but that nobody is there."""
    return next((f" ({words})" for said, words in _WORDS.items() if said in details), "")
