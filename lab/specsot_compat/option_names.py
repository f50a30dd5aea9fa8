"""Names of options in other systems and in SpecSoT's predecessors, with the values that they take there.

Each program finds these names through the entry point group `specsot.option_names`: vLLM's and llama.cpp's
flags become further names of our flags, and the predecessors' Python keywords are accepted by
`SpecSoT.from_pretrained` and, hidden, as flags of commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from specsot.errors import InvalidRequest
from specsot.service.option_table import POSITIVE, OtherNames, is_word, same, truth


def mode_of(parallel: Any) -> Literal["auto", "direct"]:
    """Return the mode that the predecessors' `enable_parallel` means: "auto" for True, "direct" for False.

    parallel: Value of the option, a bool or a word for one, such as "true".
    Raises ValueError for any other value.
    """
    return "auto" if truth(parallel) else "direct"


def layers_of(splits: Any) -> str:
    """Return the layer ranges that the predecessors' `layer_splits` means: "14,28" -> "0:14,14:28,28:".

    splits: First layer of each stage after the first, as a comma-separated text or a sequence of numbers.
    """
    # Imported here, because every command loads this module, and only some load the fleet's options.
    from specsot_app.core.device_map import splits_of

    return splits_of(splits)


def layout_of(packed: Any) -> Literal["packed", "batched"]:
    """Return the branch layout that the predecessors' `use_bim_mode` means: "packed" for True, "batched" for
    False.

    packed: Value of the option, a bool or a word for one.
    Raises ValueError for any other value.
    """
    return "packed" if truth(packed) else "batched"


def devices_of(gpus: Any) -> str:
    """Return places, one a stage, that are GPUs of this machine: "0,1" or [0, 1] ->
    "127.0.0.1#0,127.0.0.1#1".

    gpus: Value of the predecessors' `gpu_ids`: numbers of GPUs, as a comma-separated text or a sequence.
    """
    numbers = gpus.split(",") if isinstance(gpus, str) else gpus
    return ",".join(f"127.0.0.1#{str(gpu).strip()}" for gpu in numbers)


def device_of(device_map: Any) -> str:
    """Return the torch device that Transformers' `device_map` means: 1 -> "cuda:1", "cpu" -> "cpu".

    A mapping without entries raises as well. A text of digits counts as a number.

    device_map: Number or name of a device, or a mapping from modules to a single device.
    Raises InvalidRequest if a mapping has several devices.
    """
    if isinstance(device_map, Mapping):
        devices = {str(device) for device in device_map.values()}
        if len(devices) != 1:
            raise InvalidRequest(f"device_map names {len(devices)} devices; name one", field="device_map")
        return device_of(next(iter(devices)))
    return f"cuda:{device_map}" if str(device_map).isdigit() else str(device_map)


def dtype_of(dtype: Any) -> str:
    """Return this project's name of a data type: "bf16" for torch.bfloat16, "bfloat16" and "bf16". An unknown
    name is returned as it is.

    dtype: A torch dtype, or a name.
    """
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)


# By the settings class that declares the field, and the field.
OPTION_NAMES: Final[Mapping[tuple[str, str], OtherNames]] = {
    ("ClientOptions", "tls_ca"): OtherNames(("ssl-ca-certs",)),
    ("DraftModelOptions", "draft_model"): OtherNames(
        ("model-draft",), {"eagle_model_path": same, "ea_model_path": same}
    ),
    ("DraftOptions", "depth"): OtherNames(("draft-tokens", "num-speculative-tokens"), {"draft_tokens": same}),
    ("EngineConfig", "live"): OtherNames(("max-num-seqs", "parallel")),
    ("FleetOptions", "devices"): OtherNames(keywords={"gpu_ids": devices_of}),
    ("FleetOptions", "layers"): OtherNames(keywords={"layer_splits": layers_of}),
    ("FleetOptions", "layout"): OtherNames(keywords={"use_bim_mode": layout_of}),
    ("FleetOptions", "stages"): OtherNames(("pipeline-parallel-size",), {"world_size": same}),
    ("InferOptions", "question"): OtherNames(keywords={"prompt": str}),
    ("MasterConfig", "default_mode"): OtherNames(keywords={"enable_parallel": mode_of}),
    ("MasterConfig", "token_file"): OtherNames(("api-key-file",)),
    ("ModelOptions", "device"): OtherNames(keywords={"device_map": device_of}),
    ("ModelOptions", "dtype"): OtherNames(keywords={"dtype": dtype_of, "torch_dtype": dtype_of}),
    ("ModelOptions", "kv_memory"): OtherNames(("kv-cache-memory-bytes",)),
    ("ModelOptions", "model"): OtherNames(keywords={"base_model_path": same}),
    ("ModelOptions", "tensor_parallel"): OtherNames(
        ("tensor-parallel-size",), {"tensor_parallel_size": same}
    ),
    ("RequestOptions", "constraint"): OtherNames(keywords={"use_semantic_constraint": truth}),
    ("RequestOptions", "max_new_tokens"): OtherNames(("max-tokens", "n-predict")),
    ("RequestOptions", "mode"): OtherNames(keywords={"enable_parallel": mode_of}),
    ("RingOptions", "name"): OtherNames(("alias",)),
    ("RingOptions", "page_rows"): OtherNames(("block-size",)),
    ("RingOptions", "replicas"): OtherNames(("data-parallel-size",)),
    ("RingOptions", "rows"): OtherNames(("max-num-batched-tokens",)),
    ("SamplingOptions", "repetition_penalty"): OtherNames(("repeat-penalty",)),
    ("SamplingOptions", "temperature"): OtherNames(("temp",)),
    ("ServeOptions", "log_level"): OtherNames(("uvicorn-log-level",)),
    ("ServiceOptions", "log_level"): OtherNames(("uvicorn-log-level",)),
    ("Tls", "ca"): OtherNames(("ssl-ca-certs",)),
    ("Tls", "cert"): OtherNames(("ssl-certfile",)),
    ("Tls", "key"): OtherNames(("ssl-keyfile",)),
    # Earlier flags of this project, which count as the published EAGLE code does.
    ("TreeShape", "depth"): OtherNames(("draft-tokens", "num-speculative-tokens"), {"depth": POSITIVE.read}),
    ("TreeShape", "fixed"): OtherNames(keywords={"tree": is_word("fixed", "tuned").read}),
    ("TreeShape", "nodes"): OtherNames(keywords={"nodes": POSITIVE.read}),
    ("TreeShape", "top_k"): OtherNames(("width",)),
}
