"""What a master is started with, read once.

Refuses to know how a ring is formed from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specsot.errors import InvalidRequest
from specsot.members import COMM_MODES, TRANSPORTS, TreeShape
from specsot.params import DRAFTERS, MODES, Mode
from specsot.process.flags import Flags, above_zero, host_names, positive, seconds
from specsot.process.setting import Setting, add_setting, check_exposure, read_setting
from specsot.rpc.pulse import Pulse
from specsot.rpc.tokens import Tokens
from specsot_master.assembly import MasterSettings
from specsot_master.conductor import ConductorConfig
from specsot_master.fleet.wishes import TAKE_OVER_AFTER


@dataclass(frozen=True, slots=True)
class MasterConfig:
    """setting: its process. ring: what it makes of its members. http: where it serves HTTP, if at all.

    fleet_listen: where members come in; None: where clients do. tokens: what clients must show, if anything.
    stuck_after: seconds without a lap, while there is work, after which it does not serve.
    pulse: how often members and it say that they live, and when silence means that one is lost.
    journal: where it writes down what requests that may be resumed need to outlive it.
    default_mode: of requests in OpenAI's dialect that name none.
    http_names: what HTTP clients may call it, beside localhost, its host's name and addresses.
    """

    setting: Setting
    ring: MasterSettings
    stuck_after: float = 60.0
    http: str | None = None
    fleet_listen: str | None = None
    tokens: Tokens | None = None
    journal: Path | None = None
    default_mode: Mode = "direct"
    http_names: tuple[str, ...] = ()
    pulse: Pulse = field(default_factory=Pulse)


def read_config(arguments: Sequence[str] | None = None) -> MasterConfig:
    """Exits with status 2 and one line when something is wrong."""
    flags = Flags("specsot-master", "Takes requests, and leads a SpecSoT ring of workers and a drafter.")
    shape = TreeShape()
    flags.flag("model", required=True, help="directory of the base model (its tokenizer and config)")
    flags.flag("name", default="", help="the model's public name; by default its directory's")
    flags.flag("workers", positive, 1, "how many workers share the layers, unless they bring ranges")
    flags.flag("replicas", positive, 1, "how many complete rings there are, each with workers of its own")
    flags.flag(
        "max-stages",
        positive,
        help="how many share them at most after a rebalance; if not given, all that help",
    )
    ways = ("measured", "even")
    flags.flag(
        "placement", default="measured", choices=ways, help="how layers are shared: by speed, or evenly"
    )
    told = "seconds a lost worker may take to come back before the others share its layers"
    flags.flag("take-over-after", seconds, TAKE_OVER_AFTER, told)
    pulse = Pulse()
    told = "seconds between a member's signs of life, and the master's, while nothing else is said"
    flags.flag("heartbeat", above_zero, pulse.every, told)
    flags.flag("silence", above_zero, pulse.silence, "seconds without any after which a member is lost")
    flags.flag("drafter", default="eagle", choices=DRAFTERS, help="none, or whichever joins the ring")
    flags.flag("page-rows", positive, 256, "positions per KV page")
    flags.flag("rows", positive, 512, "row budget of one frame")
    flags.flag("nodes", positive, shape.nodes, "nodes of the largest draft tree, its root included")
    flags.flag("depth", positive, shape.depth, "expansions of a draft tree after the first")
    flags.flag("width", positive, shape.top_k, "width of a draft tree")
    trees = ("tuned", "fixed")
    flags.flag("tree", default="tuned", choices=trees, help="fixed: the largest one in every lap, pay or not")
    layouts = ("packed", "batched")
    flags.flag("branch-layout", default="batched", choices=layouts, help="how branches lie in a frame")
    flags.flag("draft-timeout", seconds, 1.0, "seconds stage 0 waits for a tree")
    flags.flag("transport", default="grpc", choices=TRANSPORTS, help="what carries messages between members")
    told = "p2p: the drafter speaks to every stage; ring: to the last one, the rest rides along"
    flags.flag("comm-mode", default="p2p", choices=COMM_MODES, help=told)
    add_conduct(flags)
    flags.flag("stuck-after", seconds, 60.0, "seconds without a lap, while there is work, until unhealthy")
    flags.flag("http", help="where to serve HTTP too: host:port (0 for a free port)")
    told = "how OpenAI's clients are answered that name no mode"
    flags.flag("default-mode", default="direct", choices=MODES, help=told)
    told = "what else it is called there, where no token is asked for: fleet.example,other.example"
    flags.flag("http-names", host_names, (), told)
    flags.flag("fleet-listen", help="where members come in, if not where clients do")
    flags.flag("token-file", Path, help="tokens that clients may show, one a line; or one in SPECSOT_TOKEN")
    flags.flag("journal", Path, help="directory in which resumable requests outlive a restart")
    add_setting(flags, "127.0.0.1:50050")
    given = flags.read(arguments)
    ring = MasterSettings(
        model=Path(given.model),
        name=given.name,
        workers=given.workers,
        drafter=given.drafter != "none",
        page_rows=given.page_rows,
        rows=given.rows,
        layout=given.branch_layout,
        shape=TreeShape(given.depth, given.width, given.nodes, fixed=given.tree == "fixed"),
        draft_timeout=given.draft_timeout,
        transport=given.transport,
        comm_mode=given.comm_mode,
        placement=given.placement,
        max_stages=given.max_stages,
        take_over_after=given.take_over_after,
        replicas=given.replicas,
        conduct=read_conduct(given),
    )
    config = MasterConfig(
        read_setting(flags, given),
        ring,
        given.stuck_after,
        given.http,
        given.fleet_listen,
        read_tokens(flags, given),
        given.journal,
        given.default_mode,
        given.http_names,
        read_pulse(flags, given),
    )
    check_doors(flags, config)
    return config


def read_pulse(flags: Flags, given: argparse.Namespace) -> Pulse:
    """Exits with status 2 and one line where one late sign of life would be a loss."""
    if given.silence < 2 * given.heartbeat:
        flags.error(f"--silence {given.silence:g} must be at least twice --heartbeat {given.heartbeat:g}")
    return Pulse(given.heartbeat, given.silence)


def read_tokens(flags: Flags, given: argparse.Namespace) -> Tokens | None:
    """Exits with status 2 and one line for a file without tokens."""
    token = flags.secret("token")
    try:
        return Tokens(given.token_file, token) if given.token_file or token else None
    except InvalidRequest as error:
        flags.error(str(error))


def check_doors(flags: Flags, config: MasterConfig) -> None:
    """Clients show tokens, members certificates: where either must, they come in by different doors."""
    setting, tls = config.setting, config.setting.tls
    if config.fleet_listen is None and (config.tokens or tls.ca):
        shown = "tokens are for clients" if config.tokens else "--tls-ca is for members"
        flags.error(f"{shown}: give members a door of their own by --fleet-listen")
    if tls.ca and not tls.cert:
        flags.error("--tls-ca needs --tls-cert and --tls-key")
    needs = "--tls-cert, --tls-key and --token-file (or SPECSOT_TOKEN)"
    public = tls.cert is not None and config.tokens is not None
    for flag, address in (("listen", setting.listen), ("http", config.http)):
        check_exposure(flags, setting, flag, address, needs, public)
    needs = "--tls-cert, --tls-key and --tls-ca"
    check_exposure(flags, setting, "fleet-listen", config.fleet_listen, needs, tls.mutual)


def add_conduct(flags: Flags) -> None:
    """How requests are treated."""
    usual = ConductorConfig()
    flags.flag("max-requests", positive, usual.live, "requests in the ring at once")
    flags.flag("max-queue", positive, usual.queue, "requests that may wait for that; more are refused")
    switch = ("on", "off")
    flags.flag("prefix-cache", default="on", choices=switch, help="whether beginnings of prompts are kept")
    flags.flag("unread", positive, usual.unread, "events a client may leave unread until its request pauses")
    flags.flag(
        "unread-for", seconds, usual.unread_for, "seconds after which a client that reads nothing goes"
    )
    flags.flag("keep-for", seconds, usual.keep_for, "seconds for which a resumable request is kept")
    flags.flag(
        "repair-for", seconds, usual.repair_for, "seconds for which requests wait when their ring breaks"
    )
    flags.flag("keep", positive, usual.keep, "resumable requests that are over, kept at once")


def read_conduct(given: argparse.Namespace) -> ConductorConfig:
    return ConductorConfig(
        live=given.max_requests,
        queue=given.max_queue,
        prefix_cache=given.prefix_cache == "on",
        unread=given.unread,
        unread_for=given.unread_for,
        keep_for=given.keep_for,
        keep=given.keep,
        repair_for=given.repair_for,
    )
