"""What clients feel of the real services on one GPU: master, worker and drafter as processes, HTTP and gRPC.

Everything is the product, as `specsot serve` starts it, but that weights
are made up and the drafter's acceptance is replayed by node rank (`gpu_drafter`). Clients are this process.
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
from typing import Literal, Protocol

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
from specsot_lab.bench.synthetic_models import SHAPES, MadeUp, Telling

LENT = ("tokenizer.json", "tokenizer_config.json")
EACH = 4  # layers of a file
ENDS = {"bos_token_id": 0, "eos_token_id": 2, "torch_dtype": "bfloat16"}

Shapes = dict[str, tuple[int, ...]]


def write_base(folder: Path, config: Json, lender: Path, device: str = "cuda") -> Path:
    """Write the directory of a base with made-up weights, and return it. config: one of SHAPES, a Llama's.
    lender: the directory whose tokenizer it gets. device: on which tensors are made.
    """
    folder.mkdir(parents=True)
    made = Telling()
    index = dict[str, str]()
    for number, shapes in enumerate(_files(config)):
        name = f"model-{number:05}.safetensors"
        save_file(_made(made, shapes, device), folder / name)
        index |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config, **ENDS}))
    for name in LENT:
        shutil.copy(lender / name, folder / name)
    return folder


def write_head(folder: Path, config: Json, device: str = "cuda") -> Path:
    """Write the directory of an EAGLE-3 head of one layer for such a base, and return it."""
    folder.mkdir(parents=True)
    hidden = config["hidden_size"]
    vocab = min(VOCABULARY, config["vocab_size"])
    shapes = {
        f"midlayer.{name}": shape for name, shape in _layer(config, 2 * hidden).items() if "input" not in name
    }
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
    shapes |= {"fc.weight": (hidden, 3 * hidden), "norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    tensors = _made(MadeUp(), shapes, device)
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.long)
    tensors["t2d"] = torch.arange(config["vocab_size"]) < vocab
    save_file(tensors, folder / "model.safetensors")
    told = {"num_hidden_layers": 1, "draft_vocab_size": vocab, "architectures": ["LlamaForCausalLMEagle3"]}
    (folder / "config.json").write_text(json.dumps({**config, **ENDS, **told}))
    return folder


def _files(config: Json) -> Iterator[Shapes]:
    """Yield the shapes of the tensors of each file: the embedding with lm_head, which is made of it; then
    some layers each.
    """
    wide = (config["vocab_size"], config["hidden_size"])
    yield {
        "model.embed_tokens.weight": wide,
        "lm_head.weight": wide,
        "model.norm.weight": (config["hidden_size"],),
    }
    for first in range(0, config["num_hidden_layers"], EACH):
        yield {
            f"model.layers.{layer}.{name}": shape
            for layer in range(first, min(first + EACH, config["num_hidden_layers"]))
            for name, shape in _layer(config, config["hidden_size"]).items()
        }


def _layer(config: Json, inputs: int) -> Shapes:
    """Return the shapes of the tensors of one layer. inputs: columns of its attention's input."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    dim = config["head_dim"]
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": (q, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def _made(made: MadeUp, shapes: Shapes, device: str) -> dict[str, Tensor]:
    """Return tensors of these shapes on the host, in bf16."""
    return {name: made.expect(name, shape, torch.bfloat16, device).cpu() for name, shape in shapes.items()}


Row = dict[str, object]
Tree = Literal["tuned", "fixed"]

CLIENTS = (1, 8, 64)
TOKENS = {1: 384, 8: 256, 64: 128}  # of an answer, by how many ask at once
PER_CLIENT = {1: 3, 8: 2, 64: 2}  # requests
QUESTION = "Question {number}: how would you explain the subject to somebody new to it?"
KV_MEMORY = str(16 << 30)
ROOM = 40 << 30  # bytes of a folder in memory, from which on weights are written there
DRAFTER = "specsot_lab.bench.gpu_drafter"
WARMING = 4


@dataclass(frozen=True, slots=True)
class DraftingFleet:
    """How a fleet drafts, and who is asked for, in turns. right: by node rank, as published; else never."""

    said: str
    tree: Tree
    drafters: tuple[DrafterName, ...]
    right: bool = True


FLEETS = (
    DraftingFleet("", "tuned", ("none", "eagle")),
    DraftingFleet(", whole trees", "fixed", ("none", "eagle")),
    DraftingFleet(", never right", "tuned", ("none", "eagle"), right=False),
)


def measure_served(name: str, device: str = "cuda", clients: tuple[int, ...] = CLIENTS) -> Iterator[Row]:
    """Yield the rows of a shape, by its name. Writes a whole model to a folder of its own, and removes it.
    clients: numbers of clients.
    """
    with tempfile.TemporaryDirectory(prefix="specsot-", dir=_folder()) as folder:
        lent = small_pair() / "base"
        base = write_base(Path(folder) / "base", SHAPES[name], lent, device)
        head = write_head(Path(folder) / "head", SHAPES[name], device)
        for drafts in FLEETS:
            yield from run_until_signal(_measure(base, head, device, clients, drafts))


def _folder() -> str | None:
    """Return a folder in memory, if there is room; else None, which means wherever temporary files go."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > ROOM else None


async def _measure(
    base: Path, head: Path, device: str, clients: tuple[int, ...], drafts: DraftingFleet
) -> list[Row]:
    """Return the rows of one fleet, whose drafter begins anew. drafts: how the fleet drafts."""
    rows: list[Row] = []
    async with fleet_of(base, head, device, drafts) as (grpc, http):
        endpoints: dict[str, FleetClients] = {"gRPC": GrpcClients(grpc), "HTTP": HttpClients(http)}
        for drafter in drafts.drafters:
            await endpoints["gRPC"].ask(1, 99, WARMING, drafter)
        for many, drafter in itertools.product(clients, drafts.drafters):
            said = f"drafter {drafter}{drafts.said}"
            await endpoints["gRPC"].ask(many, 32, many, drafter)
            for endpoint, ways in endpoints.items():
                level = await ways.ask(many, TOKENS[many], PER_CLIENT[many] * many, drafter)
                rows.append(row_of(level, endpoint, said, TOKENS[many]))
    return rows


def row_of(level: LoadLevel, endpoint: str, said: str, tokens: int) -> Row:
    """Return a level as a row of milliseconds, medians and 99th percentiles. endpoint: "gRPC" or "HTTP".
    said: what drafts. tokens: of an answer.
    """
    told = level.row()
    row: Row = {"what": f"served, {endpoint}, {said}", "requests": level.clients, "answers": tokens}
    row |= {"tokens/s": told["tokens_per_second"], "errors": told["errors"]}
    for name, key in (
        ("first text", "first_text_seconds"),
        ("a token", "per_token_seconds"),
        ("between texts", "between_texts_seconds"),
    ):
        spread = told[key]
        assert isinstance(spread, dict)
        row |= {
            f"{name} ms, {which}": None if one is None else round(1e3 * one, 2)
            for which, one in spread.items()
        }
    return row


@asynccontextmanager
async def fleet_of(
    base: Path, head: Path, device: str, drafts: DraftingFleet
) -> AsyncGenerator[tuple[str, str]]:
    """Yield the addresses of a fleet of processes: its gRPC, and its HTTP endpoint."""
    wanted = FleetOptions(
        kind="processes", model=str(base), draft_model=str(head), device=device, stages=1, tree=drafts.tree
    )
    serving = replace(PRIVATE, members=("--kv-memory", KV_MEMORY))
    models = Models(base, head, (), "eagle")
    port = free_port()
    http = free_port()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specsot-")))
        children: list[ChildProcess] = []
        stack.push_async_callback(end_all, children)
        services = services_of(wanted, models, port, folder, http, serving)
        services = [_replaying(one) for one in services] if drafts.right else services
        for service in processes_of(services):
            children.append(await start(service, ignore_output))
        whole = ready_client(services, ClientOptions(), None, ignore_missing)
        client = await unless_one_ends(children, whole)
        stack.push_async_callback(client.close)
        yield children[0].service.address, f"127.0.0.1:{http}"


def _replaying(service: Service) -> Service:
    """Return the drafter's service with replayed acceptance; any other service unchanged."""
    return replace(service, module=DRAFTER) if service.module == "specsot_drafter" else service


class FleetClients(Protocol):
    """Clients of one endpoint."""

    async def ask(self, clients: int, tokens: int, requests: int, drafter: DrafterName) -> LoadLevel:
        """Return the times of so many requests by so many clients at once. tokens: of each answer. drafter:
        what drafts.
        """
        ...


@dataclass(slots=True)
class GrpcClients:
    """Clients of the gRPC endpoint."""

    address: str

    async def ask(self, clients: int, tokens: int, requests: int, drafter: DrafterName) -> LoadLevel:
        """Return the times of so many requests by so many clients at once. tokens: of each answer. drafter:
        what drafts.
        """

        def one(number: int) -> Ask:
            """Return the request of this number."""
            limits, prompt = Limits(max_new_tokens=tokens), QUESTION.format(number=number)
            greedy = Sampling(temperature=0.0)
            return Ask(
                prompt=prompt, mode="direct", drafter=drafter, limits=limits, sampling=greedy, ignore_eos=True
            )

        return await ask_at_once(self.address, clients, iter(range(requests)), one)


@dataclass(slots=True)
class HttpClients:
    """Clients of the HTTP endpoint."""

    address: str

    async def ask(self, clients: int, tokens: int, requests: int, drafter: DrafterName) -> LoadLevel:
        """Return the times of so many requests by so many clients at once. tokens: of each answer. drafter:
        what drafts.
        """
        numbers, watch = iter(range(requests)), Stopwatch()

        async def client() -> list[RequestTimes]:
            """Ask until the numbers run out, and return the times."""
            return [await _ask_http(self.address, _body(number, tokens, drafter)) for number in numbers]

        heard = await asyncio.gather(*(client() for _ in range(clients)))
        return LoadLevel(clients, watch.seconds, tuple(itertools.chain(*heard)))


def _body(number: int, tokens: int, drafter: DrafterName) -> bytes:
    """Return the body of a streamed chat completion. number: of the question. tokens: of the answer."""
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
    """Return the times of one streamed chat completion over a connection of its own."""
    host, port = address.split(":")
    begun = now()
    texts = list[float]()
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
            texts.append(now())
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    writer.close()
    return RequestTimes(begun, now(), tuple(texts), tokens, error)
