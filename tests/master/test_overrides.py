"""A request may name who drafts for it, of those the fleet has."""

import pytest

from specsot.errors import InvalidRequest
from specsot.params import Ask
from specsot_master.core.limits import check_drafter


@pytest.mark.parametrize("named", [None, "none", "eagle", "ngram"])
def test_who_is_here_may_be_named(named):
    check_drafter(Ask(prompt="x", drafter=named), ("eagle", "ngram"))


@pytest.mark.parametrize(
    ("here", "named", "said"),
    [
        (("eagle", "ngram"), "model", "drafter model is not in this fleet, which has eagle, ngram, none"),
        (("model", "ngram"), "eagle", "drafter eagle is not in this fleet, which has model, ngram, none"),
        ((), "ngram", "drafter ngram is not in this fleet, which has none"),
    ],
)
def test_who_is_not_here_is_refused_naming_who_is(here, named, said):
    with pytest.raises(InvalidRequest, match=said) as refused:
        check_drafter(Ask(prompt="x", drafter=named), here)
    assert refused.value.field == "drafter"


def test_an_unknown_drafter_is_refused():
    with pytest.raises(InvalidRequest, match="one of eagle, mtp, model, suffix, ngram, none"):
        Ask(prompt="x", drafter="magic")  # type: ignore[arg-type]
