from specsot.v1 import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_AUTO: _ClassVar[Mode]
    MODE_SOT: _ClassVar[Mode]
    MODE_DIRECT: _ClassVar[Mode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
    FINISH_REASON_FAILED: _ClassVar[FinishReason]
    FINISH_REASON_PARENT_FAILED: _ClassVar[FinishReason]
MODE_UNSPECIFIED: Mode
MODE_AUTO: Mode
MODE_SOT: Mode
MODE_DIRECT: Mode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason
FINISH_REASON_FAILED: FinishReason
FINISH_REASON_PARENT_FAILED: FinishReason

class Message(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_new_tokens", "max_branch_tokens", "max_skeleton_tokens", "max_parallel")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_BRANCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SKELETON_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    max_branch_tokens: int
    max_skeleton_tokens: int
    max_parallel: int
    def __init__(self, max_new_tokens: _Optional[int] = ..., max_branch_tokens: _Optional[int] = ..., max_skeleton_tokens: _Optional[int] = ..., max_parallel: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompt", "messages", "model", "mode", "drafter", "sampling", "limits", "stop", "tools", "constraint", "seed", "request_id", "resume_from", "ignore_eos", "logprobs", "tokens", "form", "priority", "resumable", "window", "pruning", "head_aware", "finish_within_s", "polish", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PRUNING_FIELD_NUMBER: _ClassVar[int]
    HEAD_AWARE_FIELD_NUMBER: _ClassVar[int]
    FINISH_WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    POLISH_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prompt: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    model: str
    mode: Mode
    drafter: _values_pb2.DraftMethod
    sampling: _values_pb2.Sampling
    limits: Limits
    stop: _containers.RepeatedScalarFieldContainer[str]
    tools: _containers.RepeatedScalarFieldContainer[str]
    constraint: bool
    seed: int
    request_id: str
    resume_from: int
    ignore_eos: bool
    logprobs: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    form: _values_pb2.Form
    priority: int
    resumable: bool
    window: _values_pb2.Window
    pruning: _values_pb2.Pruning
    head_aware: bool
    finish_within_s: float
    polish: bool
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    prompt_logprobs: int
    def __init__(self, prompt: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ..., model: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., drafter: _Optional[_Union[_values_pb2.DraftMethod, str]] = ..., sampling: _Optional[_Union[_values_pb2.Sampling, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., tools: _Optional[_Iterable[str]] = ..., constraint: bool = ..., seed: _Optional[int] = ..., request_id: _Optional[str] = ..., resume_from: _Optional[int] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., form: _Optional[_Union[_values_pb2.Form, _Mapping]] = ..., priority: _Optional[int] = ..., resumable: bool = ..., window: _Optional[_Union[_values_pb2.Window, _Mapping]] = ..., pruning: _Optional[_Union[_values_pb2.Pruning, _Mapping]] = ..., head_aware: bool = ..., finish_within_s: _Optional[float] = ..., polish: bool = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., include_stop_str_in_output: bool = ..., skip_special_tokens: bool = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("number", "started", "skeleton_text", "planned", "branch_started", "branch_text", "branch_finished", "merged_text", "finished", "prompt_scored")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    SKELETON_TEXT_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    BRANCH_STARTED_FIELD_NUMBER: _ClassVar[int]
    BRANCH_TEXT_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FINISHED_FIELD_NUMBER: _ClassVar[int]
    MERGED_TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORED_FIELD_NUMBER: _ClassVar[int]
    number: int
    started: Started
    skeleton_text: SkeletonText
    planned: Planned
    branch_started: BranchStarted
    branch_text: BranchText
    branch_finished: BranchFinished
    merged_text: MergedText
    finished: Finished
    prompt_scored: PromptScored
    def __init__(self, number: _Optional[int] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., skeleton_text: _Optional[_Union[SkeletonText, _Mapping]] = ..., planned: _Optional[_Union[Planned, _Mapping]] = ..., branch_started: _Optional[_Union[BranchStarted, _Mapping]] = ..., branch_text: _Optional[_Union[BranchText, _Mapping]] = ..., branch_finished: _Optional[_Union[BranchFinished, _Mapping]] = ..., merged_text: _Optional[_Union[MergedText, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., prompt_scored: _Optional[_Union[PromptScored, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "mode", "seed", "prompt_tokens", "forecast")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    mode: Mode
    seed: int
    prompt_tokens: int
    forecast: Forecast
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., seed: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ...) -> None: ...

class Forecast(_message.Message):
    __slots__ = ("direct", "planned", "direct_min", "direct_max", "planned_min", "planned_max")
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    DIRECT_MIN_FIELD_NUMBER: _ClassVar[int]
    DIRECT_MAX_FIELD_NUMBER: _ClassVar[int]
    PLANNED_MIN_FIELD_NUMBER: _ClassVar[int]
    PLANNED_MAX_FIELD_NUMBER: _ClassVar[int]
    direct: float
    planned: float
    direct_min: float
    direct_max: float
    planned_min: float
    planned_max: float
    def __init__(self, direct: _Optional[float] = ..., planned: _Optional[float] = ..., direct_min: _Optional[float] = ..., direct_max: _Optional[float] = ..., planned_min: _Optional[float] = ..., planned_max: _Optional[float] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("token", "raw", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    raw: bytes
    logprob: float
    def __init__(self, token: _Optional[int] = ..., raw: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("chosen", "top")
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    chosen: Candidate
    top: _containers.RepeatedCompositeFieldContainer[Candidate]
    def __init__(self, chosen: _Optional[_Union[Candidate, _Mapping]] = ..., top: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ...) -> None: ...

class PromptScored(_message.Message):
    __slots__ = ("position", "logprobs")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class SkeletonText(_message.Message):
    __slots__ = ("text", "logprobs")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class Point(_message.Message):
    __slots__ = ("id", "length", "tool", "needs", "title")
    ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    id: int
    length: int
    tool: str
    needs: _containers.RepeatedScalarFieldContainer[int]
    title: str
    def __init__(self, id: _Optional[int] = ..., length: _Optional[int] = ..., tool: _Optional[str] = ..., needs: _Optional[_Iterable[int]] = ..., title: _Optional[str] = ...) -> None: ...

class Planned(_message.Message):
    __slots__ = ("points", "forecast")
    POINTS_FIELD_NUMBER: _ClassVar[int]
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    points: _containers.RepeatedCompositeFieldContainer[Point]
    forecast: Forecast
    def __init__(self, points: _Optional[_Iterable[_Union[Point, _Mapping]]] = ..., forecast: _Optional[_Union[Forecast, _Mapping]] = ...) -> None: ...

class BranchStarted(_message.Message):
    __slots__ = ("branch", "title", "budget")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    TITLE_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    branch: int
    title: str
    budget: int
    def __init__(self, branch: _Optional[int] = ..., title: _Optional[str] = ..., budget: _Optional[int] = ...) -> None: ...

class BranchText(_message.Message):
    __slots__ = ("branch", "offset", "text", "step_tokens", "logprobs")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    branch: int
    offset: int
    text: str
    step_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, branch: _Optional[int] = ..., offset: _Optional[int] = ..., text: _Optional[str] = ..., step_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class BranchFinished(_message.Message):
    __slots__ = ("branch", "reason", "tokens")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    branch: int
    reason: FinishReason
    tokens: int
    def __init__(self, branch: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., tokens: _Optional[int] = ...) -> None: ...

class MergedText(_message.Message):
    __slots__ = ("offset", "text", "logprobs", "step_tokens")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    offset: int
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    step_tokens: int
    def __init__(self, offset: _Optional[int] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., step_tokens: _Optional[int] = ...) -> None: ...

class Statistics(_message.Message):
    __slots__ = ("mode", "prompt_tokens", "completion_tokens", "merged_tokens", "seconds", "seconds_to_first_token", "tokens_per_second", "steps", "mean_accepted", "branches", "phases", "cached_tokens", "plan_tokens", "heading_tokens", "polish_tokens", "paused_share", "decision", "in_time", "discarded_tokens")
    class PhasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MERGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEADING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLISH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_SHARE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    IN_TIME_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    mode: Mode
    prompt_tokens: int
    completion_tokens: int
    merged_tokens: int
    seconds: float
    seconds_to_first_token: float
    tokens_per_second: float
    steps: int
    mean_accepted: float
    branches: int
    phases: _containers.ScalarMap[str, float]
    cached_tokens: int
    plan_tokens: int
    heading_tokens: int
    polish_tokens: int
    paused_share: float
    decision: str
    in_time: bool
    discarded_tokens: int
    def __init__(self, mode: _Optional[_Union[Mode, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., merged_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., seconds_to_first_token: _Optional[float] = ..., tokens_per_second: _Optional[float] = ..., steps: _Optional[int] = ..., mean_accepted: _Optional[float] = ..., branches: _Optional[int] = ..., phases: _Optional[_Mapping[str, float]] = ..., cached_tokens: _Optional[int] = ..., plan_tokens: _Optional[int] = ..., heading_tokens: _Optional[int] = ..., polish_tokens: _Optional[int] = ..., paused_share: _Optional[float] = ..., decision: _Optional[str] = ..., in_time: bool = ..., discarded_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "text", "tokens", "statistics", "stop_string", "stop_token")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    text: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    statistics: Statistics
    stop_string: str
    stop_token: int
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., statistics: _Optional[_Union[Statistics, _Mapping]] = ..., stop_string: _Optional[str] = ..., stop_token: _Optional[int] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    def __init__(self, cancelled: bool = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ("changed", "epoch", "plan")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    epoch: int
    plan: str
    def __init__(self, changed: bool = ..., epoch: _Optional[int] = ..., plan: _Optional[str] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "fingerprint", "layers", "max_positions", "plan_style", "no_chat_template")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PLAN_STYLE_FIELD_NUMBER: _ClassVar[int]
    NO_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    layers: int
    max_positions: int
    plan_style: str
    no_chat_template: bool
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[int] = ..., max_positions: _Optional[int] = ..., plan_style: _Optional[str] = ..., no_chat_template: bool = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("kind", "name", "address", "fingerprint", "layers", "host", "gpu", "is_standby", "replica", "device", "memory", "dtype", "weights", "min_seconds", "head")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    IS_STANDBY_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    kind: _values_pb2.Kind
    name: str
    address: str
    fingerprint: str
    layers: _values_pb2.Layers
    host: str
    gpu: str
    is_standby: bool
    replica: int
    device: str
    memory: int
    dtype: str
    weights: int
    min_seconds: float
    head: str
    def __init__(self, kind: _Optional[_Union[_values_pb2.Kind, str]] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layers: _Optional[_Union[_values_pb2.Layers, _Mapping]] = ..., host: _Optional[str] = ..., gpu: _Optional[str] = ..., is_standby: bool = ..., replica: _Optional[int] = ..., device: _Optional[str] = ..., memory: _Optional[int] = ..., dtype: _Optional[str] = ..., weights: _Optional[int] = ..., min_seconds: _Optional[float] = ..., head: _Optional[str] = ...) -> None: ...

class Pages(_message.Message):
    __slots__ = ("total", "free", "rows", "kept")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    total: int
    free: int
    rows: int
    kept: int
    def __init__(self, total: _Optional[int] = ..., free: _Optional[int] = ..., rows: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...

class Requests(_message.Message):
    __slots__ = ("waiting", "running", "writing", "kept", "refused", "ended", "prompt_tokens", "cached_tokens")
    class EndedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WRITING_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    waiting: int
    running: int
    writing: int
    kept: int
    refused: int
    ended: _containers.ScalarMap[str, int]
    prompt_tokens: int
    cached_tokens: int
    def __init__(self, waiting: _Optional[int] = ..., running: _Optional[int] = ..., writing: _Optional[int] = ..., kept: _Optional[int] = ..., refused: _Optional[int] = ..., ended: _Optional[_Mapping[str, int]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Steps(_message.Message):
    __slots__ = ("steps", "tokens", "per_second", "tokens_per_step", "rows_per_step", "stages")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    ROWS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    steps: int
    tokens: int
    per_second: float
    tokens_per_step: float
    rows_per_step: float
    stages: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, steps: _Optional[int] = ..., tokens: _Optional[int] = ..., per_second: _Optional[float] = ..., tokens_per_step: _Optional[float] = ..., rows_per_step: _Optional[float] = ..., stages: _Optional[_Iterable[float]] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("number", "epoch", "ready", "waiting_for", "pages", "steps", "requests", "plan")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    number: int
    epoch: int
    ready: bool
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    pages: Pages
    steps: Steps
    requests: Requests
    plan: str
    def __init__(self, number: _Optional[int] = ..., epoch: _Optional[int] = ..., ready: bool = ..., waiting_for: _Optional[_Iterable[str]] = ..., pages: _Optional[_Union[Pages, _Mapping]] = ..., steps: _Optional[_Union[Steps, _Mapping]] = ..., requests: _Optional[_Union[Requests, _Mapping]] = ..., plan: _Optional[str] = ...) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "protocol", "models", "members", "epoch", "ready", "waiting_for", "pages", "steps", "requests", "plan", "replicas")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol: int
    models: _containers.RepeatedCompositeFieldContainer[Model]
    members: _containers.RepeatedCompositeFieldContainer[Member]
    epoch: int
    ready: bool
    waiting_for: _containers.RepeatedScalarFieldContainer[str]
    pages: Pages
    steps: Steps
    requests: Requests
    plan: str
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    def __init__(self, version: _Optional[str] = ..., protocol: _Optional[int] = ..., models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., epoch: _Optional[int] = ..., ready: bool = ..., waiting_for: _Optional[_Iterable[str]] = ..., pages: _Optional[_Union[Pages, _Mapping]] = ..., steps: _Optional[_Union[Steps, _Mapping]] = ..., requests: _Optional[_Union[Requests, _Mapping]] = ..., plan: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ...) -> None: ...
