from specsot.v1 import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class End(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    END_UNSPECIFIED: _ClassVar[End]
    END_STOP: _ClassVar[End]
    END_LENGTH: _ClassVar[End]
    END_GRAMMAR: _ClassVar[End]
    END_CANCELLED: _ClassVar[End]
    END_FAILED: _ClassVar[End]
END_UNSPECIFIED: End
END_STOP: End
END_LENGTH: End
END_GRAMMAR: End
END_CANCELLED: End
END_FAILED: End

class CarryRequest(_message.Message):
    __slots__ = ("hello", "frame", "result", "features", "drafts", "tap", "goodbye", "remainder", "lost", "kv_rows")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    TAP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    REMAINDER_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    KV_ROWS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    frame: Frame
    result: Result
    features: Features
    drafts: Drafts
    tap: Tap
    goodbye: Goodbye
    remainder: Remainder
    lost: Lost
    kv_rows: KvRows
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., result: _Optional[_Union[Result, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ..., tap: _Optional[_Union[Tap, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., remainder: _Optional[_Union[Remainder, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., kv_rows: _Optional[_Union[KvRows, _Mapping]] = ...) -> None: ...

class CarryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Remainder(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("peer", "reason", "epoch")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: str
    epoch: int
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class MeetRequest(_message.Message):
    __slots__ = ("hello", "key", "rows", "nearby")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NEARBY_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    key: bytes
    rows: bool
    nearby: bool
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., key: _Optional[bytes] = ..., rows: bool = ..., nearby: bool = ...) -> None: ...

class MeetResponse(_message.Message):
    __slots__ = ("name", "port", "path", "socket", "key")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    name: str
    port: int
    path: str
    socket: str
    key: bytes
    def __init__(self, name: _Optional[str] = ..., port: _Optional[int] = ..., path: _Optional[str] = ..., socket: _Optional[str] = ..., key: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("sender", "epoch", "protocol")
    SENDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    sender: str
    epoch: int
    protocol: int
    def __init__(self, sender: _Optional[str] = ..., epoch: _Optional[int] = ..., protocol: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Fork(_message.Message):
    __slots__ = ("sequence", "length")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    length: int
    def __init__(self, sequence: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class PlanRules(_message.Message):
    __slots__ = ("direct", "tools", "max_points", "plan_tokens", "listed")
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    MAX_POINTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LISTED_FIELD_NUMBER: _ClassVar[int]
    direct: bool
    tools: _containers.RepeatedScalarFieldContainer[str]
    max_points: int
    plan_tokens: int
    listed: bool
    def __init__(self, direct: bool = ..., tools: _Optional[_Iterable[str]] = ..., max_points: _Optional[int] = ..., plan_tokens: _Optional[int] = ..., listed: bool = ...) -> None: ...

class Opening(_message.Message):
    __slots__ = ("sequence", "prompt", "fork", "decodes", "drafted", "generated", "sampling", "seed", "ordinal", "stop_ids", "limit", "plan", "logprobs", "form", "family", "drafter", "trace", "window", "pruning", "heads", "min_tokens", "prompt_logprobs", "reused", "importance", "soft_end", "excluded_first")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    DECODES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PRUNING_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    REUSED_FIELD_NUMBER: _ClassVar[int]
    IMPORTANCE_FIELD_NUMBER: _ClassVar[int]
    SOFT_END_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIRST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    prompt: int
    fork: Fork
    decodes: bool
    drafted: bool
    generated: int
    sampling: _values_pb2.Sampling
    seed: int
    ordinal: int
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    limit: int
    plan: PlanRules
    logprobs: int
    form: _values_pb2.Form
    family: int
    drafter: _values_pb2.DraftMethod
    trace: str
    window: _values_pb2.Window
    pruning: _values_pb2.Pruning
    heads: _containers.RepeatedCompositeFieldContainer[LayerHeads]
    min_tokens: int
    prompt_logprobs: int
    reused: ReusedKV
    importance: _containers.RepeatedCompositeFieldContainer[LayerImportance]
    soft_end: SoftEnd
    excluded_first: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., prompt: _Optional[int] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., decodes: bool = ..., drafted: bool = ..., generated: _Optional[int] = ..., sampling: _Optional[_Union[_values_pb2.Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., ordinal: _Optional[int] = ..., stop_ids: _Optional[_Iterable[int]] = ..., limit: _Optional[int] = ..., plan: _Optional[_Union[PlanRules, _Mapping]] = ..., logprobs: _Optional[int] = ..., form: _Optional[_Union[_values_pb2.Form, _Mapping]] = ..., family: _Optional[int] = ..., drafter: _Optional[_Union[_values_pb2.DraftMethod, str]] = ..., trace: _Optional[str] = ..., window: _Optional[_Union[_values_pb2.Window, _Mapping]] = ..., pruning: _Optional[_Union[_values_pb2.Pruning, _Mapping]] = ..., heads: _Optional[_Iterable[_Union[LayerHeads, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., reused: _Optional[_Union[ReusedKV, _Mapping]] = ..., importance: _Optional[_Iterable[_Union[LayerImportance, _Mapping]]] = ..., soft_end: _Optional[_Union[SoftEnd, _Mapping]] = ..., excluded_first: _Optional[_Iterable[int]] = ...) -> None: ...

class SoftEnd(_message.Message):
    __slots__ = ("after", "token")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    after: int
    token: int
    def __init__(self, after: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class ReusedKV(_message.Message):
    __slots__ = ("sequence", "tokens", "replay")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    replay: bool
    def __init__(self, sequence: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., replay: bool = ...) -> None: ...

class LayerHeads(_message.Message):
    __slots__ = ("sinks", "recent")
    SINKS_FIELD_NUMBER: _ClassVar[int]
    RECENT_FIELD_NUMBER: _ClassVar[int]
    sinks: _containers.RepeatedScalarFieldContainer[int]
    recent: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sinks: _Optional[_Iterable[int]] = ..., recent: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerImportance(_message.Message):
    __slots__ = ("heads",)
    HEADS_FIELD_NUMBER: _ClassVar[int]
    heads: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, heads: _Optional[_Iterable[float]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("sequence", "start", "tokens", "final")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    final: bool
    def __init__(self, sequence: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., final: bool = ...) -> None: ...

class ParentNode(_message.Message):
    __slots__ = ("draft_round", "node")
    DRAFT_ROUND_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    draft_round: int
    node: int
    def __init__(self, draft_round: _Optional[int] = ..., node: _Optional[int] = ...) -> None: ...

class Growth(_message.Message):
    __slots__ = ("sequence", "draft_round", "committed", "keep", "tree", "parent", "scratch", "freed", "earlier", "later")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    SCRATCH_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    draft_round: int
    committed: int
    keep: _containers.RepeatedScalarFieldContainer[int]
    tree: _values_pb2.Tree
    parent: ParentNode
    scratch: int
    freed: _containers.RepeatedScalarFieldContainer[int]
    earlier: int
    later: int
    def __init__(self, sequence: _Optional[int] = ..., draft_round: _Optional[int] = ..., committed: _Optional[int] = ..., keep: _Optional[_Iterable[int]] = ..., tree: _Optional[_Union[_values_pb2.Tree, _Mapping]] = ..., parent: _Optional[_Union[ParentNode, _Mapping]] = ..., scratch: _Optional[int] = ..., freed: _Optional[_Iterable[int]] = ..., earlier: _Optional[int] = ..., later: _Optional[int] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("chunk", "growth")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    GROWTH_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    growth: Growth
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., growth: _Optional[_Union[Growth, _Mapping]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("epoch", "number", "openings", "segments", "closings", "hidden", "fused", "seconds", "paused", "trace", "catching_up", "extra_passes", "replay", "part", "last_part")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    CLOSINGS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    FUSED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    CATCHING_UP_FIELD_NUMBER: _ClassVar[int]
    EXTRA_PASSES_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    LAST_PART_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    openings: _containers.RepeatedCompositeFieldContainer[Opening]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    closings: _containers.RepeatedScalarFieldContainer[int]
    hidden: _values_pb2.Tensor
    fused: _values_pb2.Tensor
    seconds: _containers.RepeatedScalarFieldContainer[float]
    paused: bool
    trace: str
    catching_up: bool
    extra_passes: int
    replay: bool
    part: int
    last_part: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., openings: _Optional[_Iterable[_Union[Opening, _Mapping]]] = ..., segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., closings: _Optional[_Iterable[int]] = ..., hidden: _Optional[_Union[_values_pb2.Tensor, _Mapping]] = ..., fused: _Optional[_Union[_values_pb2.Tensor, _Mapping]] = ..., seconds: _Optional[_Iterable[float]] = ..., paused: bool = ..., trace: _Optional[str] = ..., catching_up: bool = ..., extra_passes: _Optional[int] = ..., replay: bool = ..., part: _Optional[int] = ..., last_part: _Optional[int] = ...) -> None: ...

class Chance(_message.Message):
    __slots__ = ("logprob", "top_tokens", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("sequence", "draft_round", "accepted", "tokens", "end", "chances", "forced", "draft_paused", "prompt_chances", "dropped", "extra_passes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CHANCES_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PAUSED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CHANCES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    EXTRA_PASSES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    draft_round: int
    accepted: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    end: End
    chances: _containers.RepeatedCompositeFieldContainer[Chance]
    forced: _containers.RepeatedScalarFieldContainer[int]
    draft_paused: bool
    prompt_chances: _containers.RepeatedCompositeFieldContainer[Chance]
    dropped: _containers.RepeatedScalarFieldContainer[int]
    extra_passes: int
    def __init__(self, sequence: _Optional[int] = ..., draft_round: _Optional[int] = ..., accepted: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., end: _Optional[_Union[End, str]] = ..., chances: _Optional[_Iterable[_Union[Chance, _Mapping]]] = ..., forced: _Optional[_Iterable[int]] = ..., draft_paused: bool = ..., prompt_chances: _Optional[_Iterable[_Union[Chance, _Mapping]]] = ..., dropped: _Optional[_Iterable[int]] = ..., extra_passes: _Optional[int] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("epoch", "number", "outcomes", "seconds", "rows", "drafts", "drafted", "prefixes", "verified_part")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_PART_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    rows: int
    drafts: int
    drafted: int
    prefixes: _containers.RepeatedCompositeFieldContainer[PrefixProgress]
    verified_part: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., seconds: _Optional[_Iterable[float]] = ..., rows: _Optional[int] = ..., drafts: _Optional[int] = ..., drafted: _Optional[int] = ..., prefixes: _Optional[_Iterable[_Union[PrefixProgress, _Mapping]]] = ..., verified_part: _Optional[int] = ...) -> None: ...

class PrefixProgress(_message.Message):
    __slots__ = ("sequence", "num_computed")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    num_computed: int
    def __init__(self, sequence: _Optional[int] = ..., num_computed: _Optional[int] = ...) -> None: ...

class FeatureBatch(_message.Message):
    __slots__ = ("sequence", "start", "tokens", "bonus", "draft_round", "forced")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BONUS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROUND_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    bonus: int
    draft_round: int
    forced: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence: _Optional[int] = ..., start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., bonus: _Optional[int] = ..., draft_round: _Optional[int] = ..., forced: _Optional[_Iterable[int]] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("epoch", "number", "openings", "feature_batches", "closings", "rows", "fed", "seconds", "wall", "paused_trees", "trace", "must_answer")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OPENINGS_FIELD_NUMBER: _ClassVar[int]
    FEATURE_BATCHES_FIELD_NUMBER: _ClassVar[int]
    CLOSINGS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WALL_FIELD_NUMBER: _ClassVar[int]
    PAUSED_TREES_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    MUST_ANSWER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    openings: _containers.RepeatedCompositeFieldContainer[Opening]
    feature_batches: _containers.RepeatedCompositeFieldContainer[FeatureBatch]
    closings: _containers.RepeatedScalarFieldContainer[int]
    rows: _values_pb2.Tensor
    fed: int
    seconds: float
    wall: float
    paused_trees: int
    trace: str
    must_answer: bool
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., openings: _Optional[_Iterable[_Union[Opening, _Mapping]]] = ..., feature_batches: _Optional[_Iterable[_Union[FeatureBatch, _Mapping]]] = ..., closings: _Optional[_Iterable[int]] = ..., rows: _Optional[_Union[_values_pb2.Tensor, _Mapping]] = ..., fed: _Optional[int] = ..., seconds: _Optional[float] = ..., wall: _Optional[float] = ..., paused_trees: _Optional[int] = ..., trace: _Optional[str] = ..., must_answer: bool = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("sequence", "draft_round", "tree", "parent")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROUND_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    draft_round: int
    tree: _values_pb2.Tree
    parent: ParentNode
    def __init__(self, sequence: _Optional[int] = ..., draft_round: _Optional[int] = ..., tree: _Optional[_Union[_values_pb2.Tree, _Mapping]] = ..., parent: _Optional[_Union[ParentNode, _Mapping]] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("epoch", "drafts", "paused_trees", "drafter")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_TREES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    drafts: _containers.RepeatedCompositeFieldContainer[Draft]
    paused_trees: int
    drafter: str
    def __init__(self, epoch: _Optional[int] = ..., drafts: _Optional[_Iterable[_Union[Draft, _Mapping]]] = ..., paused_trees: _Optional[int] = ..., drafter: _Optional[str] = ...) -> None: ...

class Tap(_message.Message):
    __slots__ = ("epoch", "layer", "rows", "first_row", "part")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layer: int
    rows: int
    first_row: int
    part: _values_pb2.Tensor
    def __init__(self, epoch: _Optional[int] = ..., layer: _Optional[int] = ..., rows: _Optional[int] = ..., first_row: _Optional[int] = ..., part: _Optional[_Union[_values_pb2.Tensor, _Mapping]] = ...) -> None: ...

class KvRows(_message.Message):
    __slots__ = ("epoch", "sequence", "layer", "first", "rows")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    layer: int
    first: int
    rows: _values_pb2.Tensor
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., layer: _Optional[int] = ..., first: _Optional[int] = ..., rows: _Optional[_Union[_values_pb2.Tensor, _Mapping]] = ...) -> None: ...
