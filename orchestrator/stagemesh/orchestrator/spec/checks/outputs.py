"""Resolves what clients may ask for."""

from collections.abc import Mapping
from dataclasses import dataclass

from stagemesh.orchestrator.spec.checks.problems import Problems, suggest
from stagemesh.orchestrator.spec.graph import ancestors
from stagemesh.orchestrator.spec.model import Edge, PipelineOutput, Stage
from stagemesh.orchestrator.spec.schema import PipelineShape


@dataclass(frozen=True)
class OutputResolver:
    """Turns the file's outputs into checked ones; what is wrong goes to `problems`."""

    problems: Problems

    def resolve(self, shape: PipelineShape, stages: Mapping[str, Stage]) -> Mapping[str, PipelineOutput]:
        """The outputs that exist."""
        outputs: dict[str, PipelineOutput] = {}
        for name, target in shape.outputs.items():
            stage_name, _, tensor = target.partition(".")
            if stage_name not in shape.stages:
                self.problems.add(
                    ("outputs", name),
                    f"output {name!r} of no stage: {stage_name!r}; {suggest(stage_name, shape.stages)}",
                )
            elif stage := stages.get(stage_name):
                self._add(outputs, name, stage, tensor)
        return outputs

    def check_all_used(self, shape: PipelineShape, edges: tuple[Edge, ...]) -> None:
        """Notes stages that serve no output, unless a dangling output or edge may be meant for them."""
        targets = [target.partition(".")[0] for target in shape.outputs.values()]
        if len(edges) < len(shape.edges) or not shape.stages.keys() >= set(targets):
            return
        used = ancestors(targets, {edge.arc for edge in edges})
        for name in shape.stages:
            if name not in used:
                self.problems.add(
                    ("stages", name),
                    f"stage {name!r} serves no output; name it in `outputs`, add an edge, or remove it",
                )

    def _add(self, outputs: dict[str, PipelineOutput], name: str, stage: Stage, tensor: str) -> None:
        emits = stage.signature.emits
        chosen = tensor or (name if name in emits else next(iter(emits)) if len(emits) == 1 else "")
        twin = next((twin for twin in outputs.values() if (twin.stage, twin.tensor) == (stage.name, chosen)), None)
        if not chosen:
            self.problems.add(
                ("outputs", name),
                f"stage {stage.name!r} emits {', '.join(emits) or 'nothing'}; write {stage.name}.TENSOR for one",
            )
        elif chosen not in emits:
            self.problems.add(("outputs", name), f"stage {stage.name!r} emits no {chosen!r}; {suggest(chosen, emits)}")
        elif twin is not None:
            self.problems.add(
                ("outputs", name), f"{stage.name}.{chosen} is the output {twin.name!r} already; keep one of them"
            )
        else:
            kind, rate = emits[chosen].kind, emits[chosen].sample_rate_hz
            outputs[name] = PipelineOutput(name, stage.name, chosen, kind, rate)
