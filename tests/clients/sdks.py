"""Python's clients, each in its own default mode: `python sdks.py URL MODEL [CLIENT ...]`.

One line of JSON for each check. One that returns well works; one that is `refused` must raise those words.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

URL, MODEL, *ONLY = sys.argv[1:]
ROOT = URL.removesuffix("/v1")
HI: list[Any] = [{"role": "user", "content": "What is the sky?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
CHECKS: list[tuple[str, str, str, Callable[[], Any]]] = []


class City(BaseModel):
    """A city."""

    name: str
    population: int


def check(client: str, what: str, refused: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(run: Callable[[], Any]) -> Callable[[], Any]:
        CHECKS.append((client, what, refused, run))
        return run

    return add


# --- openai ---


def openai() -> Any:
    from openai import OpenAI

    return OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120)


@check("openai", "models")
def _() -> None:
    assert MODEL in [one.id for one in openai().models.list()]


@check("openai", "chat, n, seed, stop")
def _() -> None:
    told = openai().chat.completions.create(
        model=MODEL, messages=HI, max_tokens=24, n=2, seed=7, stop=["zzz"]
    )
    assert all(one.message.content for one in told.choices)
    assert len(told.choices) == 2


@check("openai", "streamed chat with usage")
def _() -> None:
    told = list(
        openai().chat.completions.create(
            model=MODEL, messages=HI, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(one.choices[0].delta.content or "" for one in told if one.choices)
    assert told[-1].usage.completion_tokens > 0


@check("openai", "logprobs")
def _() -> None:
    told = openai().chat.completions.create(
        model=MODEL, messages=HI, max_tokens=8, logprobs=True, top_logprobs=2
    )
    assert told.choices[0].logprobs.content[0].top_logprobs


@check("openai", "parse() into pydantic")
def _() -> None:
    told = openai().chat.completions.parse(model=MODEL, messages=HI, max_tokens=80, response_format=City)
    assert isinstance(told.choices[0].message.parsed, City)


@check("openai", "tools: auto, none, required, named, history")
def _() -> None:
    chat = openai().chat.completions
    for choice in ("auto", "none"):
        assert chat.create(model=MODEL, messages=HI, max_tokens=24, tools=TOOLS, tool_choice=choice).choices
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        message = (
            chat.create(model=MODEL, messages=HI, max_tokens=80, tools=TOOLS, tool_choice=choice)
            .choices[0]
            .message
        )
        assert "city" in json.loads(message.tool_calls[0].function.arguments)
    past = [*HI, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}]
    assert chat.create(model=MODEL, messages=past, max_tokens=24, tools=TOOLS).choices


@check("openai", "streamed tools by .stream()")
def _() -> None:
    with openai().chat.completions.stream(
        model=MODEL, messages=HI, max_tokens=80, tools=TOOLS, tool_choice="required"
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.tool_calls


@check("openai", "plan by the model's name, as reasoning_content")
def _() -> None:
    told = openai().chat.completions.create(
        model=f"{MODEL}:sot",
        messages=[{"role": "user", "content": "What are the benefits of regular exercise?"}],
        max_tokens=400,
        stream=True,
    )
    deltas = [one.choices[0].delta for one in told if one.choices]
    assert "".join(getattr(one, "reasoning_content", None) or "" for one in deltas)
    assert "".join(one.content or "" for one in deltas)


@check("openai", "completions, echo with logprobs")
def _() -> None:
    told = openai().completions.create(
        model=MODEL, prompt=["One, two", "A"], max_tokens=1, echo=True, logprobs=1
    )
    assert told.choices[0].logprobs.token_logprobs[0] is None


@check("openai", "responses: text, streamed, history")
def _() -> None:
    client = openai()
    told = client.responses.create(model=MODEL, input="What is the sky?", max_output_tokens=24)
    assert told.output_text
    past = [*HI, *told.output, {"role": "user", "content": "And the sea?"}]
    with client.responses.stream(
        model=MODEL, input=past, instructions="Be brief.", max_output_tokens=24
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text


@check("openai", "responses: functions, parse()")
def _() -> None:
    client = openai()
    tools: list[Any] = [{"type": "function", **WEATHER}]
    told = client.responses.create(
        model=MODEL, input="Weather in Paris?", tools=tools, tool_choice="required", max_output_tokens=80
    )
    (call,) = [one for one in told.output if one.type == "function_call"][:1]
    assert "city" in json.loads(call.arguments)
    past = [
        {"role": "user", "content": "Weather in Paris?"},
        *told.output,
        *(
            {"type": "function_call_output", "call_id": one.call_id, "output": "21 degrees"}
            for one in told.output
            if one.type == "function_call"
        ),
    ]
    assert client.responses.create(model=MODEL, input=past, tools=tools, max_output_tokens=24).id
    parsed = client.responses.parse(model=MODEL, input="A city?", text_format=City, max_output_tokens=80)
    assert isinstance(parsed.output_parsed, City)


@check("openai", "a prompt that is too long", refused="maximum context length")
def _() -> None:
    openai().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "sky " * 9000}])


@check("openai", "previous_response_id", refused="previous_response_id")
def _() -> None:
    openai().responses.create(model=MODEL, input="And then?", previous_response_id="resp_1")


@check("openai", "embeddings", refused="there is nothing at")
def _() -> None:
    openai().embeddings.create(model=MODEL, input="sky")


# --- OpenAI's Agents SDK ---


@check("openai-agents", "an agent with a tool, by responses")
def _() -> None:
    from agents import (
        Agent,
        ModelSettings,
        Runner,
        function_tool,
        set_default_openai_client,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_default_openai_client(AsyncOpenAI(base_url=URL, api_key="none", max_retries=0))
    set_tracing_disabled(True)
    asked: list[str] = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    must = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=300)
    agent = Agent(name="helper", instructions="Help.", tools=[get_weather], model=MODEL, model_settings=must)

    async def run() -> None:
        told = await Runner.run(agent, "What is the weather in Paris?", max_turns=3)
        assert told.final_output is not None
        assert asked
        streamed = Runner.run_streamed(Agent(name="plain", model=MODEL), "What is the sky?")
        assert [one.type async for one in streamed.stream_events()]
        assert streamed.final_output

    asyncio.run(run())


# --- anthropic ---


def claude() -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=ROOT, api_key="none", max_retries=0, timeout=120)


@check("anthropic", "messages, system, stop_sequences")
def _() -> None:
    told = claude().messages.create(
        model=MODEL, messages=HI, system="Be brief.", max_tokens=24, stop_sequences=["zzz"]
    )
    assert told.content[0].text
    assert told.stop_reason in ("end_turn", "max_tokens")
    assert told.usage.output_tokens > 0


@check("anthropic", "streamed")
def _() -> None:
    with claude().messages.stream(model=MODEL, messages=HI, max_tokens=24) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_message().content[0].text


@check("anthropic", "tools: any, tool, results, streamed")
def _() -> None:
    client = claude()
    tools = [{"name": "get_weather", "description": "Weather.", "input_schema": WEATHER["parameters"]}]
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        with client.messages.stream(
            model=MODEL, messages=HI, max_tokens=80, tools=tools, tool_choice=choice
        ) as stream:
            for _ in stream:
                pass
            told = stream.get_final_message()
        (use,) = [one for one in told.content if one.type == "tool_use"][:1]
        assert "city" in use.input
        assert told.stop_reason == "tool_use"
    uses = [one for one in told.content if one.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one.id, "content": "21 degrees"} for one in uses]
    past = [*HI, {"role": "assistant", "content": told.content}, {"role": "user", "content": results}]
    assert client.messages.create(model=MODEL, messages=past, max_tokens=24, tools=tools).id


@check("anthropic", "count_tokens")
def _() -> None:
    assert claude().messages.count_tokens(model=MODEL, messages=HI, system="Be brief.").input_tokens > 5


@check("anthropic", "images", refused="only blocks of text")
def _() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    block = {"type": "image", "source": source}
    claude().messages.create(model=MODEL, messages=[{"role": "user", "content": [block]}], max_tokens=9)


# --- langchain ---


def langchain(**more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=URL, api_key="none", model=MODEL, max_tokens=80, max_retries=0, **more)


@check("langchain-openai", "invoke, stream, batch")
def _() -> None:
    chat = langchain()
    assert chat.invoke("What is the sky?").content
    assert "".join(one.content for one in chat.stream("What is the sky?"))
    assert len(chat.batch(["Hi", "Who?"])) == 2


@check("langchain-openai", "with_structured_output, default and function_calling; bind_tools")
def _() -> None:
    from langchain_core.tools import tool

    chat = langchain()
    assert isinstance(chat.with_structured_output(City).invoke("A city?"), City)
    assert isinstance(chat.with_structured_output(City, method="function_calling").invoke("A city?"), City)

    @tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    assert chat.bind_tools([get_weather], tool_choice="any").invoke("Weather?").tool_calls
    assert chat.bind_tools([get_weather]).invoke("Weather?") is not None


@check("langchain-openai", "use_responses_api")
def _() -> None:
    assert langchain(use_responses_api=True).invoke("What is the sky?").content


# --- litellm ---


@check("litellm", "completion, stream, tools, text_completion")
def _() -> None:
    import litellm

    litellm.suppress_debug_info = True
    where: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 80}
    assert litellm.completion(messages=HI, **where).choices[0].message.content
    assert list(litellm.completion(messages=HI, stream=True, **where))
    called = litellm.completion(messages=HI, tools=TOOLS, tool_choice="required", **where)
    assert called.choices[0].message.tool_calls
    where["model"] = f"text-completion-openai/{MODEL}"
    assert litellm.text_completion(prompt="One, two", **where).choices[0].text


@check("litellm", "responses, anthropic's messages")
def _() -> None:
    import litellm

    where = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none"}
    assert litellm.responses(input="What is the sky?", max_output_tokens=24, **where).output
    where = {"model": f"anthropic/{MODEL}", "api_base": ROOT, "api_key": "none"}
    assert litellm.completion(messages=HI, max_tokens=24, **where).choices[0].message.content


@check("litellm", "a prompt that is too long is ContextWindowExceededError")
def _() -> None:
    import litellm

    try:
        litellm.completion(
            messages=[{"role": "user", "content": "sky " * 9000}],
            model=f"openai/{MODEL}",
            api_base=URL,
            api_key="none",
        )
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("it answered")


# --- instructor, pydantic-ai ---


@check("instructor", "default mode (tools)")
def _() -> None:
    import instructor

    client = instructor.from_openai(openai())
    told = client.chat.completions.create(
        model=MODEL, messages=HI, response_model=City, max_tokens=80, max_retries=0
    )
    assert isinstance(told, City)


@check("instructor", "JSON_SCHEMA")
def _() -> None:
    import instructor

    client = instructor.from_openai(openai(), mode=instructor.Mode.JSON_SCHEMA)
    told = client.chat.completions.create(
        model=MODEL, messages=HI, response_model=City, max_tokens=80, max_retries=0
    )
    assert isinstance(told, City)


def pydantic_agent(**more: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    return Agent(model, model_settings={"max_tokens": 80}, **more)


@check("pydantic-ai", "text, default output_type (tools), NativeOutput")
def _() -> None:
    from pydantic_ai import NativeOutput

    assert pydantic_agent().run_sync("What is the sky?").output
    assert isinstance(pydantic_agent(output_type=City).run_sync("A city?").output, City)
    assert isinstance(pydantic_agent(output_type=NativeOutput(City)).run_sync("A city?").output, City)


def main() -> None:
    for client, what, refused, run in CHECKS:
        if ONLY and client not in ONLY:
            continue
        told = {"client": client, "what": what, "state": "works", "why": ""}
        try:
            run()
            if refused:
                told |= {"state": "fails", "why": "it was not refused"}
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            state = "refused" if refused and refused in why else "fails"
            told |= {
                "state": state,
                "why": f"{type(error).__name__}: ... {refused}" if state == "refused" else why[:300],
            }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
