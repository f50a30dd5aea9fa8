"""Schemas of the ring's values: openings, segments, trees, results, features, drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from specsot.core import frames
from specsot.core.skeleton import PlanRules
from specsot.core.soft_end import SoftEnd
from specsot.core.tree import Tree
from specsot.errors import InvalidRequest, WireError
from specsot.members import Head, Range
from specsot.params import MAX_BIASES, Form, HeadImportance, HeadWindows, Pruning, Sampling, Window, refuse
from specsot.tracing import well_formed
from specsot.transport.wire.schema import (
    Enumeration,
    FieldCodec,
    Schema,
    bounded,
    check_ascending,
    check_duration,
    checked,
    chosen,
    register,
    repeated,
    require,
)
from specsot.v1 import ring_pb2, values_pb2

# Nodes. Bounds one tree, because its ancestry takes a bit per pair of nodes. Untuned.
MAX_NODES = 4096

# "eagle", "model", ... by number.
DRAFTERS = Enumeration(values_pb2.DraftMethod.DESCRIPTOR, name_in_errors="drafter")
# The reasons for which a sequence ends, by number.
ENDS = Enumeration(ring_pb2.End.DESCRIPTOR, frames.End)
# A trace context; one that is not valid is decoded as None.
TRACE = FieldCodec(decode=well_formed)
# The compute time of each stage; every number must be seconds >= 0.
STAGE_SECONDS = repeated(checked(check_duration, "a stage's time"), "times of stages")


def encode_form(form: Form) -> values_pb2.Form:
    """Return the message of a form.

    form: the constraint on an answer.

    The kind is one of json_object, choice, json_schema, regex and structural_tag. Only a choice has several
    texts; the last three have one, and json_object has none.
    """
    match form.kind:
        case "json_object":
            return values_pb2.Form(json_object=values_pb2.JsonObject())
        case "choice":
            return values_pb2.Form(choice=values_pb2.Choice(texts=form.texts))
        case "json_schema":
            return values_pb2.Form(json_schema=form.texts[0])
        case "regex":
            return values_pb2.Form(regex=form.texts[0])
        case "structural_tag":
            return values_pb2.Form(structural_tag=form.texts[0])


def decode_form(message: values_pb2.Form) -> Form:
    """Return the form of a message. Raises InvalidRequest if it is invalid.

    message: the form as a client or the master sent it.

    The form is invalid if no kind is set, or if `Form` rejects its texts.
    """
    match message.WhichOneof("form"):
        case None:
            raise refuse("no kind of form is set")
        case "json_object":
            return Form("json_object")
        case "choice":
            return Form("choice", tuple(message.choice.texts))
        case kind:
            return Form(kind, (getattr(message, kind),))


def decode_biases(biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    """Return logit biases by ascending token.

    At most MAX_BIASES + 1 are read, which is enough for `Sampling` to reject them.

    biases: the value that is added to each token's logit, by token id.
    """
    return tuple(sorted(islice(biases.items(), MAX_BIASES + 1)))


def encode_heads(heads: HeadWindows) -> list[ring_pb2.LayerHeads]:
    """Return one message per layer, with the sinks and the recent tokens of its heads in two lists.

    The heads (4, 16) and (0, 32) of a layer become sinks [4, 0] and recent [16, 32].

    heads: the windows of all heads.
    """
    return [
        ring_pb2.LayerHeads(sinks=[sinks for sinks, _ in layer], recent=[recent for _, recent in layer])
        for layer in heads.layers
    ]


def decode_heads(layers: Sequence[ring_pb2.LayerHeads]) -> HeadWindows | None:
    """Return the windows of all heads, or None if there are no layers.

    layers: one message per layer, see `encode_heads`.

    Raises WireError if the two lists of a layer have different lengths, InvalidRequest if a window is
    invalid.
    """
    for layer in layers:
        require(len(layer.sinks) == len(layer.recent), "a layer's heads have as many sinks as recent")
    return HeadWindows(tuple(tuple(zip(layer.sinks, layer.recent)) for layer in layers)) if layers else None


def encode_importance(importance: HeadImportance) -> list[ring_pb2.LayerImportance]:
    """Return one message per layer with the importance of its heads.

    importance: the importance of all heads.
    """
    return [ring_pb2.LayerImportance(heads=heads) for heads in importance.layers]


def decode_importance(layers: Sequence[ring_pb2.LayerImportance]) -> HeadImportance | None:
    """Return the importance of all heads, or None if there are no layers. Raises InvalidRequest if a value is
    invalid.

    layers: one message per layer with a value per head.
    """
    return HeadImportance(tuple(tuple(layer.heads) for layer in layers)) if layers else None


# A caller's constraint on the output.
FORM = FieldCodec(encode_form, decode_form)


def check_opening(message: ring_pb2.Opening) -> None:
    """Raise WireError if the lengths or the options of an opening exclude each other.

    message: the opening before it is decoded.

    The opening is invalid if its fork is longer than the prompt, if the reused rows leave no token of the
    prompt to compute, if heads have an importance but there is no pruning, or if more tokens count as
    generated than the prompt holds. Otherwise returns None.
    """
    num_reused = len(message.reused.tokens)
    num_not_forked = message.prompt - message.fork.length
    require(num_not_forked >= 0, "a fork is longer than its prompt")
    require(
        not num_reused or num_reused < num_not_forked,
        f"{num_reused} rows are reused for a prompt of {num_not_forked} tokens",
    )
    require(
        not message.importance or message.HasField("pruning"),
        "heads have an importance, but nothing is pruned",
    )
    require(message.generated <= message.prompt, "more tokens were generated than the prompt holds")


# The schema of openings, see `decode_opening`.
_OPENING = Schema(
    frames.Opening,
    ring_pb2.Opening,
    check_opening,
    form=FORM,
    trace=TRACE,
    heads=FieldCodec(encode_heads, decode_heads),
    importance=FieldCodec(encode_importance, decode_importance),
)


def decode_opening(message: ring_pb2.Opening) -> frames.Opening:
    """Return the opening of a message.

    message: the opening as a member sent it.

    Raises WireError, also for values that would be an invalid request of a client: the master has checked
    these, so that a peer never sends them.
    """
    try:
        return _OPENING.decode(message)
    except InvalidRequest as error:
        raise WireError(str(error)) from None


def check_layers(message: values_pb2.Layers) -> None:
    """Raise WireError if a layer range is empty.

    message: the range before it is decoded.
    """
    require(message.first < message.last, f"the layer range {message.first}:{message.last} is empty")


def encode_logprob(token_logprob: frames.Logprob) -> ring_pb2.Chance:
    """Return the message of a log-probability and its alternatives.

    token_logprob: the log-probability of one token.
    """
    return ring_pb2.Chance(
        logprob=token_logprob.logprob,
        top_tokens=(token for token, _ in token_logprob.top),
        top_logprobs=(logprob for _, logprob in token_logprob.top),
    )


def decode_logprob(message: ring_pb2.Chance) -> frames.Logprob:
    """Return the log-probability of a message. Raises WireError if its lists have different lengths.

    message: a token's log-probability, and those of the likeliest tokens.

    Raises WireError also if there are too many likeliest tokens. The list may be empty.
    """
    tokens = bounded(message.top_tokens, "likeliest tokens")
    logprobs = message.top_logprobs
    require(len(tokens) == len(logprobs), f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
    return frames.Logprob(message.logprob, tuple(zip(tokens, logprobs)))


# Only the tests send the parent of a tree frame: see `specsot.core.tree_frames`.
_PARENT = Schema(frames.ParentNode, ring_pb2.ParentNode)
_PREFIX_PROGRESS = Schema(frames.PrefixProgress, ring_pb2.PrefixProgress)

# A message has one of the following values per sequence, so they are encoded without a schema, which takes
# 1.25 times as long (paired in one run).


def encode_segment(segment: frames.Segment) -> ring_pb2.Segment:
    """Return the message of a prompt chunk or of a tree segment, which protobuf calls a growth.

    segment: the segment.

    A tree segment whose `parent` is None leaves that field unset.
    """
    if isinstance(segment, frames.PromptChunk):
        chunk = ring_pb2.Chunk(
            sequence=segment.sequence, start=segment.start, tokens=segment.tokens, final=segment.final
        )
        return ring_pb2.Segment(chunk=chunk)
    growth = ring_pb2.Growth(
        sequence=segment.sequence,
        draft_round=segment.draft_round,
        committed=segment.committed,
        keep=segment.keep,
        tree=encode_tree(segment.tree),
        parent=None if segment.parent is None else _PARENT.encode(segment.parent),
        scratch=segment.scratch,
        freed=segment.freed,
        earlier=segment.earlier,
        later=segment.later,
    )
    return ring_pb2.Segment(growth=growth)


def decode_segment(message: ring_pb2.Segment) -> frames.Segment:
    """Return the segment of a message. Raises WireError for an invalid tree or invalid accepted nodes, and if
    other parts of the frame feed all nodes.

    message: a chunk or a growth.

    Raises WireError also if no kind of segment is set, if accepted nodes or freed draft rounds do not ascend,
    and if more nodes are kept than tokens are committed. A growth without a parent gets None.
    """
    if chosen(message, "segment") == "chunk":
        chunk = message.chunk
        return frames.PromptChunk(chunk.sequence, chunk.start, tuple(chunk.tokens), chunk.final)
    growth = message.growth
    keep = check_ascending(growth.keep, "kept nodes")
    require(len(keep) <= growth.committed, "more nodes are kept than rows are committed")
    parent = _PARENT.decode(growth.parent) if growth.HasField("parent") else None
    tree = decode_tree(growth.tree)
    freed = check_ascending(growth.freed, "freed draft rounds")
    require(growth.earlier + growth.later < len(tree), "other parts of the frame feed all nodes of its tree")
    return frames.TreeSegment(
        sequence=growth.sequence,
        draft_round=growth.draft_round,
        committed=growth.committed,
        keep=keep,
        tree=tree,
        parent=parent,
        scratch=growth.scratch,
        freed=freed,
        earlier=growth.earlier,
        later=growth.later,
    )


def encode_tree(tree: Tree) -> values_pb2.Tree:
    """Return the message of a tree.

    tree: the tree.
    """
    return values_pb2.Tree(tokens=tree.tokens, parents=tree.parents)


def decode_tree(message: values_pb2.Tree) -> Tree:
    """Return the tree of a message. Raises WireError if it is invalid or has more than MAX_NODES nodes.

    message: tokens and parents of the nodes.

    A tree is invalid if it has no nodes, if its lists have different lengths, or if a parent does not precede
    its child.
    """
    if (nodes := max(len(message.tokens), len(message.parents))) > MAX_NODES:
        raise WireError(f"tree has {nodes} nodes, {MAX_NODES} are allowed")
    return Tree(tuple(message.tokens), tuple(message.parents))


def write_outcome(outcome: frames.Outcome, message: ring_pb2.Outcome) -> None:
    """Write an outcome into an empty message.

    outcome: the verification result of one segment.
    message: the message, none of whose fields is set.

    Most outcomes have only the first four fields, so the others are written only if they are set.
    """
    message.sequence = outcome.sequence
    message.draft_round = outcome.draft_round
    message.accepted.extend(outcome.accepted)
    message.tokens.extend(outcome.tokens)
    if outcome.end:
        message.end = ENDS.encode(outcome.end)
    if outcome.draft_paused:
        message.draft_paused = True
    if outcome.forced:
        message.forced.extend(outcome.forced)
    if outcome.chances:
        message.chances.extend(map(encode_logprob, outcome.chances))
    if outcome.prompt_chances:
        message.prompt_chances.extend(map(encode_logprob, outcome.prompt_chances))
    if outcome.dropped:
        message.dropped.extend(outcome.dropped)
    if outcome.extra_passes:
        message.extra_passes = outcome.extra_passes


def decode_outcome(message: ring_pb2.Outcome) -> frames.Outcome:
    """Return the outcome of a message.

    message: the verification result of one segment, as a member sent it.

    Raises WireError if accepted nodes or dropped draft rounds do not ascend, or if log-probabilities do not
    match the tokens.

    A missing end (0) becomes None; missing log-probabilities, of tokens or of the prompt, become (). Raises
    WireError also for an unknown end and for too many tokens.
    """
    # A slice of a repeated field is a list, which takes half the time of reading the field item by item.
    accepted = check_ascending(message.accepted[:], "accepted nodes")
    tokens = tuple(bounded(message.tokens, "tokens")[:])
    chances = message.chances
    if len(chances) not in (0, len(tokens)):
        raise WireError(f"{len(tokens)} tokens came with log-probabilities of {len(chances)}")
    end = ENDS.decode(number) if (number := message.end) else None
    known_chances = tuple(map(decode_logprob, chances)) if chances else ()
    forced = tuple(message.forced[:])
    encoded_prompt_chances = message.prompt_chances
    prompt = tuple(map(decode_logprob, encoded_prompt_chances)) if encoded_prompt_chances else ()
    dropped = check_ascending(message.dropped[:], "dropped draft rounds")
    return frames.Outcome(
        message.sequence,
        message.draft_round,
        accepted,
        tokens,
        end,
        known_chances,
        forced,
        message.draft_paused,
        prompt,
        dropped,
        message.extra_passes,
    )


def write_result(result: frames.Result, message: ring_pb2.Result) -> None:
    """Write a result into an empty message. Every field of `Result` must be written here, because
    `ResultSchema` does not encode fields by itself.

    result: the result of one frame.
    message: the message, none of whose fields is set.

    Each outcome is written directly into the result's message. Making a message for it first takes twice as
    long: its fields would be passed by name, and the constructor of the result's message would copy it.
    """
    message.epoch = result.epoch
    message.number = result.number
    message.seconds.extend(result.seconds)
    message.rows = result.rows
    message.drafts = result.drafts
    message.drafted = result.drafted
    message.verified_part = result.verified_part
    if result.prefixes:
        message.prefixes.extend(map(_PREFIX_PROGRESS.encode, result.prefixes))
    add_outcome = message.outcomes.add
    for outcome in result.outcomes:
        write_outcome(outcome, add_outcome())


class ResultSchema(Schema[frames.Result, ring_pb2.Result]):
    """The schema of results, which encodes them with `write_result`. Every step sends one result, with an
    outcome for each of its sequences, so that encoding must be fast. Decoding is that of `Schema`.
    """

    def encode(self, value: frames.Result) -> ring_pb2.Result:
        """Return the message of a result, see `write_result`.

        value: the result of one frame.
        """
        message = ring_pb2.Result()
        write_result(value, message)
        return message


register(
    DRAFTERS,
    Enumeration(values_pb2.Kind.DESCRIPTOR),
    Schema(Sampling, values_pb2.Sampling, logit_bias=FieldCodec(dict, decode_biases)),
    Schema(Window, values_pb2.Window),
    Schema(Pruning, values_pb2.Pruning),
    Schema(PlanRules, ring_pb2.PlanRules),
    Schema(SoftEnd, ring_pb2.SoftEnd),
    Schema(frames.Fork, ring_pb2.Fork),
    Schema(frames.ReusedKV, ring_pb2.ReusedKV),
    Schema(Range, values_pb2.Layers, check_layers),
    Schema(Head, values_pb2.Head, taps=checked(check_ascending, "taps")),
    _PREFIX_PROGRESS,
    ResultSchema(
        frames.Result,
        ring_pb2.Result,
        outcomes=repeated(FieldCodec(decode=decode_outcome), "outcomes"),
        seconds=STAGE_SECONDS,
    ),
    Schema(frames.FeatureBatch, ring_pb2.FeatureBatch),
    _PARENT,
    Schema(frames.Draft, ring_pb2.Draft, tree=FieldCodec(encode_tree, decode_tree)),
    Schema(frames.Drafts, ring_pb2.Drafts),
)

# One opening, openings and segments as fields of other messages.
OPENING = FieldCodec(_OPENING.encode, decode_opening)
OPENINGS = repeated(OPENING, "openings")
SEGMENTS = repeated(FieldCodec(encode_segment, decode_segment), "segments")
