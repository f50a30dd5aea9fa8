"""A judge behind an OpenAI-compatible endpoint.

The openai package (specsot-lab[judge]) retries lost connections, 408, 409,
429 and 5xx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai

from specsot.errors import InvalidRequest, Unavailable
from specsot.params import Message

SECONDS = 120.0  # of one try
RETRIES = 3
MOST_SHOWN = 200  # characters of what went wrong
_NEVER = openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError


class JudgeEndpoint:
    """The model `name` at `url`, such as http://127.0.0.1:8000/v1. http: a client; else openai's own."""

    def __init__(self, url: str, name: str, key: str, http: Any = None) -> None:
        self.name = name
        self._client = openai.AsyncOpenAI(
            base_url=url, api_key=key or "none", timeout=SECONDS, max_retries=RETRIES, http_client=http
        )

    async def reply(self, messages: Sequence[Message]) -> str:
        """Its words, a refusal's too. Raises Unavailable, InvalidRequest where no question can succeed."""
        asked: Any = [{"role": one.role, "content": one.content} for one in messages]
        try:
            told = await self._client.chat.completions.create(model=self.name, messages=asked, temperature=0)
        except _NEVER as error:
            raise InvalidRequest(f"the judge: {_brief(error)}", field="judge") from None
        except (openai.OpenAIError, ValueError) as error:  # ValueError: JSON that is none
            raise Unavailable(_brief(error)) from None
        return _words_of(told)

    async def close(self) -> None:
        await self._client.close()


def _brief(error: Exception) -> str:
    """One line; whoever stands in an endpoint's place may say a whole page."""
    return " ".join(str(error).split())[:MOST_SHOWN]


def _words_of(told: Any) -> str:
    """openai checks nothing of what it hands on; another server's page comes as a text."""
    try:
        message = told.choices[0].message
        words = message.content or message.refusal
    except (AttributeError, IndexError, TypeError):
        words = None
    if not isinstance(words, str):
        raise Unavailable("the endpoint's reply is no chat completion with a text")
    return words
