"""What two records must have in common to be compared: who answered, and within which limits.

Nothing secret is among them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from specsot.model.fingerprint import fingerprint
from specsot_app.fleet.opening import Fleet
from specsot_app.fleet.options import FleetOptions, models_of

Settings = dict[str, Any]


def settings_of(wanted: FleetOptions, tokens: int) -> Settings:
    """As far as they are known before the fleet is open, and as JSON gives them back. Raises ModelError."""
    asked: Settings = asdict(wanted)
    del asked["client"]  # the way there, and a token
    if wanted.master is None:
        models = models_of(wanted)
        asked["fingerprint"] = fingerprint(models.base)
        asked["draft_fingerprint"] = models.draft and fingerprint(models.draft)
    return json.loads(json.dumps(asked | {"max_new_tokens": tokens}))


async def served_by(fleet: Fleet, wanted: FleetOptions) -> Settings:
    """What a master elsewhere says that it serves; of a fleet of our own all is known."""
    if wanted.master is None:
        return {}
    models = (await fleet.info()).models
    return {"served": [[model.name, model.fingerprint] for model in models]}
