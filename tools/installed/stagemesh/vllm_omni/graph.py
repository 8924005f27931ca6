"""Converts the edges, connectors and outputs of a vLLM-Omni config."""

import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.plugins.connectors import AUTO
from stagemesh.vllm_omni.keys import CONNECTOR_NOTES, CONNECTORS, EDGE_NOTES, Outcome, Report, report_rest
from stagemesh.vllm_omni.known_models import PARTS, Handover, Kind, find_transform
from stagemesh.vllm_omni.source import OmniConfig, Section
from stagemesh.vllm_omni.stages import OmniStage

_Arc = tuple[int, int]
_ENDS = (("output_connectors", "to_stage_", False), ("input_connectors", "from_stage_", True))
_OUTPUTS = {"text": "text", "audio": "audio", "image": "image", "video": "frames"}
"""The tensors of the outputs, by `final_output_type`."""
_SIZES = ("extra.codec_chunk_frames", "extra.codec_chunk_ramp", "extra.initial_codec_chunk_frames")
"""The settings of a connector that determine the sizes of chunks."""
_VIDEO: Mapping[str, JsonValue] = {"media_type": "video/mp4", "frame_rate": 16}
_UNKNOWN = "the import does not know this key; see docs/graphs.md for the settings of edges"


def take_arcs(config: OmniConfig, topology: Mapping[int, tuple[int, ...]]) -> list[_Arc]:
    """Returns the pairs of producer and consumer of the config, in the order of the consumers.

    `topology` contains the producers of each stage in a deploy config.

    Raises InvalidRequestError (INVALID_CONFIG) if an edge leads from or to a stage that the config does not have, or
    from a stage to itself.
    """
    found: dict[_Arc, str] = {(producer, stage): "" for stage, producers in topology.items() for producer in producers}
    for stage_id, section in config.stages.items():
        path = section.where("engine_input_source")
        for index, producer in enumerate(section.take_ids("engine_input_source")):
            found.setdefault((producer, stage_id), f"{path}[{index}]")
    for edge in config.edges:
        found.setdefault((edge.producer, edge.consumer), edge.section.path)
    mistakes = list[str]()
    known = ", ".join(map(str, sorted(config.stages)))
    for arc, path in found.items():
        mistakes += [
            f"{path}: there is no stage {end}; the stages are {known}" for end in arc if end not in config.stages
        ]
        if arc[0] == arc[1]:
            mistakes.append(f"{path}: stage {arc[0]} is its own input; name another stage")
    _raise_any(mistakes)
    return sorted(found, key=lambda arc: (arc[1], arc[0]))


def convert_edges(
    config: OmniConfig, arcs: list[_Arc], stages: Mapping[int, OmniStage], report: Report
) -> list[dict[str, JsonValue]]:
    """Returns the edges of the pipeline file. Takes the keys of stages and connectors that belong to edges.

    Raises InvalidRequestError (INVALID_CONFIG) if a stage names a connector that the config does not have, or if both
    ends of an edge name different connectors.
    """
    chosen = _take_connectors(config, arcs, report)
    streams = config.top.take("async_chunk", bool)
    with_codes = set[str]()
    edges = list[dict[str, JsonValue]]()
    for arc in arcs:
        producer, consumer = (stages[end] for end in arc)
        edge: dict[str, JsonValue] = {"from": producer.name, "to": consumer.name}
        handover = _handover(producer, consumer)
        transform = _take_transform(producer, consumer, handover, report)
        if transform:
            edge["transform"] = transform
        connector = config.connectors.get(chosen.get(arc, ""))
        if connector is not None and (name := _connector(connector, report)) != AUTO:
            edge["connector"] = name
        if handover is not None and handover.chunk is not None:
            own = producer.section.take("async_chunk", bool)
            is_whole = (streams if own is None else own) is False
            sizes = _chunk(connector, report) if connector is not None and not is_whole else {}
            edge["chunk"] = "whole" if is_whole else sizes or dict(handover.chunk)
            with_codes |= {chosen[arc]} if sizes else set()
        edges.append(edge)
    for source in config.edges:
        report_rest(source.section, EDGE_NOTES, report, unknown=_UNKNOWN)
    _report_connectors(config.connectors, used={*chosen.values()}, with_codes=with_codes, report=report)
    return edges


def _report_connectors(
    connectors: Mapping[str, Section], *, used: Collection[str], with_codes: Collection[str], report: Report
) -> None:
    """Reports the settings of connectors. `with_codes` are those from which an edge has the sizes of its chunks."""
    for name, section in connectors.items():
        if name not in used:
            report.add(Outcome.NOT_NEEDED, section.path, "no stage names this connector")
            continue
        section.values.pop("name", None)
        for key in _SIZES:
            given = section.values.pop(key, None)
            if given is not None and name not in with_codes:
                report.add(Outcome.NOT_NEEDED, given.path, "no edge with this connector sends audio codes in chunks")
        report_rest(section, CONNECTOR_NOTES, report, unknown=_UNKNOWN)


def _handover(producer: OmniStage, consumer: OmniStage) -> Handover | None:
    family = consumer.family
    return family.handovers.get((producer.model_stage, consumer.model_stage)) if family is not None else None


def _take_transform(producer: OmniStage, consumer: OmniStage, handover: Handover | None, report: Report) -> str:
    """Takes the custom functions of an edge. Returns the transform that does their work, or "" if none is needed.

    Reports an edge whose transform is unknown.
    """
    transforms = list[str]()
    is_known = True
    for section, name in (
        (consumer.section, "custom_process_input_func"),
        (producer.section, "custom_process_next_stage_input_func"),
    ):
        path, function = section.where(name), section.take(name, str)
        transform = find_transform(function) if function is not None else None
        if transform is not None:
            transforms.append(transform)
        elif function is not None:
            is_known = False
            text = f"no transform of Stagemesh does the work of {function}; write one (CONTRIBUTING.md)"
            report.add(Outcome.MISSING, path, text)
    if transforms or not is_known:
        return "".join(transforms[:1])
    if handover is None and not _are_parts(producer, consumer):
        ends = f"from stage {producer.name} to stage {consumer.name}"
        text = f"no transform {ends} is known; write one (CONTRIBUTING.md)"
        report.add(Outcome.MISSING, f"{consumer.section.path}.engine_input_source", text)
    return handover.transform if handover is not None else ""


def _are_parts(producer: OmniStage, consumer: OmniStage) -> bool:
    stages = (producer, consumer)
    return all(stage.kind is Kind.DIFFUSION and stage.model_stage in PARTS for stage in stages)


def _take_connectors(config: OmniConfig, arcs: Collection[_Arc], report: Report) -> dict[_Arc, str]:
    """Returns the names of the connectors of edges. Reports connectors between stages that no edge joins."""
    chosen: dict[_Arc, tuple[str, str]] = {}
    mistakes = list[str]()
    for stage_id, section in config.stages.items():
        for prefix, start, is_input in _ENDS:
            for key, given in section.below(prefix).items():
                section.values.pop(f"{prefix}.{key}")
                match = re.fullmatch(rf"{start}(\d+)", key)
                other = int(match[1]) if match is not None else -1
                if other not in config.stages:
                    mistakes.append(f"{given.path}: there is no such stage; write {start}N with the id of a stage")
                    continue
                if given.value not in config.connectors:
                    close = get_close_matches(str(given.value), config.connectors, n=1)
                    remedy = f"did you mean {close[0]!r}?" if close else "define it in `connectors`"
                    mistakes.append(f"{given.path}: unknown connector {given.value!r}; {remedy}")
                arc = (other, stage_id) if is_input else (stage_id, other)
                name, path = chosen.setdefault(arc, (str(given.value), given.path))
                if name != given.value:
                    mistakes.append(f"{given.path} is {given.value!r}, but {path} is {name!r}; name one connector")
    _raise_any(mistakes)
    for _, path in (chosen[arc] for arc in chosen.keys() - {*arcs}):
        report.add(Outcome.NOT_NEEDED, path, "no edge joins these stages")
    return {arc: chosen[arc][0] for arc in arcs if arc in chosen}


def _connector(section: Section, report: Report) -> str:
    given = section.values.get("name")
    if given is None:
        return AUTO
    if given.value not in CONNECTORS:
        text = f"Stagemesh has no connector that replaces {given.value}; the edge negotiates one (`connector: auto`)"
        report.add(Outcome.NOT_CARRIED, given.path, text)
        return AUTO
    if CONNECTORS[given.value] == AUTO:
        text = "the edge negotiates shared memory, NIXL or gRPC (`connector: auto`)"
        report.add(Outcome.NOT_NEEDED, given.path, text)
    return CONNECTORS[given.value]


def _chunk(section: Section, report: Report) -> dict[str, JsonValue]:
    """Returns the sizes of chunks that a connector's settings name. Empty if there are none."""
    frames, ramp, initial = (section.values.get(name) for name in _SIZES)
    if frames is None:
        return {}
    chunk: dict[str, JsonValue] = {"frames": frames.value}
    if ramp is not None:
        chunk["ramp"] = ramp.value
        if initial is not None:
            report.add(Outcome.NOT_NEEDED, initial.path, f"{ramp.path} replaces it")
    elif initial is not None and initial.value:
        chunk["initial_frames"] = initial.value
    return chunk


def take_outputs(stages: Mapping[int, OmniStage], *, is_deploy: bool) -> dict[str, JsonValue]:
    """Returns the outputs of the pipeline file, by the type of the output.

    If several stages have outputs of one type, the names of those after the first contain the stage. In a deploy
    config, a stage of a known model has the output of its role.
    """
    outputs = dict[str, JsonValue]()
    for name, tensor, stage in _take_final_outputs(stages, is_deploy=is_deploy):
        source = f"{stage.name}.{tensor}"
        output: JsonValue = {"from": source, **_VIDEO} if name == "video" else source
        outputs[f"{name}-{stage.name}" if name in outputs else name] = output
    return outputs


def _take_final_outputs(stages: Mapping[int, OmniStage], *, is_deploy: bool) -> Iterator[tuple[str, str, OmniStage]]:
    for stage in stages.values():
        given = stage.section.take("final_output", bool)
        is_final = bool(stage.role and stage.role.output) if given is None and is_deploy else given
        if stage.kind is Kind.DIFFUSION and is_deploy and given is None:
            is_final = True
        if not is_final:
            continue
        usual = "image" if stage.kind is Kind.DIFFUSION else (stage.role.output if stage.role else "") or "text"
        kind = stage.section.take("final_output_type", str) or usual
        if kind not in _OUTPUTS:
            path = f"{stage.section.path}.final_output_type"
            _raise_any([f"{path} is {kind!r}; write {', '.join(_OUTPUTS)}"])
        yield kind, _OUTPUTS[kind], stage


def _raise_any(mistakes: list[str]) -> None:
    if mistakes:
        raise InvalidRequestError("\n".join(mistakes), reason="INVALID_CONFIG")
