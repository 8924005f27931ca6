"""Serves KEDA's interface for external scalers, by which KEDA scales the stages of a pipeline."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from stagemesh.common.errors import InvalidRequestError
from stagemesh.keda import externalscaler_pb2, externalscaler_pb2_grpc
from stagemesh.orchestrator.metrics.scaling import Metric, ScalingSignals, StageSignals
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.pipeline import Pipeline
from stagemesh.rpc.handlers import answering, streaming

SERVICE_NAME = externalscaler_pb2.DESCRIPTOR.services_by_name["ExternalScaler"].full_name

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_ACTIVITY_INTERVAL_S = 1.0
_TARGETS = {"queuedSeconds": Metric.QUEUED, "playoutAtRisk": Metric.PLAYOUT, "inFlight": Metric.IN_FLIGHT}
_ENTRIES = ("stage", *_TARGETS, "orchestrators")
# The entries of the metadata by which KEDA itself connects to the scaler.
_KEDA_ENTRIES = frozenset({"scalerAddress", "enableTLS", "unsafeSsl", "tlsCertFile"})


@dataclass(frozen=True)
class Trigger:
    """The metadata of a trigger."""

    stage: str
    targets: Mapping[Metric, float]
    """The value of each metric for which there shall be one replica. Omits the metrics that are off."""
    orchestrators: int
    """The number of orchestrators of the pipeline."""


class ExternalScalerServicer(externalscaler_pb2_grpc.ExternalScalerServicer):
    """Implements the RPCs of ExternalScaler for the stages of one orchestrator's pipeline."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._pipeline = orchestrator.pipeline
        self._signals = ScalingSignals(orchestrator)

    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _Context
    ) -> externalscaler_pb2.IsActiveResponse:
        async with answering(context):
            return externalscaler_pb2.IsActiveResponse(result=self._of(self._trigger(request)).is_active)

    @streaming
    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _Context
    ) -> AsyncIterator[externalscaler_pb2.IsActiveResponse]:
        async with answering(context):
            trigger, former = self._trigger(request), None
            while True:
                active = self._of(trigger).is_active
                if active is not former:
                    yield externalscaler_pb2.IsActiveResponse(result=active)
                former = active
                await asyncio.sleep(_ACTIVITY_INTERVAL_S)

    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _Context
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        async with answering(context):
            specs = [
                externalscaler_pb2.MetricSpec(metricName=metric.value, targetSizeFloat=target)
                for metric, target in self._trigger(request).targets.items()
            ]
            return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=specs)

    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, context: _Context
    ) -> externalscaler_pb2.GetMetricsResponse:
        async with answering(context):
            trigger = self._trigger(request.scaledObjectRef)
            metric = next((each for each in Metric if each.value == request.metricName), None)
            if metric is None:
                names = ", ".join(each.value for each in Metric)
                raise _invalid("metricName", f"is {request.metricName!r}; metrics: {names}")
            value = self._of(trigger).total(metric, orchestrators=trigger.orchestrators)
            return externalscaler_pb2.GetMetricsResponse(
                metricValues=[externalscaler_pb2.MetricValue(metricName=metric.value, metricValueFloat=value)]
            )

    def _trigger(self, request: externalscaler_pb2.ScaledObjectRef) -> Trigger:
        return parse_trigger(request.scalerMetadata, self._pipeline)

    def _of(self, trigger: Trigger) -> StageSignals:
        return self._signals.by_stage()[trigger.stage]


def parse_trigger(metadata: Mapping[str, str], pipeline: Pipeline) -> Trigger:
    """Parses the metadata of a trigger. Raises InvalidRequestError (INVALID_OPTION), which names the invalid entry."""
    for name in sorted(metadata.keys() - _KEDA_ENTRIES - set(_ENTRIES)):
        raise _invalid(name, f"is unknown; entries: {', '.join(_ENTRIES)}")
    stage = metadata.get("stage", "")
    if stage not in pipeline.stages:
        raise _invalid("stage", f"is {stage!r}; stages: {', '.join(pipeline.stages)}")
    targets = {metric: _number(metadata, name) for name, metric in _TARGETS.items()}
    on = {metric: target for metric, target in targets.items() if target}
    if not on:
        raise _invalid("queuedSeconds", f"is 0 or missing; set it, or another target ({', '.join(_TARGETS)})")
    orchestrators = _number(metadata, "orchestrators", default="1")
    if orchestrators < 1 or not orchestrators.is_integer():
        raise _invalid("orchestrators", f"is {metadata['orchestrators']!r}; it must be a whole number of at least 1")
    return Trigger(stage, on, int(orchestrators))


def _number(metadata: Mapping[str, str], name: str, *, default: str = "0") -> float:
    text = metadata.get(name, default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise _invalid(name, f"is {text!r}; it must be a number of at least 0")
    return value


def _invalid(name: str, detail: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} of the trigger's metadata {detail}", reason="INVALID_OPTION", metadata={"option": name}
    )
