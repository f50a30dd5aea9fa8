"""Serves /tokenize and /detokenize, as vLLM does: the tokens of a prompt, and the text of tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from specsot.errors import InvalidRequest, NotFound
from specsot.params import check_length
from specsot_master.http.calls import HttpContext
from specsot_master.http.json_bodies import JsonRoute
from specsot_master.http.openai_api import names_of
from specsot_master.http.openai_requests import message_of
from specsot_master.http.openai_schemas import Conversation, Many, Model, Words
from specsot_master.http.schemas import documented


class TokenizeBody(Model):
    """POST /tokenize. Either a prompt, or messages, which the chat template renders."""

    # The model's public name; None for the only one.
    model: Words | None = None
    # The text to tokenize; None if messages are given.
    prompt: Words | None = None
    # The conversation to render and tokenize; None if a prompt is given.
    messages: Conversation | None = None
    # False to tokenize the prompt alone, without the tokenizer's own tokens.
    add_special_tokens: bool = True
    # False to end after the last message, without the head of the answer.
    add_generation_prompt: bool = True


class DetokenizeBody(Model):
    """POST /detokenize"""

    # The model's public name; None for the only one.
    model: Words | None = None
    # The token ids.
    tokens: Many[int]


class Tokenized(BaseModel):
    """The tokens of a prompt, their number, and the model's context."""

    # The number of tokens.
    count: int
    # The model's context, in tokens.
    max_model_len: int
    # The token ids.
    tokens: list[int]


class Detokenized(BaseModel):
    """The text of tokens."""

    # The text.
    prompt: str


def tokenizer_routes(context: HttpContext) -> APIRouter:
    """Return the routes /tokenize and /detokenize. Both are POST.

    context: what all endpoints share.
    """
    router = APIRouter(tags=["tokens"], route_class=JsonRoute)

    @router.post("/tokenize", responses=documented(Tokenized))
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Return the tokens of a prompt or of a conversation.
        \f
        body: the parsed body, with a prompt or messages.

        Raises NotFound for another model, and InvalidRequest for a body that cannot be served.
        """
        check_model(context, body.model)
        turns = len(body.prompt or "") + sum(len(str(turn.content)) for turn in body.messages or ())
        tokens = await context.in_thread(turns, tokens_of, context, body)
        return {"count": len(tokens), "max_model_len": context.model.max_positions, "tokens": tokens}

    @router.post("/detokenize", responses=documented(Detokenized))
    async def detokenize(body: DetokenizeBody) -> dict[str, str]:
        """Return the text of tokens; control tokens have no text.
        \f
        body: the parsed body; no tokens have the text "".

        Raises NotFound for another model, InvalidRequest for a number that is no token of the model's, and
        ContextLengthExceeded for as many tokens as the model's context, or more.
        """
        check_model(context, body.model)
        check_length(context.model.max_positions, len(body.tokens))
        smallest_id, largest_id = min(body.tokens, default=0), max(body.tokens, default=0)
        if smallest_id < 0 or largest_id > context.text.largest:
            wrong = smallest_id if smallest_id < 0 else largest_id
            raise InvalidRequest(
                f"tokens: {wrong} is no token of the model's, 0 .. {context.text.largest}", "tokens"
            )
        return {"prompt": context.text.decode(body.tokens)}

    _ = tokenize, detokenize
    return router


def check_model(context: HttpContext, name: str | None) -> None:
    """Check that the model of this name is served. None and "" stand for the only model.

    context: what all endpoints share.
    name: the model's name in the body.

    Raises NotFound for any other name.
    """
    if name and name not in names_of(context):
        raise NotFound(f"no model named {name!r} here, only {context.model.name!r}")


def tokens_of(context: HttpContext, body: TokenizeBody) -> tuple[int, ...]:
    """Return the token ids that a body asks for. A prompt gets the tokenizer's own tokens unless the body
    asks for none; messages are rendered by the template.

    context: what all endpoints share.
    body: the parsed body, with a prompt or messages.

    Raises InvalidRequest if the body has both or neither, or if the template refuses the messages, and
    ContextLengthExceeded if the text is too long.
    """
    text = context.text
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("one of prompt and messages must be given", "prompt")
    if body.prompt is not None:
        check_length(context.model.max_positions, characters=len(body.prompt))
        return text.encode_prompt(body.prompt) if body.add_special_tokens else text.encode(body.prompt)
    messages = tuple(message_of(turn, f"messages.{n}") for n, turn in enumerate(body.messages or ()))
    check_length(context.model.max_positions, characters=sum(len(one.content) for one in messages))
    return text.encode(text.render(messages, for_answer=body.add_generation_prompt))
