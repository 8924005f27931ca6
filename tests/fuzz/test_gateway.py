"""Every endpoint and WebSocket of a gateway with random bodies and events. `make fuzz` sends 100,000."""

import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.rpc.handlers import Context, answering, streaming
from stagemesh.rpc.server import Server
from stagemesh.v1 import orchestrator_pb2, signature_pb2, tensor_pb2
from stagemesh.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from stagemesh.v1.request_pb2 import Media, Output
from tests.client.scripted import ScriptedOrchestrator, admitted, audio, ended, finished, text
from tests.client.scripted_sessions import committed, generated, granted, opened, rejected, turn_ended
from tests.fuzz.gateway import EVENT_SEEDS, FORM_SEEDS, JSON_SEEDS, PNG, GatewayFuzzer
from tests.fuzz.rpcs import defects_in_log
from tests.fuzz.test_rpcs import GROWTH_MB, MESSAGES, SEED
from tests.gateway.making import describe, gateway

pytestmark = pytest.mark.timeout(120 + MESSAGES // 20)
_MAX_CHOICES = 16
_VALID = {"model": "p", "messages": [{"role": "user", "content": "hi"}]}


class _AnsweringOrchestrator(ScriptedOrchestrator):
    """Answers each request in all outputs that it asks for, and accepts what a real orchestrator would check."""

    @streaming
    async def Generate(
        self, request: orchestrator_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[orchestrator_pb2.GenerateResponse]:
        async with answering(context):
            choices = max(1, request.parameters.choices)
            if choices > _MAX_CHOICES:
                raise InvalidRequestError(f"choices is {choices}; at most {_MAX_CHOICES} are accepted")
            yield admitted(choices=choices)
            for index, name in itertools.product(range(choices), request.outputs):
                for event in _content(name, index):
                    yield event
                yield ended(name, index=index)
            yield finished(choices)

    @streaming
    async def Converse(
        self, requests: AsyncIterator[orchestrator_pb2.ConverseRequest], context: Context
    ) -> AsyncIterator[orchestrator_pb2.ConverseResponse]:
        async with answering(context):
            turn = 1
            yield opened()
            async for event in requests:
                yield granted(event.seq + (1 << 20), accepted=event.seq)
                if event.WhichOneof("event") == "commit":
                    yield committed(turn)
                    yield generated(turn, audio([0.25] * 240))
                    yield turn_ended(turn)
                    turn += 1
                elif event.WhichOneof("event") == "interrupt":
                    yield rejected(event.seq, NotReadyError("the answer has ended", reason="TURN_ENDED"))


def _content(output: str, index: int) -> Sequence[orchestrator_pb2.GenerateResponse]:
    if output == "audio":
        return [audio([0.25] * 240, index=index)]
    if output == "image":
        image = Media(media_type="image/png", data=PNG, last=True)
        return [orchestrator_pb2.GenerateResponse(output=Output(name=output, index=index, image=image))]
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    return [text(word, output=output, index=index) for word in ("one ", call)]


async def test_the_gateway_survives_any_body_and_any_event(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    orchestrator, server = _AnsweringOrchestrator(), Server("127.0.0.1:0")
    add_OrchestratorServiceServicer_to_server(orchestrator, server.grpc)
    stage = signature_pb2.Signature(
        accepts=[signature_pb2.AcceptedTensor(spec=tensor_pb2.TensorSpec(name="text"))],
        options=[
            signature_pb2.OptionSpec(name=name, default_value=tensor_pb2.TypedValue(text=""))
            for name in ("voice", "ref_text")
        ],
        media=True,
        sampling=True,
    )
    fed = orchestrator_pb2.EdgeDescription(from_stage="@input", to_stage="stage")
    describe(orchestrator, "text", "audio", "image", signature=stage, edges=[fed], detects_turns=True)
    async with server.serving(grace_s=0) as port:
        before = set(psutil.Process().children())
        with gateway(f"127.0.0.1:{port}", arguments=("--voices", str(tmp_path))) as url:
            (process,) = set(psutil.Process().children()) - before
            async with GatewayFuzzer(url.removeprefix("http://"), SEED) as fuzzer, httpx.AsyncClient() as http:
                await fuzzer.send(300)
                valid = (await http.post(f"{url}/v1/chat/completions", json=_VALID)).json()["choices"]
                before_mb = process.memory_info().rss / 1e6
                await fuzzer.send(MESSAGES)
                again = (await http.post(f"{url}/v1/chat/completions", json=_VALID)).json()["choices"]
                growth_mb = process.memory_info().rss / 1e6 - before_mb
    findings, log = fuzzer.findings, capfd.readouterr().err
    print(dict(findings.codes))
    defects = [*findings.defects, *defects_in_log(log)]
    assert not defects, "\n".join(each for some in (findings.defects, defects_in_log(log)) for each in some[:5])
    assert {*JSON_SEEDS, *FORM_SEEDS, *EVENT_SEEDS} <= findings.sent.keys()
    assert valid == again
    assert growth_mb < GROWTH_MB
