"""Checks the outputs of a pipeline file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagemesh.orchestrator.spec.checks.problems import Problems, suggest
from stagemesh.orchestrator.spec.graph import ancestors
from stagemesh.orchestrator.spec.model import Edge, PipelineOutput, Stage
from stagemesh.orchestrator.spec.schema import PipelineFile


@dataclass(frozen=True)
class OutputResolver:
    """Converts the outputs of a pipeline file to checked outputs. Reports errors to `problems`."""

    problems: Problems

    def resolve(self, file: PipelineFile, stages: Mapping[str, Stage]) -> Mapping[str, PipelineOutput]:
        """Returns the outputs, by name, for which both the stage and the tensor exist."""
        outputs: dict[str, PipelineOutput] = {}
        for name, entry in file.outputs.items():
            if entry.stage not in file.stages:
                self.problems.add(
                    ("outputs", name),
                    f"output {name!r} names an unknown stage {entry.stage!r}; {suggest(entry.stage, file.stages)}",
                )
            elif stage := stages.get(entry.stage):
                self._add(outputs, name, stage, entry.tensor)
        return outputs

    def check_all_used(self, file: PipelineFile, edges: Sequence[Edge]) -> None:
        """Reports an error for each stage on which no output depends.

        Does nothing if an output or an edge names an unknown stage, because that error is reported elsewhere.
        """
        targets = {entry.stage for entry in file.outputs.values()}
        if len(edges) < len(file.edges) or not file.stages.keys() >= targets:
            return
        used = ancestors(targets, {edge.arc for edge in edges})
        for name in file.stages:
            if name not in used:
                self.problems.add(
                    ("stages", name),
                    f"no output depends on stage {name!r}; name it in `outputs`, add an edge, or remove it",
                )

    def _add(self, outputs: dict[str, PipelineOutput], name: str, stage: Stage, tensor: str) -> None:
        emits = stage.signature.emits
        chosen = tensor or (name if name in emits else next(iter(emits)) if len(emits) == 1 else "")
        same = next((each for each in outputs.values() if (each.stage, each.tensor) == (stage.name, chosen)), None)
        if not chosen:
            text = f"stage {stage.name!r} emits {', '.join(emits) or 'nothing'}; choose one as {stage.name}.TENSOR"
        elif chosen not in emits:
            text = f"stage {stage.name!r} does not emit {chosen!r}; {suggest(chosen, emits)}"
        elif same is not None:
            text = f"{stage.name}.{chosen} is already the output {same.name!r}; keep one of them"
        else:
            kind, rate = emits[chosen].kind, emits[chosen].sample_rate_hz
            outputs[name] = PipelineOutput(name=name, stage=stage.name, tensor=chosen, kind=kind, sample_rate_hz=rate)
            return
        self.problems.add(("outputs", name), text)
