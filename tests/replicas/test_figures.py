"""Figures of several rings carry their number."""

import pytest

pytest.importorskip("prometheus_client")

from specsot.core.frames import Result
from specsot.core.info import Info, ModelInfo, PagesInfo, ReplicaInfo, RequestsInfo
from specsot.events import Started
from specsot_master.telemetry import Metrics, RequestMetrics

RINGS = tuple(
    ReplicaInfo(n, n + 5, n == 0, requests=RequestsInfo(running=n, ended=(("stop", n),))) for n in range(2)
)
INFO = Info((ModelInfo("demo", "abc", 8, 2048),), replicas=RINGS)


def test_every_ring_has_figures_of_its_own():
    metrics = Metrics(lambda: INFO)
    first, second = (metrics.of(n, lambda: True) for n in range(2))
    second.on_result(Result(6, 1, (), seconds=(0.5,)))
    watch = RequestMetrics(lambda request: second if request == "r" else first, lambda: 0.0)
    watch.on_event(Started("r", "demo", "direct", 1, 3))
    told = metrics.written().decode().splitlines()
    for line in (
        'specsot:ring_ready{engine="0",model_name="demo"} 1.0',
        'specsot:ring_ready{engine="1",model_name="demo"} 0.0',
        'specsot:num_requests_running{engine="1",model_name="demo"} 1.0',
        'specsot:stage_seconds_count{engine="1",model_name="demo",stage="0"} 1.0',
        'specsot:request_queue_time_seconds_count{engine="1",model_name="demo"} 1.0',
        'specsot:request_success_total{engine="1",finished_reason="stop",model_name="demo"} 1.0',
    ):
        assert line in told, line
    assert not any(line.startswith('specsot:stage_seconds_count{engine="0"') for line in told)


def test_dashboards_made_for_vllm_find_its_names():
    pages = PagesInfo(64, 60, 256)
    info = Info((ModelInfo("demo", "abc", 8, 2048),), pages=pages)
    told = Metrics(lambda: info, prefix="vllm").written().decode().splitlines()
    assert 'vllm:num_requests_waiting{engine="0",model_name="demo"} 0.0' in told
    cache = 'vllm:cache_config_info{block_size="256",engine="0",model_name="demo",num_gpu_blocks="64"} 1.0'
    assert cache in told
    assert not any(line.startswith("specsot:num_") for line in told)
