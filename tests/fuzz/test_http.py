"""Any call at the HTTP endpoint, made by schemathesis from its own document: answered or refused as that
says.

The ring is a fake that writes one sentence. Nothing is drawn by chance, so what is
found stays found.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi import checks as said

from specsot_app.runtime import BackgroundLoop
from specsot_master.http.app import build_api
from tests.conftest import is_full
from tests.http.house import Served, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SAYS_ANYTHING = {"": "It is so."}
CALLS = 100 if is_full() else 5  # of each path and method


def document_of(corners: bool) -> Any:
    """corners: every edge of every field too, thousands of calls."""
    phases = {
        "examples": {"enabled": False},
        "stateful": {"enabled": False},
        "coverage": {"enabled": corners},
    }
    made = {"deterministic": True, "database": "none"}
    wishes = schemathesis.Config.from_dict({"generation": made, "phases": phases})
    return schemathesis.openapi.from_dict(build_api(cast(Any, None)).openapi(), config=wishes)


DOORS = document_of(corners=False)
CHECKS = (
    said.status_code_conformance,
    said.content_type_conformance,
    said.response_schema_conformance,
    said.negative_data_rejection,
    said.unsupported_method,
)
TOO_LATE = 504  # some calls leave a second or less
UNKNOWN = "x-schemathesis-unknown-property"
PYTHON = ("Traceback", "object at 0x", "pydantic", "validation error", "<class", "function-", "dictionary")


@pytest.fixture(scope="module")
def house() -> Iterator[Served]:
    """On a loop of its own: who knocks here waits for answers."""
    background, opening = BackgroundLoop(), served(SAYS_ANYTHING)
    one = background.run(opening.__aenter__())
    yield one
    background.run(one.quiet())
    one.stage.assert_clean()
    background.run(opening.__aexit__(None, None, None))
    background.stop()


@DOORS.parametrize()
@settings(max_examples=CALLS, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_call_gets_a_documented_answer(case: schemathesis.Case, house: Served) -> None:
    check_call(case, house)


if is_full():  # its thousands of calls are made before any test begins

    @pytest.mark.full
    @document_of(corners=True).parametrize()
    @settings(deadline=None, suppress_health_check=list(HealthCheck))
    def test_any_call_gets_a_documented_answer_at_every_corner_case(
        case: schemathesis.Case, house: Served
    ) -> None:
        check_call(case, house)


def check_call(case: schemathesis.Case, house: Served) -> None:
    if UNKNOWN in case.headers:
        return  # of headers every client has more than we know
    response = case.call(base_url=house.url, timeout=60)
    case.validate_response(response, checks=list(CHECKS))
    assert response.status_code < 500 or response.status_code == TOO_LATE, response.text
    if response.status_code >= 400:
        check_refusal(response.text)


def check_refusal(text: str) -> None:
    """Clear words, and none of Python's."""
    error: dict[str, Any] = json.loads(text)["error"]
    assert 0 < len(error["message"]) <= 1000
    assert set(error) >= {"message", "type", "param", "code"}
    assert not any(word in text for word in PYTHON)
