"""Sequences on the wire: openings, segments, trees, outcomes, drafts, orders; checks of all decoders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence, Sized
from itertools import islice
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from specsot.core.frames import (
    Close,
    Draft,
    Drafts,
    End,
    FeatureBatch,
    Fork,
    Lease,
    Logprob,
    Open,
    Opening,
    Outcome,
    PromptChunk,
    Result,
    Segment,
    TreeSegment,
)
from specsot.core.skeleton import PlanRules
from specsot.core.tree import Tree
from specsot.errors import InvalidRequest, WireError
from specsot.params import MAX_BIASES, DrafterName, Form, HeadWindows, Pruning, Sampling, Window, refuse
from specsot.tracing import well_formed
from specsot.v1 import fleet_pb2, ring_pb2, values_pb2


def encode_form(form: Form | None) -> values_pb2.Form | None:
    if form is None:
        return None
    match form.kind:
        case "json_object":
            return values_pb2.Form(json_object=values_pb2.JsonObject())
        case "json_schema":
            return values_pb2.Form(json_schema=form.texts[0])
        case "regex":
            return values_pb2.Form(regex=form.texts[0])
        case "choice":
            return values_pb2.Form(choice=values_pb2.Choice(texts=form.texts))


def decode_form(message: values_pb2.Form) -> Form:
    """Raises InvalidRequest."""
    match message.WhichOneof("form"):
        case "json_object":
            return Form("json_object")
        case "json_schema":
            return Form("json_schema", (message.json_schema,))
        case "regex":
            return Form("regex", (message.regex,))
        case "choice":
            return Form("choice", tuple(message.choice.texts))
        case _:
            raise refuse("says no kind of form")


MOST = 1 << 14  # sequences, trees, points of a curve in one message

TMessage = TypeVar("TMessage", bound=Message)
T = TypeVar("T")
P = TypeVar("P", bound=Sized)


def parse(kind: type[TMessage], data: bytes) -> TMessage:
    """A protobuf message of `kind` from bytes."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise WireError(f"not a {kind.DESCRIPTOR.full_name}: {len(data)} bytes that do not parse") from None


def require(holds: bool, complaint: str) -> None:
    if not holds:
        raise WireError(complaint)


def few(parts: P, what: str) -> P:
    """Parts of a message, not yet looked at: an empty one takes two bytes, a value hundreds."""
    require(len(parts) <= MOST, f"{len(parts)} {what} in one message, {MOST} are allowed")
    return parts


def chosen(message: Message, oneof: str) -> str:
    """The name of the field that is set in a oneof."""
    name = message.WhichOneof(oneof)
    require(name is not None, f"{message.DESCRIPTOR.name} carries nothing we know")
    return str(name)


def known(table: dict[int, T], number: int, what: str) -> T:
    """The value an enum number stands for."""
    if number not in table:
        raise WireError(f"{what} {number} is unknown")
    return table[number]


def duration(seconds: float, what: str) -> float:
    """A finite number of seconds, not negative."""
    require(math.isfinite(seconds) and seconds >= 0, f"{what} must be seconds >= 0, got {seconds}")
    return seconds


def durations(values: Sequence[float], what: str) -> tuple[float, ...]:
    return tuple(duration(value, what) for value in values)


def ascending(numbers: Sequence[int], what: str) -> tuple[int, ...]:
    """Strictly ascending numbers."""
    rising = all(a < b for a, b in itertools.pairwise(numbers))
    require(rising, f"{what} must ascend")
    return tuple(numbers)


def named(text: str, what: str) -> str:
    """A name or address: not empty, one line, at most 255 characters."""
    require(bool(text) and len(text) <= 255 and text.isprintable(), f"{what} must be a short line of text")
    return text


M = TypeVar("M")


DRAFTER_NUMBERS: dict[DrafterName, values_pb2.Drafter] = {
    "eagle": values_pb2.DRAFTER_EAGLE,
    "none": values_pb2.DRAFTER_NONE,
    "model": values_pb2.DRAFTER_MODEL,
    "ngram": values_pb2.DRAFTER_NGRAM,
}
DRAFTERS: dict[int, DrafterName] = {int(number): name for name, number in DRAFTER_NUMBERS.items()}

MAX_NODES = 4096  # of one tree: ancestry costs a bit per pair of nodes

END_NUMBERS = {
    None: ring_pb2.END_UNSPECIFIED,
    End.STOP: ring_pb2.END_STOP,
    End.LENGTH: ring_pb2.END_LENGTH,
    End.GRAMMAR: ring_pb2.END_GRAMMAR,
    End.CANCELLED: ring_pb2.END_CANCELLED,
    End.FAILED: ring_pb2.END_FAILED,
}
ENDS: dict[int, End | None] = {int(number): end for end, number in END_NUMBERS.items()}


def encode_tree(tree: Tree) -> values_pb2.Tree:
    return values_pb2.Tree(tokens=tree.tokens, parents=tree.parents)


def decode_tree(message: values_pb2.Tree) -> Tree:
    nodes = max(len(message.tokens), len(message.parents))
    require(nodes <= MAX_NODES, f"tree has {nodes} nodes, {MAX_NODES} are allowed")
    return Tree(tuple(message.tokens), tuple(message.parents))


def encode_sampling(sampling: Sampling) -> values_pb2.Sampling:
    return values_pb2.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
    )


def decode_sampling(message: values_pb2.Sampling) -> Sampling:
    """Unset fields have the defaults of specsot.params. Raises InvalidRequest."""
    given = {field.name: value for field, value in message.ListFields()}
    few_biases = islice(message.logit_bias.items(), MAX_BIASES + 1)  # one too many is enough to be refused
    given["logit_bias"] = tuple(sorted(few_biases))
    return Sampling(**given)


def encode_window(window: Window | None) -> values_pb2.Window | None:
    return None if window is None else values_pb2.Window(sinks=window.sinks, recent=window.recent)


def decode_window(message: values_pb2.Window) -> Window:
    """Unset fields have the defaults of specsot.params. Raises InvalidRequest."""
    return Window(**{field.name: value for field, value in message.ListFields()})


def encode_pruning(pruning: Pruning | None) -> values_pb2.Pruning | None:
    if pruning is None:
        return None
    return values_pb2.Pruning(
        keep_ratio=pruning.keep_ratio, prune_every=pruning.prune_every, skip_layers=pruning.skip_layers
    )


def decode_pruning(message: values_pb2.Pruning) -> Pruning:
    """Unset fields have the defaults of specsot.params. Raises InvalidRequest."""
    return Pruning(**{field.name: value for field, value in message.ListFields()})


def encode_heads(heads: HeadWindows | None) -> list[ring_pb2.LayerHeads]:
    layers = heads.layers if heads else ()
    return [
        ring_pb2.LayerHeads(sinks=[s for s, _ in pairs], recent=[r for _, r in pairs]) for pairs in layers
    ]


def decode_heads(messages: Sequence[ring_pb2.LayerHeads]) -> HeadWindows | None:
    """Raises InvalidRequest."""
    if not messages:
        return None
    for layer in messages:
        require(len(layer.sinks) == len(layer.recent), "a layer's heads have as many sinks as recent")
    return HeadWindows(tuple(tuple(zip(layer.sinks, layer.recent)) for layer in messages))


def encode_opening(opening: Opening) -> ring_pb2.Opening:
    return ring_pb2.Opening(
        sequence=opening.sequence,
        prompt=opening.prompt,
        fork=encode_fork(opening.fork),
        decodes=opening.decodes,
        drafted=opening.drafted,
        generated=opening.generated,
        sampling=encode_sampling(opening.sampling),
        seed=opening.seed,
        ordinal=opening.ordinal,
        stop_ids=opening.stop_ids,
        limit=opening.limit,
        plan=encode_plan(opening.plan),
        drafter=encode_drafter(opening.drafter),
        form=encode_form(opening.form),
        logprobs=opening.logprobs,
        family=opening.family,
        trace=opening.trace or "",
        window=encode_window(opening.window),
        pruning=encode_pruning(opening.pruning),
        heads=encode_heads(opening.heads),
    )


def decode_opening(message: ring_pb2.Opening) -> Opening:
    fork = Fork(message.fork.sequence, message.fork.length) if message.HasField("fork") else None
    require(fork is None or fork.length <= message.prompt, "a fork is longer than its prompt")
    require(message.generated <= message.prompt, "more tokens were generated than the prompt holds")
    return Opening(
        sequence=message.sequence,
        prompt=message.prompt,
        fork=fork,
        decodes=message.decodes,
        drafted=message.drafted,
        generated=message.generated,
        sampling=from_peer(decode_sampling, message.sampling),
        seed=message.seed,
        ordinal=message.ordinal,
        stop_ids=tuple(message.stop_ids),
        limit=message.limit,
        plan=from_peer(decode_plan, message.plan) if message.HasField("plan") else None,
        form=from_peer(decode_form, message.form) if message.HasField("form") else None,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        family=message.family if message.HasField("family") else None,
        drafter=decode_drafter(message.drafter),
        trace=well_formed(message.trace),
        window=from_peer(decode_window, message.window) if message.HasField("window") else None,
        pruning=from_peer(decode_pruning, message.pruning) if message.HasField("pruning") else None,
        heads=from_peer(decode_heads, message.heads),
    )


def encode_drafter(name: DrafterName | None) -> values_pb2.Drafter:
    return values_pb2.DRAFTER_UNSPECIFIED if name is None else DRAFTER_NUMBERS[name]


def decode_drafter(number: int) -> DrafterName | None:
    return known(DRAFTERS, number, "drafter") if number else None


def from_peer(decode: Callable[[M], T], message: M) -> T:
    """Decode what a client's words became: from a peer, impossible values are a broken wire."""
    try:
        return decode(message)
    except InvalidRequest as error:
        raise WireError(str(error)) from None


def encode_fork(fork: Fork | None) -> ring_pb2.Fork | None:
    return None if fork is None else ring_pb2.Fork(sequence=fork.sequence, length=fork.length)


def encode_plan(rules: PlanRules | None) -> ring_pb2.PlanRules | None:
    if rules is None:
        return None
    return ring_pb2.PlanRules(
        direct=rules.direct, tools=rules.tools, max_points=rules.max_points, plan_tokens=rules.plan_tokens
    )


def decode_plan(message: ring_pb2.PlanRules) -> PlanRules:
    """Raises InvalidRequest."""
    return PlanRules(message.direct, tuple(message.tools), message.max_points, message.plan_tokens)


def encode_segment(segment: Segment) -> ring_pb2.Segment:
    if isinstance(segment, PromptChunk):
        chunk = ring_pb2.Chunk(
            sequence=segment.sequence, start=segment.start, tokens=segment.tokens, final=segment.final
        )
        return ring_pb2.Segment(chunk=chunk)
    growth = ring_pb2.Growth(
        sequence=segment.sequence,
        step=segment.step,
        committed=segment.committed,
        keep=segment.keep,
        tree=encode_tree(segment.tree),
    )
    return ring_pb2.Segment(growth=growth)


def decode_segment(message: ring_pb2.Segment) -> Segment:
    if chosen(message, "segment") == "chunk":
        chunk = message.chunk
        return PromptChunk(chunk.sequence, chunk.start, tuple(chunk.tokens), chunk.final)
    growth = message.growth
    keep = ascending(growth.keep, "kept nodes")
    require(len(keep) <= growth.committed, "more nodes are kept than rows are committed")
    return TreeSegment(growth.sequence, growth.step, growth.committed, keep, decode_tree(growth.tree))


def encode_result(result: Result) -> ring_pb2.Result:
    return ring_pb2.Result(
        epoch=result.epoch,
        number=result.number,
        outcomes=map(encode_outcome, result.outcomes),
        seconds=result.seconds,
        rows=result.rows,
        drafts=result.drafts,
        drafted=result.drafted,
    )


def decode_result(message: ring_pb2.Result) -> Result:
    outcomes = tuple(map(decode_outcome, few(message.outcomes, "outcomes")))
    return Result(
        message.epoch,
        message.number,
        outcomes,
        durations(message.seconds, "a stage's time"),
        message.rows,
        message.drafts,
        message.drafted,
    )


def encode_outcome(outcome: Outcome) -> ring_pb2.Outcome:
    return ring_pb2.Outcome(
        sequence=outcome.sequence,
        step=outcome.step,
        accepted=outcome.accepted,
        tokens=outcome.tokens,
        end=END_NUMBERS[outcome.end],
        chances=map(encode_logprob, outcome.chances),
        forced=outcome.forced,
    )


def decode_outcome(message: ring_pb2.Outcome) -> Outcome:
    accepted = ascending(message.accepted, "accepted nodes")
    tokens, chances = tuple(few(message.tokens, "tokens")), message.chances
    told = len(chances) in (0, len(tokens))
    require(told, f"{len(tokens)} tokens came with the chances of {len(chances)}")
    end = known(ENDS, message.end, "end")
    forced, known_chances = tuple(message.forced), tuple(map(decode_logprob, chances))
    return Outcome(message.sequence, message.step, accepted, tokens, end, known_chances, forced)


def encode_logprob(chance: Logprob) -> ring_pb2.Chance:
    return ring_pb2.Chance(
        logprob=chance.logprob,
        top_tokens=(token for token, _ in chance.top),
        top_logprobs=(logprob for _, logprob in chance.top),
    )


def decode_logprob(message: ring_pb2.Chance) -> Logprob:
    tokens, logprobs = few(message.top_tokens, "likeliest tokens"), message.top_logprobs
    require(len(tokens) == len(logprobs), f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
    return Logprob(message.logprob, tuple(zip(tokens, logprobs)))


def encode_feature_batch(lesson: FeatureBatch) -> ring_pb2.Lesson:
    return ring_pb2.Lesson(
        sequence=lesson.sequence,
        start=lesson.start,
        tokens=lesson.tokens,
        bonus=lesson.bonus,
        step=lesson.step,
        forced=lesson.forced,
    )


def decode_feature_batch(message: ring_pb2.Lesson) -> FeatureBatch:
    bonus = message.bonus if message.HasField("bonus") else None
    step = message.step if message.HasField("step") else None
    tokens, forced = tuple(message.tokens), tuple(message.forced)
    return FeatureBatch(message.sequence, message.start, tokens, bonus, step, forced)


def encode_drafts(drafts: Drafts) -> ring_pb2.Drafts:
    return ring_pb2.Drafts(epoch=drafts.epoch, drafts=map(encode_draft, drafts.drafts), rest=drafts.rest)


def decode_drafts(message: ring_pb2.Drafts) -> Drafts:
    return Drafts(message.epoch, tuple(map(decode_draft, few(message.drafts, "drafts"))), message.rest)


def encode_draft(draft: Draft) -> ring_pb2.Draft:
    return ring_pb2.Draft(sequence=draft.sequence, step=draft.step, tree=encode_tree(draft.tree))


def decode_draft(message: ring_pb2.Draft) -> Draft:
    return Draft(message.sequence, message.step, decode_tree(message.tree))


def encode_open(order: Open) -> fleet_pb2.Open:
    return fleet_pb2.Open(opening=encode_opening(order.opening), tokens=order.tokens, lease=order.lease)


def decode_open(message: fleet_pb2.Open) -> Open:
    opening = decode_opening(message.opening)
    forked = opening.fork.length if opening.fork else 0
    complete = forked + len(message.tokens) == opening.prompt
    require(complete, f"prompt of {opening.prompt} tokens came as {forked} + {len(message.tokens)}")
    return Open(opening, tuple(message.tokens), message.lease)


def encode_close(order: Close) -> fleet_pb2.Close:
    return fleet_pb2.Close(sequence=order.sequence)


def decode_close(message: fleet_pb2.Close) -> Close:
    return Close(message.sequence)


def encode_lease(order: Lease) -> fleet_pb2.Lease:
    return fleet_pb2.Lease(sequence=order.sequence, position=order.position)


def decode_lease(message: fleet_pb2.Lease) -> Lease:
    return Lease(message.sequence, message.position)
