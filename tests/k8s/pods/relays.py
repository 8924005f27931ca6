"""The pipeline of the tests: fake stages, each of which marks its outputs with the generation that it belongs to."""

from collections.abc import Mapping
from dataclasses import dataclass

from stagemesh.fake_engine.outputs import compute_output, resize_text, source_text
from stagemesh.services.engines.base import Task
from tests.k8s.helm import render
from tests.k8s.manifests import Manifest
from tests.k8s.release import FOLDER
from tests.soak.delivery import Delivery
from tests.soak.workload import Request

OUTPUTS = ("text", "echo", "frames", "audio")
GROUP = "pair"
"""The colocation group of the stages `relay` and `frames`."""
_THREADS = [{"name": "OMP_NUM_THREADS", "value": "1"}]


@dataclass(frozen=True)
class Generation:
    """A version of the pipeline. Stages cut or repeat their text to a size, which tells the versions apart."""

    source_bytes: int
    relay_bytes: int
    frame_count: int
    speaks: bool = False
    """Whether one more edge leads to a stage that makes audio."""
    start_s: float = 0.0
    """The time that the stage `frames` takes to load."""

    def pipeline(self, *, step_s: float = 0.05) -> Manifest:
        """Returns the content of the pipeline file."""
        options = {"size_bytes": self.frame_count, "start_s": self.start_s}
        made: Manifest = {
            "pipeline": "relays",
            "stages": {
                "source": {
                    "engine": "fake",
                    "function": "source",
                    "options": {"step_s": step_s, "size_bytes": self.source_bytes, "checkpoint_steps": 8},
                },
                "relay": {"engine": "fake", "function": "relay", "options": {"size_bytes": self.relay_bytes}},
                "frames": {"engine": "fake", "function": "frames", "options": options},
            },
            "edges": [{"from": "source", "to": "relay"}, {"from": "relay", "to": "frames"}],
            "outputs": {"text": "source", "echo": "relay", "frames": "frames"},
        }
        if self.speaks:
            made["stages"]["sound"] = {"engine": "fake", "function": "sound"}
            made["edges"].append({"from": "frames", "to": "sound"})
            made["outputs"]["audio"] = "sound"
        return made

    def outputs(self, request: Request) -> Mapping[str, bytes]:
        """Returns the outputs of a request: the results of the stages' functions called one after the other."""
        task = Task("r", request.seed, request.prompt)
        texts = [resize_text(source_text(task, step), self.source_bytes) for step in range(request.steps)]
        echoes = [resize_text(text, self.relay_bytes) for text in texts]
        cut = [resize_text(echo, self.frame_count) for echo in echoes]
        frames = [compute_output("frames", {"text": text})["frames"] for text in cut]
        audio = [compute_output("sound", {"frames": each})["audio"] for each in frames] if self.speaks else []
        made = zip(OUTPUTS, (texts, echoes, frames, audio), strict=True)
        return {output: b"".join(each.tobytes() for each in parts) for output, parts in made}

    def made(self, delivery: Delivery) -> bool:
        """Returns whether all outputs of a delivery are those of this generation."""
        return all(delivery.received(output) == content for output, content in self.outputs(delivery.request).items())


OLD = Generation(source_bytes=20, relay_bytes=10, frame_count=5)
COMPATIBLE = Generation(source_bytes=28, relay_bytes=14, frame_count=7, start_s=5.0)
INCOMPATIBLE = Generation(source_bytes=36, relay_bytes=18, frame_count=9, speaks=True, start_s=5.0)


def release(
    generation: Generation,
    *,
    replicas: int = 1,
    tls: bool = False,
    tokens: str = "",
    gateway: Manifest | None = None,
    jobs: Manifest | None = None,
) -> list[Manifest]:
    """Returns the objects of a release.

    - Each stage has `replicas` replicas.
    - With `tls`, pods have certificates.
    - `tokens` is the Secret with the tokens that the orchestrators accept.
    - `gateway` has the settings of the gateways. If it is None, there are none.
    - `jobs` has the settings of the job server, whose store is the claim `media`. If it is None, there is none.
    """
    pipeline = generation.pipeline()
    for stage in ("relay", "frames"):
        pipeline["stages"][stage]["group"] = GROUP
    values: Manifest = {
        "pipeline": pipeline,
        "orchestrator": {"drainSeconds": 20, "env": _THREADS},
        "stageDefaults": {"replicas": replicas, "drainSeconds": 20, "env": _THREADS, "ucx": {"UCX_TLS": "tcp"}},
        "test": {"arguments": ["--max-tokens=4"]},
        "tls": {"enabled": tls, "issuer": {"name": "authority" if tls else ""}, "tokens": {"secret": tokens}},
        "gateway": {"enabled": gateway is not None, **(gateway or {})},
    }
    if jobs is not None:
        pipeline["media"] = {"store": "/media"}
        values["stageDefaults"] |= FOLDER
        values["media"] = FOLDER
        values["jobs"] = {"enabled": True, **FOLDER, **jobs}
    return render(values)
