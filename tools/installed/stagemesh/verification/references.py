"""Reference implementations for `stagemesh verify`, and their comparison with the outputs of a pipeline."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from stagemesh.services.models.checkpoint import CONFIG, read_config
from stagemesh.verification.job import DeployedStage, ReferenceDescriptor, VerifiedStage

PROMPT_IDS, TOKEN_IDS = "prompt_ids", "token_ids"
HIDDEN_STATES = "hidden_states"
CODES, AUDIO, IMAGE = "codes", "audio", "image"
_ALL = "all"


def samples_text(stage: DeployedStage) -> bool:
    """Returns whether a stage answers prompts with a language model."""
    return stage.engine == "vllm" and not stage.accepts and TOKEN_IDS in stage.emits


def text_outputs(stage: DeployedStage) -> tuple[str, ...]:
    """Returns the outputs of a language model that are compared: tokens, and hidden states if the stage emits them."""
    states = sorted(name for name in stage.emits if name.startswith(HIDDEN_STATES))
    return (PROMPT_IDS, TOKEN_IDS, *states)


def has_architecture(stage: DeployedStage, ending: str) -> bool:
    """Returns whether the config.json of the stage's model names an architecture with this ending.

    Raises NotReadyError (LOAD_FAILED) if the folder has no readable config.json.
    """
    names = read_config(stage.model).get("architectures") or () if (stage.model / CONFIG).exists() else ()
    return any(name.endswith(ending) for name in names)


def _find_language_models(stages: Sequence[DeployedStage]) -> Sequence[Sequence[VerifiedStage]]:
    return [
        [VerifiedStage("text", stage, text_outputs(stage), "tokens")]
        for stage in stages
        if samples_text(stage) and has_architecture(stage, "ForCausalLM")
    ]


def _find_diffusion(stages: Sequence[DeployedStage]) -> Sequence[Sequence[VerifiedStage]]:
    """Returns the group of each stage that runs a whole pipeline, or of the stages that run its parts."""
    groups: defaultdict[tuple[Path, str], list[DeployedStage]] = defaultdict(list)
    for stage in stages:
        if stage.engine == "diffusion":
            # The parts of one model form a group.
            groups[stage.model, "" if _part(stage) != _ALL else stage.name].append(stage)
    return [
        [VerifiedStage(_part(stage), stage, (IMAGE,) if IMAGE in stage.emits else ()) for stage in group]
        for group in groups.values()
        if any(IMAGE in stage.emits for stage in group)
    ]


def _part(stage: DeployedStage) -> str:
    return str(stage.options.get("part", _ALL))


LANGUAGE_MODEL = ReferenceDescriptor(
    description="a vllm stage that answers prompts with a language model (AutoModelForCausalLM of transformers)",
    find=_find_language_models,
    factory="stagemesh.verification.language_model:LanguageModel",
)
DIFFUSION = ReferenceDescriptor(
    description="the diffusion stages of a pipeline (DiffusionPipeline of diffusers)",
    find=_find_diffusion,
    factory="stagemesh.verification.diffusion:DiffusionReference",
    media=frozenset({"image"}),
)


def _find_qwen3_omni(stages: Sequence[DeployedStage]) -> Sequence[Sequence[VerifiedStage]]:
    """Returns the group of each thinker: the thinker, and talker and code2wav of the same checkpoint."""
    thinkers = [stage for stage in stages if samples_text(stage) and has_architecture(stage, _QWEN3_OMNI_CLASS)]
    return [
        [
            VerifiedStage("thinker", thinker, text_outputs(thinker), "tokens"),
            *(
                VerifiedStage("talker", stage, (CODES,), "frames")
                for stage in stages
                if stage.engine == "vllm" and stage.emits >= {CODES} and stage.model == thinker.model
            ),
            *(
                VerifiedStage("code2wav", stage, (AUDIO,))
                for stage in stages
                if stage.function == "qwen3_omni.code2wav" and stage.model == thinker.model
            ),
        ]
        for thinker in thinkers
    ]


_QWEN3_OMNI_CLASS = "Qwen3OmniMoeForConditionalGeneration"
QWEN3_OMNI = ReferenceDescriptor(
    description="thinker, talker and code2wav of Qwen3-Omni (transformers)",
    find=_find_qwen3_omni,
    factory="stagemesh.verification.qwen3_omni:Qwen3OmniReference",
    media=frozenset({"image", "audio"}),
)
