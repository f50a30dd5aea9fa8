"""The options that services and commands share: what a process is, what it loads, how it drafts.

Each is read once, in `__main__` or by a command, and passed on as an argument.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from specsot.checkpoint.config import require_torch
from specsot.checkpoint.resolving import resolve_draft, resolve_model
from specsot.drafting import DraftOptions
from specsot.errors import InvalidRequest
from specsot.members import (
    KvDtype,
    Overrides,
    Quantization,
    QuantizationChoice,
    Range,
    WeightFormat,
)
from specsot.params import DrafterName
from specsot.service.option_table import MEMORY, SECONDS, Kind, Offer, Tier, option
from specsot.transport.security import PLAIN, Tls, exposed

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "fp32", "bf16", "fp16"]

# Bytes. Memory for KV pages of each worker and drafter process, by default. Untuned.
SERVICE_KV_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """Options of every service: where it listens, how it logs, what it reports, how it stops.

    HEADING: the group of these options in --help.
    TIER: "expert", so that `--help` shows only the options that say otherwise.
    tls: the service's TLS files. Without any, connections are not encrypted.
    """

    HEADING: ClassVar[str] = "Service"
    TIER: ClassVar[Tier] = "expert"

    listen: str = option(
        "127.0.0.1:0",
        "Address to serve on: host:port (port 0: any free port) or unix:path.",
        metavar="ADDRESS",
        tier="common",
    )
    log_format: LogFormat = option("console", "Format of log lines.")
    log_level: LogLevel = option("info", "Minimum severity of log lines.", tier="common")
    grace: float = option(5.0, "Seconds that running work has to finish after SIGTERM.", kind=SECONDS)
    metrics: str | None = option(
        None,
        "Serve Prometheus metrics on this host:port (port 0: any free port).",
        metavar="ADDRESS",
        tier="common",
    )
    reflection: bool | None = option(
        None, "Serve gRPC reflection.", unset="on, where clients need no certificate or token"
    )
    channelz: bool = option(False, "Serve gRPC channelz, to inspect connections.")
    tls: Tls = PLAIN
    insecure: bool = option(False, "Allow access from other machines without certificates or tokens.")

    def check(self) -> None:
        """Raise InvalidRequest if other machines could read the metrics and neither TLS nor --insecure is
        given. Do nothing without an address of metrics.
        """
        self.check_exposure("metrics", self.metrics, "--tls-cert and --tls-key", self.tls.cert is not None)

    def check_exposure(self, flag: str, address: str | None, needs: str, secured: bool) -> None:
        """Raise InvalidRequest if other machines could reach an unsecured address and --insecure is not
        given.

        An address without a port is not checked; opening it fails later.

        flag: the option that names the address, without dashes in front.
        address: the address, or None, which is not checked.
        needs: the options that would secure the address, for the error message.
        secured: True if these options are given.
        """
        is_exposed = address is not None and ":" in address and exposed(address)
        if is_exposed and not secured and not self.insecure:
            raise InvalidRequest(f"--{flag} {address} is open to other machines: give {needs}, or --insecure")


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """Options with which a worker or drafter takes part in a fleet.

    HEADING: the group of these options in --help.
    """

    HEADING: ClassVar[str] = "Fleet"

    master: str = option("127.0.0.1:50050", "Master to join.", metavar="HOST:PORT")
    advertise: str | None = option(
        None, "Address at which peers reach this member.", metavar="ADDRESS", unset="--listen"
    )
    name: str | None = option(None, "Name in the fleet.", unset="the advertised address")


def check_member(service: ServiceOptions) -> None:
    """Check the service options of a worker or drafter, whose connections need certificates on both sides.

    service: the service options of the process.

    Raises InvalidRequest if only some of the certificate, the key and the CA are given, if another machine
    could reach an unsecured address without --insecure, or if another machine could read unsecured metrics,
    ModelError if torch is missing.
    """
    require_torch()
    service.check()
    if service.tls != PLAIN and not service.tls.mutual:
        raise InvalidRequest(
            "--tls-cert, --tls-key and --tls-ca must be given together, because members verify each other"
        )
    needs = "--tls-cert, --tls-key and --tls-ca"
    service.check_exposure("listen", service.listen, needs, service.tls.mutual)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of the base model: its files, and the types in which it is stored and computed.

    HEADING: the group of these options in --help.
    kv_memory: bytes for KV pages of each worker, and of the drafter. None: SERVICE_KV_MEMORY, or less in a
        fleet within one process.
    device: the torch device. For "cuda" without a number, the master chooses among the machine's GPUs.
    """

    HEADING: ClassVar[str] = "Model"

    model: str | Path | None = option(
        None,
        "Base model: a directory, a GGUF file, or owner/name[@revision] on the hub.",
        metavar="MODEL",
        unset="the demo model",
    )
    model_format: WeightFormat = option(
        "safetensors",
        "`bin` reads pytorch_model.bin (weights only) if there are no safetensors files.",
        tier="expert",
    )
    dtype: Dtype = option("auto", "Data type to compute in.")
    quantization: QuantizationChoice | None = option(
        None,
        "Quantize the model's weights; `none` keeps them in --dtype.",
        unset="with --dtype auto as they are published, int8 for a quantized GGUF file on a CPU; else none",
    )
    kv_cache_dtype: KvDtype = option(
        "auto", "Data type of KV pages; `int8` has one scale per row and head.", tier="expert"
    )
    kv_memory: int | None = option(
        None,
        "Memory for the KV pages of each worker, and of the drafter, such as 512M or 4G.",
        kind=MEMORY,
        unset="on GPUs what requests can use, at most 4/5 of what is free; on a CPU 1G "
        "(512M in one process), at most 1/4",
    )
    batch_invariant: bool = option(
        False,
        "On GPUs: make each row's result independent of the rows computed with it, bit for bit. Slower.",
        tier="expert",
    )
    draft_invariant: bool | None = option(
        None,
        "On GPUs: with one client, drafts change no token of a greedy 16-bit answer.",
        unset="on where the kernels can do it",
        tier="expert",
        paired=True,
    )
    device: str = option("cpu", "Torch device, such as cpu, cuda or cuda:0.")
    tensor_parallel: int = option(
        1,
        "Split each layer over this many GPUs of the host: --device cuda:0 and those that follow it.",
        metavar="N",
    )

    @property
    def base(self) -> Path:
        """Return the model's directory. The text files of a model on the hub are fetched.

        Raises ModelError if the model is invalid, InvalidRequest if none was given.
        """
        if self.model is None:
            raise InvalidRequest("a model directory is needed", "model")
        return resolve_model(self.model)

    @property
    def stored_form(self) -> Quantization | None:
        """Return the form in which matrices are stored: --quantization. None if they stay in floats."""
        return None if self.quantization == "none" else self.quantization

    @property
    def page_bytes(self) -> int:
        """Bytes for KV pages: --kv-memory, else SERVICE_KV_MEMORY."""
        return SERVICE_KV_MEMORY if self.kv_memory is None else self.kv_memory


@dataclass(frozen=True, slots=True)
class DraftModelOptions(ModelOptions):
    """Options of the drafter, in addition to those of the base model.

    HEADING: the group of these options in --help.
    TIER: "expert", so that `--help` shows only the options that say otherwise.
    overrides: corrections of a draft head's published config.
    draft_kv_memory: bytes for KV pages of the drafter. None: `kv_memory`.
    draft_dtype: the type in which the drafter computes. None: the base model's.
    drafting: the shape of draft trees, and the policy that decides how large they are.
    """

    HEADING: ClassVar[str] = "Speculative decoding"
    TIER: ClassVar[Tier] = "expert"

    drafter: DrafterName | None = option(
        None,
        "What drafts: an EAGLE or DFlash head, an MTP layer, a small model, n-grams or suffixes of the text, "
        "or nothing.",
        unset="what the draft model is; without one, suffix in one process on a CPU, otherwise none",
        tier="common",
    )
    draft_model: str | Path | None = option(
        None,
        "EAGLE head, MTP layer or small model: a directory, a GGUF file, a name on the hub like --model, or "
        "the name of a head that SpecSoT publishes, such as qwen2.5-coder-1.5b.",
        metavar="MODEL",
        tier="common",
    )
    draft_format: WeightFormat = option("safetensors", "Like --model-format, for the draft model.")
    overrides: Overrides = field(default_factory=Overrides)
    draft_kv_memory: int | None = option(
        None, "Memory for the KV pages of the drafter.", kind=MEMORY, unset="--kv-memory"
    )
    draft_dtype: Dtype | None = option(None, "Data type the drafter computes in.", unset="--dtype")
    draft_quantization: Quantization | None = option(
        None,
        "Quantize the draft model's weights.",
        unset="none; on a CPU, if the base model has int8 or int4: int4 for a small model, int8 for a head",
    )
    drafting: DraftOptions = field(default_factory=DraftOptions)

    @property
    def drafts(self) -> DrafterName:
        """What drafts: --drafter, else "eagle" if there is a draft model, else "none"."""
        return self.drafter or ("none" if self.draft_model is None else "eagle")

    @property
    def draft(self) -> Path:
        """Return the draft model's directory. The text files of a model on the hub, and a head that the
        release has by that name, are fetched.

        Without a draft model, drafter "mtp" has the directory of the base model.

        Raises ModelError if the draft model is invalid, InvalidRequest if none was given.
        """
        if self.draft_model is None and self.drafts == "mtp":
            return self.base
        if self.draft_model is None:
            raise InvalidRequest(f"drafter {self.drafts} needs a draft_model", "draft_model")
        resolve = resolve_model if self.drafts in ("model", "mtp") else resolve_draft
        return resolve(self.draft_model)

    @property
    def drafter_dtype(self) -> Dtype:
        """The type in which the drafter computes: that of the base model unless it has its own."""
        return self.draft_dtype or self.dtype

    @property
    def drafter_quantization(self) -> Quantization | None:
        """Return the quantization of the draft model. None if its weights are not quantized.

        By default, on a CPU, the draft model is quantized if the base model is stored in 8 or 4 bits: drafts
        do not change the output, and on a CPU drafting takes as long as reading the weights. A small language
        model is then stored in 4 bits, and a head, which is much smaller, in 8 bits. Measured with
        Qwen2.5-Coder-0.5B as draft model of the 1.5B (chains of 3): with 4 instead of 8 bits, a step has 2.68
        instead of 2.70 accepted tokens, and drafting reads 0.59 of the bytes.
        """
        packed = self.device == "cpu" and self.quantization in ("int8", "int4")
        default = "int4" if self.drafts == "model" else "int8"
        return self.draft_quantization or (default if packed else None)


# What applies without --model, for --help.
LENT = "from a worker that has it"
# The options of a worker's and of a drafter's process. A fleet that starts such a process passes the same
# flags.
OF_WORKER = Offer(
    only=tuple(ModelOptions.__dataclass_fields__),
    defaults={"model": None, "kv_memory": SERVICE_KV_MEMORY},
    unset={"model": LENT},
)
# The options of a drafter's process, see OF_WORKER.
OF_DRAFTER = Offer(
    only=tuple(DraftModelOptions.__dataclass_fields__),
    without=(
        "dtype", "quantization", "kv_cache_dtype", "batch_invariant", "draft_invariant", "tensor_parallel",
        "draft_kv_memory",
    ),
    defaults={
        "model": None, "kv_memory": SERVICE_KV_MEMORY, "drafter": "eagle", "draft_dtype": "auto",
    },
    unset={"model": LENT},
    flags={"draft_dtype": "dtype", "draft_quantization": "quantization"},
    choices={"drafter": ("eagle", "mtp", "model", "suffix", "ngram")},
)  # fmt: skip


def layers(text: str) -> Range:
    """Return a layer range: "0:4" means the layers 0, 1, 2, 3.

    text: "first:last", with the number of the layer after the last one.

    Raises ValueError for any other text, such as one with spaces or signs, and if `first` is not less than
    `last`.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"{text!r} is no layer range; write first:last, such as 0:4")
    return Range(int(match[1]), int(match[2]))


# A layer range, such as 0:4.
LAYERS = Kind("FIRST:LAST", layers)


def reachable(advertise: str | None, listen: str, port: int) -> str:
    """Return the address at which peers reach a service: --advertise, else the address on which it listens.

    If the service listens on all interfaces, the address has the machine's name as its host.

    advertise: the value of --advertise, or None.
    listen: the value of --listen, host:port or unix:path.
    port: the port on which the service listens.

    The value of --advertise is returned as it is. An address unix:path is returned as it is too. Of any other
    address, `port` replaces the port of `listen`, which may be 0.
    """
    if advertise:
        return advertise
    if listen.startswith("unix:"):
        return listen
    host = listen.rpartition(":")[0]
    all_interfaces = host in ("", "0.0.0.0", "[::]")
    return f"{os.uname().nodename if all_interfaces else host}:{port}"


def name_of(name: str | None, address: str) -> str:
    """Return a member's name: --name, else the file name of its unix socket, else its address.

    name: the value of --name, or None.
    address: the address where other members reach the member.
    """
    return name or (address.rpartition("/")[2] if address.startswith("unix:") else address)
