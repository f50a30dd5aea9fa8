from specsot.v1 import ring_pb2 as _ring_pb2
from specsot.v1 import values_pb2 as _values_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_UNSPECIFIED: _ClassVar[Layout]
    LAYOUT_PACKED: _ClassVar[Layout]
    LAYOUT_BATCHED: _ClassVar[Layout]

class Transport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSPORT_UNSPECIFIED: _ClassVar[Transport]
    TRANSPORT_GRPC: _ClassVar[Transport]
    TRANSPORT_ZMQ: _ClassVar[Transport]
    TRANSPORT_DIRECT: _ClassVar[Transport]

class CommMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMM_MODE_UNSPECIFIED: _ClassVar[CommMode]
    COMM_MODE_P2P: _ClassVar[CommMode]
    COMM_MODE_RING: _ClassVar[CommMode]

class HopDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOP_DTYPE_UNSPECIFIED: _ClassVar[HopDtype]
    HOP_DTYPE_AUTO: _ClassVar[HopDtype]
    HOP_DTYPE_INT8: _ClassVar[HopDtype]
LAYOUT_UNSPECIFIED: Layout
LAYOUT_PACKED: Layout
LAYOUT_BATCHED: Layout
TRANSPORT_UNSPECIFIED: Transport
TRANSPORT_GRPC: Transport
TRANSPORT_ZMQ: Transport
TRANSPORT_DIRECT: Transport
COMM_MODE_UNSPECIFIED: CommMode
COMM_MODE_P2P: CommMode
COMM_MODE_RING: CommMode
HOP_DTYPE_UNSPECIFIED: HopDtype
HOP_DTYPE_AUTO: HopDtype
HOP_DTYPE_INT8: HopDtype

class ListLendersRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListLendersResponse(_message.Message):
    __slots__ = ("fingerprint", "addresses")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fingerprint: _Optional[str] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("register", "ready", "broken", "leaving", "beat", "result", "progress")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    register: Registration
    ready: Ready
    broken: Broken
    leaving: Leaving
    beat: Beat
    result: _ring_pb2.Result
    progress: Progress
    def __init__(self, register: _Optional[_Union[Registration, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., broken: _Optional[_Union[Broken, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., result: _Optional[_Union[_ring_pb2.Result, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("joined", "configure", "disband", "beat", "open", "close", "lease", "stand_by", "rejoined", "leaving", "hand_over", "drafter_lost")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    CONFIGURE_FIELD_NUMBER: _ClassVar[int]
    DISBAND_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STAND_BY_FIELD_NUMBER: _ClassVar[int]
    REJOINED_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    HAND_OVER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_LOST_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    configure: Configuration
    disband: Disband
    beat: Beat
    open: Open
    close: Close
    lease: Lease
    stand_by: StandBy
    rejoined: Rejoined
    leaving: Leaving
    hand_over: HandOver
    drafter_lost: DrafterLost
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., configure: _Optional[_Union[Configuration, _Mapping]] = ..., disband: _Optional[_Union[Disband, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., stand_by: _Optional[_Union[StandBy, _Mapping]] = ..., rejoined: _Optional[_Union[Rejoined, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., hand_over: _Optional[_Union[HandOver, _Mapping]] = ..., drafter_lost: _Optional[_Union[DrafterLost, _Mapping]] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("kind", "name", "address", "fingerprint", "model_layers", "max_positions", "kv_bytes", "row_bytes", "layers", "curve", "head", "protocol", "drafters", "shape", "host", "gpus", "memory", "weights", "rtt", "began", "number_bytes", "quantization", "epoch", "lends", "device", "dtype", "copy_speed", "hands_over", "hidden_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_LAYERS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RTT_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LENDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    COPY_SPEED_FIELD_NUMBER: _ClassVar[int]
    HANDS_OVER_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: _values_pb2.Kind
    name: str
    address: str
    fingerprint: str
    model_layers: int
    max_positions: int
    kv_bytes: int
    row_bytes: int
    layers: _values_pb2.Layers
    curve: _containers.RepeatedCompositeFieldContainer[_values_pb2.Cost]
    head: _values_pb2.Head
    protocol: int
    drafters: _containers.RepeatedScalarFieldContainer[_values_pb2.DraftMethod]
    shape: TreeShape
    host: str
    gpus: _containers.RepeatedScalarFieldContainer[str]
    memory: int
    weights: WeightBytes
    rtt: float
    began: int
    number_bytes: int
    quantization: str
    epoch: int
    lends: bool
    device: str
    dtype: str
    copy_speed: int
    hands_over: bool
    hidden_bytes: int
    def __init__(self, kind: _Optional[_Union[_values_pb2.Kind, str]] = ..., name: _Optional[str] = ..., address: _Optional[str] = ..., fingerprint: _Optional[str] = ..., model_layers: _Optional[int] = ..., max_positions: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., row_bytes: _Optional[int] = ..., layers: _Optional[_Union[_values_pb2.Layers, _Mapping]] = ..., curve: _Optional[_Iterable[_Union[_values_pb2.Cost, _Mapping]]] = ..., head: _Optional[_Union[_values_pb2.Head, _Mapping]] = ..., protocol: _Optional[int] = ..., drafters: _Optional[_Iterable[_Union[_values_pb2.DraftMethod, str]]] = ..., shape: _Optional[_Union[TreeShape, _Mapping]] = ..., host: _Optional[str] = ..., gpus: _Optional[_Iterable[str]] = ..., memory: _Optional[int] = ..., weights: _Optional[_Union[WeightBytes, _Mapping]] = ..., rtt: _Optional[float] = ..., began: _Optional[int] = ..., number_bytes: _Optional[int] = ..., quantization: _Optional[str] = ..., epoch: _Optional[int] = ..., lends: bool = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., copy_speed: _Optional[int] = ..., hands_over: bool = ..., hidden_bytes: _Optional[int] = ...) -> None: ...

class WeightBytes(_message.Message):
    __slots__ = ("layer", "first", "last")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    layer: int
    first: int
    last: int
    def __init__(self, layer: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("protocol", "heartbeat", "silence", "socket")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    SILENCE_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    heartbeat: float
    silence: float
    socket: str
    def __init__(self, protocol: _Optional[int] = ..., heartbeat: _Optional[float] = ..., silence: _Optional[float] = ..., socket: _Optional[str] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("epoch", "done", "total", "fetched", "layers", "migrated", "over")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MIGRATED_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    done: int
    total: int
    fetched: int
    layers: _values_pb2.Layers
    migrated: int
    over: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., fetched: _Optional[int] = ..., layers: _Optional[_Union[_values_pb2.Layers, _Mapping]] = ..., migrated: _Optional[int] = ..., over: _Optional[_Iterable[int]] = ...) -> None: ...

class Broken(_message.Message):
    __slots__ = ("epoch", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class StandBy(_message.Message):
    __slots__ = ("epoch", "layers")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    layers: _values_pb2.Layers
    def __init__(self, epoch: _Optional[int] = ..., layers: _Optional[_Union[_values_pb2.Layers, _Mapping]] = ...) -> None: ...

class HandOver(_message.Message):
    __slots__ = ("epoch", "givers", "takers", "rows", "number", "features", "hidden", "copies")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GIVERS_FIELD_NUMBER: _ClassVar[int]
    TAKERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    givers: _containers.RepeatedCompositeFieldContainer[Stage]
    takers: _containers.RepeatedCompositeFieldContainer[Stage]
    rows: _containers.RepeatedCompositeFieldContainer[RowsOf]
    number: int
    features: bool
    hidden: bool
    copies: bool
    def __init__(self, epoch: _Optional[int] = ..., givers: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., takers: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[RowsOf, _Mapping]]] = ..., number: _Optional[int] = ..., features: bool = ..., hidden: bool = ..., copies: bool = ...) -> None: ...

class RowsOf(_message.Message):
    __slots__ = ("sequence", "first", "last")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    first: int
    last: int
    def __init__(self, sequence: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Rejoined(_message.Message):
    __slots__ = ("epoch", "address", "name")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    address: str
    name: str
    def __init__(self, epoch: _Optional[int] = ..., address: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class DrafterLost(_message.Message):
    __slots__ = ("epoch", "name")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    name: str
    def __init__(self, epoch: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stage(_message.Message):
    __slots__ = ("name", "address", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    layers: _values_pb2.Layers
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., layers: _Optional[_Union[_values_pb2.Layers, _Mapping]] = ...) -> None: ...

class TreeShape(_message.Message):
    __slots__ = ("depth", "top_k", "nodes", "fixed")
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    depth: int
    top_k: int
    nodes: int
    fixed: bool
    def __init__(self, depth: _Optional[int] = ..., top_k: _Optional[int] = ..., nodes: _Optional[int] = ..., fixed: bool = ...) -> None: ...

class Configuration(_message.Message):
    __slots__ = ("epoch", "you", "stages", "pages", "page_rows", "slots", "rows", "flight", "layout", "drafter", "head", "shape", "draft_timeout", "curve", "transport", "comm_mode", "gpu", "hop_dtype", "drafters")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    YOU_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_ROWS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    CURVE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    COMM_MODE_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    HOP_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    you: str
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    pages: int
    page_rows: int
    slots: int
    rows: int
    flight: int
    layout: Layout
    drafter: str
    head: _values_pb2.Head
    shape: TreeShape
    draft_timeout: float
    curve: _containers.RepeatedCompositeFieldContainer[_values_pb2.Cost]
    transport: Transport
    comm_mode: CommMode
    gpu: str
    hop_dtype: HopDtype
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterPlace]
    def __init__(self, epoch: _Optional[int] = ..., you: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., pages: _Optional[int] = ..., page_rows: _Optional[int] = ..., slots: _Optional[int] = ..., rows: _Optional[int] = ..., flight: _Optional[int] = ..., layout: _Optional[_Union[Layout, str]] = ..., drafter: _Optional[str] = ..., head: _Optional[_Union[_values_pb2.Head, _Mapping]] = ..., shape: _Optional[_Union[TreeShape, _Mapping]] = ..., draft_timeout: _Optional[float] = ..., curve: _Optional[_Iterable[_Union[_values_pb2.Cost, _Mapping]]] = ..., transport: _Optional[_Union[Transport, str]] = ..., comm_mode: _Optional[_Union[CommMode, str]] = ..., gpu: _Optional[str] = ..., hop_dtype: _Optional[_Union[HopDtype, str]] = ..., drafters: _Optional[_Iterable[_Union[DrafterPlace, _Mapping]]] = ...) -> None: ...

class DrafterPlace(_message.Message):
    __slots__ = ("name", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Disband(_message.Message):
    __slots__ = ("epoch", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("opening", "tokens", "lease")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    opening: _ring_pb2.Opening
    tokens: _containers.RepeatedScalarFieldContainer[int]
    lease: int
    def __init__(self, opening: _Optional[_Union[_ring_pb2.Opening, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., lease: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("sequence", "kept")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kept: bool
    def __init__(self, sequence: _Optional[int] = ..., kept: bool = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("sequence", "position")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    position: int
    def __init__(self, sequence: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...
