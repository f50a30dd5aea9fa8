"""Measures the answer times of the real services on one GPU: master, worker and drafter as processes, HTTP
and gRPC.

Everything is the product, as `specsot serve` starts it, except that weights are made up and that the
drafter's acceptance is replayed by node rank (`gpu_drafter`). The clients are in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from specsot.checkpoint.fields import Json
from specsot.params import Ask, DrafterName, Limits, Sampling
from specsot_app.fleet.demo import small_pair
from specsot_app.fleet.options import ClientOptions, FleetOptions, Models
from specsot_app.fleet.processes import (
    ChildProcess,
    end_all,
    free_port,
    ignore_missing,
    ignore_output,
    ready_client,
    start,
    unless_one_ends,
)
from specsot_app.fleet.service_specs import PRIVATE, Service, processes_of, services_of
from specsot_app.runtime import run_until_signal
from specsot_bench.results import Stopwatch, now
from specsot_lab.bench.clients import LoadLevel, RequestTimes, ask_at_once
from specsot_lab.bench.gpu_drafts import VOCABULARY
from specsot_lab.bench.synthetic_models import SHAPES, MadeUp, NextTokenWeights

# The files of a tokenizer.
LENT_FILES: Final = ("tokenizer.json", "tokenizer_config.json")
# Layers of a weight file.
LAYERS_PER_FILE: Final = 4
# Entries of every config that is written.
ENDS: Final = {"bos_token_id": 0, "eos_token_id": 2, "torch_dtype": "bfloat16"}

# The shape of each tensor, by its name.
Shapes = dict[str, tuple[int, ...]]


def write_base(folder: Path, config: Json, tokenizer_source: Path, device: str = "cuda") -> Path:
    """Write the directory of a base model with made-up weights, and return it.

    folder: The directory, which must not exist.
    config: A Llama shape, one of SHAPES.
    tokenizer_source: The directory whose tokenizer is copied.
    device: Where tensors are made.

    The weights make the model predict the next higher token id, in bf16; files are safetensors with an index.
    Raises FileExistsError if the directory exists.
    """
    folder.mkdir(parents=True)
    weights = NextTokenWeights()
    files_by_tensor = dict[str, str]()
    for number, shapes in enumerate(_file_shapes(config)):
        name = f"model-{number:05}.safetensors"
        save_file(_made_tensors(weights, shapes, device), folder / name)
        files_by_tensor |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files_by_tensor})
    )
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config, **ENDS}))
    for name in LENT_FILES:
        shutil.copy(tokenizer_source / name, folder / name)
    return folder


def write_head(folder: Path, config: Json, device: str = "cuda") -> Path:
    """Write the directory of an EAGLE-3 head of one layer for such a base model, and return it.

    folder: The directory, which must not exist.
    config: The shape of the base model.
    device: Where tensors are made.

    The draft ids are the first VOCABULARY token ids, or all if the base model has fewer. The head has an
    lm_head of its own and reads three taps. Raises FileExistsError if the directory exists.
    """
    folder.mkdir(parents=True)
    hidden = config["hidden_size"]
    vocab = min(VOCABULARY, config["vocab_size"])
    shapes = {
        f"midlayer.{name}": shape
        for name, shape in _layer_shapes(config, 2 * hidden).items()
        if "input" not in name
    }
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    tensors = _made_tensors(MadeUp(), shapes, device)
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.long)
    tensors["t2d"] = torch.arange(config["vocab_size"]) < vocab
    save_file(tensors, folder / "model.safetensors")
    head_config = {
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab,
        "architectures": ["LlamaForCausalLMEagle3"],
    }
    (folder / "config.json").write_text(json.dumps({**config, **ENDS, **head_config}))
    return folder


def _file_shapes(config: Json) -> Iterator[Shapes]:
    """Yield the shapes of the tensors of each weight file. The first one has the embedding, and the lm_head,
    which is made from it; the others have LAYERS_PER_FILE layers each, the last one perhaps fewer.

    config: The shape of the base model.

    The first file also has the weight of the last norm.
    """
    embedding_shape = (config["vocab_size"], config["hidden_size"])
    yield {
        "model.embed_tokens.weight": embedding_shape,
        "lm_head.weight": embedding_shape,
        "model.norm.weight": (config["hidden_size"],),
    }
    for first in range(0, config["num_hidden_layers"], LAYERS_PER_FILE):
        yield {
            f"model.layers.{layer}.{name}": shape
            for layer in range(first, min(first + LAYERS_PER_FILE, config["num_hidden_layers"]))
            for name, shape in _layer_shapes(config, config["hidden_size"]).items()
        }


def _layer_shapes(config: Json, inputs: int) -> Shapes:
    """Return the shapes of the tensors of one layer.

    config: The shape of the base model.
    inputs: Columns of the input of its attention.

    The keys are the tensors' names within a layer, such as "self_attn.q_proj.weight". `inputs` is the model's
    hidden size for a layer of the base model, and twice that for the layer of an EAGLE-3 head. Linear weights
    are [outputs, inputs].
    """
    hidden = config["hidden_size"]
    intermediate = config["intermediate_size"]
    dim = config["head_dim"]
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": (q, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _made_tensors(weights: MadeUp, shapes: Shapes, device: str) -> dict[str, Tensor]:
    """Return made-up tensors on the host, in bf16.

    weights: Makes up the tensors.
    shapes: The tensors' shapes, by name.
    device: Where tensors are made.
    """
    return {name: weights.expect(name, shape, torch.bfloat16, device).cpu() for name, shape in shapes.items()}


# Figures by name.
Row = dict[str, object]
# Whether the tuner decides how large trees are, or trees are always whole.
TreeKind = Literal["tuned", "fixed"]

# Numbers of simultaneous clients.
CLIENTS: Final = (1, 8, 64)
# Tokens of an answer, by the number of clients.
TOKENS: Final = {1: 384, 8: 256, 64: 128}
# Requests of each client, by the number of clients.
PER_CLIENT: Final = {1: 3, 8: 2, 64: 2}
# The question of a request; its number makes it differ from all others.
QUESTION: Final = "Question {number}: how would you explain the subject to somebody new to it?"
# Bytes for KV, as the flag --kv-memory gets them.
KV_MEMORY: Final = str(16 << 30)
# Bytes. Weights are written to a folder in memory if more than this is free there. Untuned.
MIN_FREE_BYTES: Final = 40 << 30
# The module that replaces the drafter's service, see `gpu_drafter`.
DRAFTER: Final = "specsot_lab.bench.gpu_drafter"
# Requests of each drafter that are not counted, so that kernels are compiled. Untuned.
WARM_REQUESTS: Final = 4


@dataclass(frozen=True, slots=True)
class DraftingSetup:
    """How a fleet drafts, and which drafters its requests choose.

    label: Appended to the names of rows.
    tree: "tuned" or "fixed" trees.
    drafters: The drafters that requests choose, in turns.
    replays_acceptance: True if acceptance is replayed by node rank, as published; False: made-up weights
        decide, so nearly no draft is right.
    """

    label: str
    tree: TreeKind
    drafters: tuple[DrafterName, ...]
    replays_acceptance: bool = True


# The setups that are measured, one after another.
FLEETS: Final = (
    DraftingSetup("", "tuned", ("none", "eagle")),
    DraftingSetup(", whole trees", "fixed", ("none", "eagle")),
    DraftingSetup(", never right", "tuned", ("none", "eagle"), replays_acceptance=False),
)


def measure_served(name: str, device: str = "cuda", clients: tuple[int, ...] = CLIENTS) -> Iterator[Row]:
    """Yield the rows of a shape. A whole model is written to a temporary folder, which is removed at the end.

    name: The shape, one of SHAPES.
    device: The device of the services.
    clients: Numbers of simultaneous clients, entries of TOKENS.

    For each of FLEETS, a fleet is started and ended. A signal interrupts the measurement with the error of
    `run_until_signal`. Raises KeyError for an unknown shape or number of clients.
    """
    with tempfile.TemporaryDirectory(prefix="specsot-", dir=_memory_folder()) as folder:
        tokenizer_source = small_pair() / "base"
        base = write_base(Path(folder) / "base", SHAPES[name], tokenizer_source, device)
        head = write_head(Path(folder) / "head", SHAPES[name], device)
        for setup in FLEETS:
            yield from run_until_signal(_measure(base, head, device, clients, setup))


def _memory_folder() -> str | None:
    """Return a folder in memory that has room for the weights; None if there is none, which means the usual
    folder for temporary files.
    """
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > MIN_FREE_BYTES else None


async def _measure(
    base: Path, head: Path, device: str, clients: tuple[int, ...], setup: DraftingSetup
) -> list[Row]:
    """Return the rows of one fleet, which is started for them.

    base: Directory of the base model.
    head: Directory of the head.
    device: The device of the services.
    clients: Numbers of simultaneous clients.
    setup: How the fleet drafts.

    For each number of clients and each drafter of the setup, there is one row of gRPC and one of HTTP.
    WARM_REQUESTS requests of each drafter, and one request per client before each level, are not counted.
    """
    rows: list[Row] = []
    async with fleet_of(base, head, device, setup) as (grpc, http):
        endpoints: dict[str, FleetClients] = {"gRPC": GrpcClients(grpc), "HTTP": HttpClients(http)}
        for drafter in setup.drafters:
            await endpoints["gRPC"].ask(1, 99, WARM_REQUESTS, drafter)
        for num_clients, drafter in itertools.product(clients, setup.drafters):
            label = f"drafter {drafter}{setup.label}"
            await endpoints["gRPC"].ask(num_clients, 32, num_clients, drafter)
            for endpoint, endpoint_clients in endpoints.items():
                level = await endpoint_clients.ask(
                    num_clients, TOKENS[num_clients], PER_CLIENT[num_clients] * num_clients, drafter
                )
                rows.append(row_of(level, endpoint, label, TOKENS[num_clients]))
    return rows


def row_of(level: LoadLevel, endpoint: str, label: str, tokens: int) -> Row:
    """Return a level as a row of milliseconds, medians and 99th percentiles. A figure is None if there were
    no values.

    level: The times of the requests.
    endpoint: "gRPC" or "HTTP".
    label: What drafted.
    tokens: Tokens of an answer.

    The entries are "what", "requests" (the number of clients), "answers" (tokens of an answer), "tokens/s",
    "errors" (the number of requests that failed), and the times from sending to the first text, per token,
    and between texts.
    """
    figures = level.row()
    row: Row = {"what": f"served, {endpoint}, {label}", "requests": level.clients, "answers": tokens}
    row |= {"tokens/s": figures["tokens_per_second"], "errors": figures["errors"]}
    for name, key in (
        ("first text", "first_text_seconds"),
        ("a token", "per_token_seconds"),
        ("between texts", "between_texts_seconds"),
    ):
        spread = figures[key]
        assert isinstance(spread, dict)
        row |= {
            f"{name} ms, {which}": None if seconds is None else round(1e3 * seconds, 2)
            for which, seconds in spread.items()
        }
    return row


@asynccontextmanager
async def fleet_of(
    base: Path, head: Path, device: str, setup: DraftingSetup
) -> AsyncGenerator[tuple[str, str]]:
    """Yield the addresses of a fleet of processes: that of gRPC, and that of HTTP. The fleet is ended with
    the context.

    base: Directory of the base model.
    head: Directory of the head.
    device: The device of the services.
    setup: How the fleet drafts.

    The fleet has one stage, its drafter and the HTTP server, each in a process of its own, with ports that
    were free. If a process ends before the fleet is ready, an error is raised. With
    `setup.replays_acceptance`, the drafter's service is replaced by `gpu_drafter`.
    """
    options = FleetOptions(
        kind="processes", model=str(base), draft_model=str(head), device=device, stages=1, tree=setup.tree
    )
    serving = replace(PRIVATE, members=("--kv-memory", KV_MEMORY))
    models = Models(base, head, (), "eagle")
    port = free_port()
    http = free_port()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specsot-")))
        children: list[ChildProcess] = []
        stack.push_async_callback(end_all, children)
        services = services_of(options, models, port, folder, http, serving)
        services = (
            [_with_replayed_acceptance(service) for service in services]
            if setup.replays_acceptance
            else services
        )
        for service in processes_of(services):
            children.append(await start(service, ignore_output))
        whole = ready_client(services, ClientOptions(), None, ignore_missing)
        client = await unless_one_ends(children, whole)
        stack.push_async_callback(client.close)
        yield children[0].service.address, f"127.0.0.1:{http}"


def _with_replayed_acceptance(service: Service) -> Service:
    """Return the drafter's service with replayed acceptance; any other service is returned unchanged.

    service: The service.
    """
    return replace(service, module=DRAFTER) if service.module == "specsot_drafter" else service


class FleetClients(Protocol):
    """Clients of one endpoint of a fleet."""

    async def ask(self, clients: int, tokens: int, requests: int, drafter: DrafterName) -> LoadLevel:
        """Return the times of requests of simultaneous clients. A client that is free sends the next request.

        clients: Number of clients.
        tokens: Tokens of each answer.
        requests: Number of requests of all clients together.
        drafter: The drafter that the requests choose.
        """
        ...


@dataclass(slots=True)
class GrpcClients:
    """Clients of the gRPC endpoint.

    address: The endpoint, host:port.
    """

    address: str

    async def ask(self, clients: int, tokens: int, requests: int, drafter: DrafterName) -> LoadLevel:
        """Return the times of requests of simultaneous clients over gRPC.

        clients: Number of clients.
        tokens: Tokens of each answer.
        requests: Number of requests of all clients together.
        drafter: The drafter that the requests choose.

        Requests are direct answers, greedy, which ignore the model's end. Every question differs, by a number
        that counts from 0 in each call.
        """

        def request_of(number: int) -> Ask:
            """Return a request.

            number: The number of the request, which makes its question differ from others.
            """
            limits, prompt = Limits(max_new_tokens=tokens), QUESTION.format(number=number)
            greedy = Sampling(temperature=0.0)
            return Ask(
                prompt=prompt, mode="direct", drafter=drafter, limits=limits, sampling=greedy, ignore_eos=True
            )

        return await ask_at_once(self.address, clients, iter(range(requests)), request_of)


@dataclass(slots=True)
class HttpClients:
    """Clients of the HTTP endpoint.

    address: The endpoint, host:port.
    """

    address: str

    async def ask(self, clients: int, tokens: int, requests: int, drafter: DrafterName) -> LoadLevel:
        """Return the times of requests of simultaneous clients over HTTP.

        clients: Number of clients.
        tokens: Tokens of each answer.
        requests: Number of requests of all clients together.
        drafter: The drafter that the requests choose.

        The body of the requests is that of `_body`, and each request has a connection of its own. A request
        that fails has an error in its times and does not end the run; a connection that cannot be opened
        does, with OSError.
        """
        numbers, watch = iter(range(requests)), Stopwatch()

        async def run_client() -> list[RequestTimes]:
            """Send requests one after another until the numbers run out, and return their times; [] if no
            number was left.
            """
            return [await _ask_http(self.address, _body(number, tokens, drafter)) for number in numbers]

        times = await asyncio.gather(*(run_client() for _ in range(clients)))
        return LoadLevel(clients, watch.seconds, tuple(itertools.chain(*times)))


def _body(number: int, tokens: int, drafter: DrafterName) -> bytes:
    """Return the body of a streamed chat completion, in JSON.

    number: The number of the request, which makes its question differ from others.
    tokens: Tokens of the answer.
    drafter: The drafter that the request chooses.
    """
    body = {
        "messages": [{"role": "user", "content": QUESTION.format(number=number)}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "specsot": {"mode": "direct", "drafter": drafter},
    }
    return json.dumps(body).encode()


async def _ask_http(address: str, body: bytes) -> RequestTimes:
    """Return the times of one streamed chat completion over a connection of its own. If the status is not
    200, the error has the status line and the end of the response.

    address: The endpoint, host:port.
    body: The request's body.

    The times are when the request was sent, when the response ended, and when each event with a non-empty
    content arrived; tokens is the "completion_tokens" of the usage, 0 if none came. The error is None for the
    status 200, also if no text came. Lines that are not "data: {...}" are skipped. Raises OSError if the
    server cannot be reached.
    """
    host, port = address.split(":")
    sent_at = now()
    text_times = list[float]()
    tokens = 0
    error = None
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    status = await reader.readline()
    if b" 200 " not in status:
        error = status.decode().strip() + (await reader.read(2000)).decode(errors="replace")[-300:]
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if any(choice.get("delta", {}).get("content") for choice in event.get("choices", ())):
            text_times.append(now())
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    writer.close()
    return RequestTimes(sent_at, now(), tuple(text_times), tokens, error)
