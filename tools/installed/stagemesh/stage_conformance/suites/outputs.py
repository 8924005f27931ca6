"""The outputs that a step streams, and the parameters of a step."""

from collections.abc import Callable
from typing import Any

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import FURTHER, RECOVERY, Needs, case, expect
from stagemesh.stage_conformance.trial import Step, Trial, require
from stagemesh.v1 import request_pb2, signature_pb2
from stagemesh.v1.tensor_pb2 import TypedValue

_STEP = "A step"
_TABLE = "A step: the table of kinds (checklist 9)"
_STREAMED_KINDS: dict[int, Callable[[request_pb2.Output], int]] = {
    signature_pb2.TENSOR_KIND_TEXT: lambda part: len(part.text.encode()),
    signature_pb2.TENSOR_KIND_TOKENS: lambda part: len(part.token_ids.ids),
    signature_pb2.TENSOR_KIND_AUDIO: lambda part: part.audio.samples.shape[0] if part.audio.samples.shape else 0,
    signature_pb2.TENSOR_KIND_MEDIA: lambda part: len(part.media.data),
    signature_pb2.TENSOR_KIND_TENSOR: lambda part: _rows(part.tensor),
}
"""The length of a part by the kind of its tensor. Images are counted by their last parts."""


def _rows(tensor: Any) -> int:
    return tensor.shape[0] if tensor.shape else 1


@case("steps.positions", _TABLE)
async def positions(trial: Trial) -> None:
    require(trial.stage.emits, "the stage reports no emitted tensors")
    step = await _streamed(trial)
    kinds = {each.spec.name: each.kind for each in trial.stage.emits}
    for name, parts in step.outputs().items():
        expect(name in kinds, "outputs that were asked for", name)
        at = 0
        for part in parts:
            expect(part.position == at, f"position {at} in an output {name!r}", part.position)
            if kinds[name] == signature_pb2.TENSOR_KIND_IMAGE:
                at += part.image.last
            elif part.WhichOneof("content"):
                at += _STREAMED_KINDS[kinds[name]](part)


async def _streamed(trial: Trial) -> Step:
    """Runs a request whose outputs are all streamed."""
    step = await trial.call(trial.request()).accepted()
    await trial.supply()
    await step.finished()
    return step


@case("steps.content", _TABLE)
async def content(trial: Trial) -> None:
    require(trial.stage.emits, "the stage reports no emitted tensors")
    wanted = {
        signature_pb2.TENSOR_KIND_TEXT: "text",
        signature_pb2.TENSOR_KIND_TOKENS: "token_ids",
        signature_pb2.TENSOR_KIND_AUDIO: "audio",
        signature_pb2.TENSOR_KIND_IMAGE: "image",
        signature_pb2.TENSOR_KIND_MEDIA: "media",
        signature_pb2.TENSOR_KIND_TENSOR: "tensor",
    }
    kinds = {each.spec.name: wanted[each.kind] for each in trial.stage.emits}
    for name, parts in (await _streamed(trial)).outputs().items():
        found = {part.WhichOneof("content") for part in parts} - {None}
        expect(found <= {kinds.get(name)}, f"content of the kind {kinds.get(name)} in {name!r}", found)
        large = max(part.ByteSize() for part in parts)
        expect(large <= 8 << 20, "parts of at most 8 MiB", large)


@case("steps.resume-beyond-all", f"{_STEP}: a checkpoint after which nothing can be counted", level=RECOVERY)
async def resume_beyond_all(trial: Trial) -> None:
    require(trial.stage.described.signature.can_resume and trial.stage.emits, "the stage resumes no outputs")
    request = trial.request()
    request.resume_from.outputs[trial.stage.emits[0].spec.name] = (1 << 64) - 1
    await trial.refused(request, Code.INVALID_ARGUMENT, "INVALID_CHECKPOINT")


@case("steps.finish-parts", f"{_STEP}: a last part with `finish` for each streamed name (checklist 9)")
async def finish_parts(trial: Trial) -> None:
    require(trial.stage.emits, "the stage reports no emitted tensors")
    outputs = (await _streamed(trial)).outputs()
    for each in trial.stage.emits:
        parts = outputs.get(each.spec.name, [])
        finishes = [part.HasField("finish") for part in parts]
        expect(
            finishes[-1:] == [True] and not any(finishes[:-1]),
            f"`finish` in the last part of {each.spec.name!r}",
            finishes,
        )
        reason = parts[-1].finish.reason
        expect(reason != request_pb2.FINISH_REASON_UNSPECIFIED, "a reason of the finish", reason)


@case("steps.not-streamed", f"{_STEP}: only tensors that are named in `streamed` are returned", Needs.OUTPUT)
async def not_streamed(trial: Trial) -> None:
    outputs = [each for each in (await trial.good()).events if each.HasField("output")]
    expect(not outputs, "no output events", f"{len(outputs)} of them")


# -- parameters


@case("steps.option-values", "A step: reject values that are not allowed (INVALID_OPTION)")
async def option_values(trial: Trial) -> None:
    options = trial.stage.described.signature.options
    require(options, "the stage declares no options")
    for number, each in enumerate(options):
        kind = each.default_value.WhichOneof("kind")
        wrong = [TypedValue(text="x")] if kind != "text" else [TypedValue(integer=1)]
        if each.HasField("maximum") and kind in {"integer", "number"}:
            wrong.append(TypedValue(integer=int(each.maximum) + 1))
        if each.HasField("minimum") and kind in {"integer", "number"}:
            wrong.append(TypedValue(integer=int(each.minimum) - 1))
        if each.allowed_texts:
            wrong.append(TypedValue(text="conformance.none"))
        for index, value in enumerate(wrong):
            request = trial.request(request_id=f"{trial.request_id}.{number}.{index}")
            request.parameters.options[each.name].CopyFrom(value)
            await trial.refused(request, Code.INVALID_ARGUMENT, "INVALID_OPTION")


@case("steps.missing-input", "A step: reject the step if an absent tensor is required (MISSING_INPUT)", Needs.INPUT)
async def missing_input(trial: Trial) -> None:
    required = [each.name for each in trial.inputs.tensors if not each.is_optional]
    require(required, "no tensor is required")
    request = trial.request()
    request.absent.extend(required)
    await trial.refused(request, Code.INVALID_ARGUMENT, "MISSING_INPUT")


@case("steps.file-output", "A step: outputs as files; a stage that cannot encode rejects the step", level=FURTHER)
async def file_output(trial: Trial) -> None:
    require(trial.stage.emits, "the stage reports no emitted tensors")
    request = trial.request()
    request.streamed[0].media_type = "conformance/none"
    await trial.refused(request, None)


@case("steps.absent", "A step: absent tensors are not waited for (checklist 8)", Needs.INPUT)
async def absent(trial: Trial) -> None:
    tensors = trial.inputs.tensors
    optional = [each.name for each in tensors if each.is_optional]
    kept = tuple(each for each in tensors if not each.is_optional) or tensors[:1]
    missing = [name for name in optional if name not in {each.name for each in kept}]
    require(missing, "no accepted tensor can be absent")
    consumer = await trial.consumer() if trial.stage.has_output else None
    request = trial.request(consumer)
    request.absent.extend(missing)
    step = await trial.call(request).accepted()
    flow = await (await trial.stream()).open(trial.key_in())
    for number in range(2):
        payload = trial.inputs.chunk(number, 4)
        indexes = [index for index, each in enumerate(payload.data.tensors) if each.name in missing]
        for index in reversed(indexes):
            del payload.data.tensors[index], payload.contents[index]
        payload.data.size_bytes = payload.size_bytes
        await flow.send(payload)
    await flow.end()
    await step.finished()
