"""The ports of vLLM and of the libraries that it loads."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.common.process.settings import library_variable
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.nixl import environment
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines.support import collect, stage_config, started
from tests.engines.vllm.test_kv_handover import Pair, alone, handed_over, task
from tests.engines.vllm.tiny_model import OPTIONS, write_real_model, write_tiny_model
from tests.ports import family, listening_hosts
from tests.rpc.call_errors import raises

pytestmark = pytest.mark.timeout(240)

CONNECTOR: dict[str, JsonValue] = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
OPENING: Mapping[str, dict[str, JsonValue]] = {
    "nodes": {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "127.0.0.1"},
    "data parallel": {"data_parallel_size": 2},
    "ray": {"distributed_executor_backend": "ray"},
    "external launcher": {"distributed_executor_backend": "external_launcher"},
    "a KV connector": {"kv_transfer_config": CONNECTOR},
    "fault tolerance": {"enable_fault_tolerance": True},
    "KV events": {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq"}},
    "an encoder cache connector": {"ec_transfer_config": {"ec_connector": "x", "ec_role": "ec_both"}},
}


def _config(model: Path, *, insecure_tcp: bool = False, **options: JsonValue) -> StageConfig:
    """Returns the config of a stage with certificates. The engine does not read them."""
    config = stage_config("vllm", model=str(model), options={**OPTIONS, "dtype": "float32", **options})
    return replace(config, tls="/certificates", insecure_tcp=insecure_tcp)


@pytest.mark.parametrize("options", OPENING.values(), ids=OPENING)
def test_with_certificates_options_that_open_ports_are_refused(options: dict[str, Any], text_model: Path) -> None:
    with raises(InvalidRequestError, reason="INVALID_OPTION", match="insecure_tcp: true"):
        VllmEngine(_config(text_model, **options)).start_workers()


def test_options_that_open_ports_are_accepted_if_permitted(text_model: Path) -> None:
    engine = VllmEngine(_config(text_model, insecure_tcp=True, **OPENING["nodes"]))
    assert engine._make_arguments().nnodes == 2


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_listens_on_loopback(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_model(tmp_path / "model")
    # As an image for several nodes may set it, for an interface that the test's network namespace need not have.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    async with started(VllmEngine(_config(model, tensor_parallel_size=ranks))) as engine:
        await collect(engine.submit(task("r", 20)))
        assert listening_hosts(*family(os.getpid())) <= {"127.0.0.1"}


async def test_certificates_exclude_tcp(text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_RDMA_DEVICES", tmp_path)
    for chosen in ("", "tcp"):
        monkeypatch.setenv("UCX_TLS", chosen)
        with raises(NotReadyError, reason="CONNECTOR_UNAVAILABLE", match="insecure_tcp"):
            async with started(VllmEngine(_config(text_model, kv_handover={"role": "prefill"}))):
                pass


async def test_a_permitted_hand_over_opens_no_port_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_real_model(tmp_path / "model", positions=1024, deviation=0.2)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    options: dict[str, JsonValue] = {"load_format": "auto", "kv_cache_memory_bytes": 16 << 20}
    prefill, decode = (
        VllmEngine(_config(model, insecure_tcp=True, kv_handover={"role": role, "min_tokens": 4}, **options))
        for role in ("prefill", "decode")
    )
    async with started(prefill), started(decode):
        pair, each = Pair(prefill, decode), task("over", 300)
        assert await handed_over(pair, each) == await alone(pair, each)
        assert listening_hosts(*family(os.getpid())) <= {"127.0.0.1"}
        assert library_variable("VLLM_HOST_IP") == "127.0.0.1"
