"""The reasons why the stored figures of benchmarks miss their goals, which the page of performance shows."""

from collections.abc import Sequence
from typing import NamedTuple


class MissedGoal(NamedTuple):
    """The reason why figures of a benchmark miss their goals. `figure` is a part of the names of these figures."""

    benchmark: str
    figure: str
    reason: str


MISSED_GOALS: Sequence[MissedGoal] = (
    MissedGoal(
        "ar_stage",
        "tokens, stage, hidden states over shm / direct, 32 streams",
        "With 32 streams, this small model generates 2,500 tokens a second. Copying each token's hidden states into "
        "the arena and accounting for them takes 52 µs of processor time, which the model lacks on a machine with two "
        "cores. A larger model has fewer tokens a second, so the share is smaller: with 8 streams, the goal is met.",
    ),
    MissedGoal(
        "ar_stage",
        "processor time of the front end a token, stage / direct",
        "The goal stands for 65 µs on a machine on which AsyncLLM alone takes 34 µs. AsyncLLM took 18 µs (14 µs with "
        "the smaller model) when these figures were measured. The stage took 57 µs and 46 µs, less than the 65 µs.",
    ),
    MissedGoal(
        "ar_stage",
        "processor time of the front end a token, stage, hidden states over shm / direct",
        "The goal stands for 100 µs on a machine on which AsyncLLM alone takes 34 µs. The stage took 108 µs: half of "
        "it is the accounting of each token's rows, which is done in Python.",
    ),
    MissedGoal(
        "client_import",
        "stagemesh.client",
        "Half of the time, 0.109 s, is the import of gRPC, NumPy and protobuf. The other half is the client with its "
        "generated messages.",
    ),
    MissedGoal(
        "diffusion_stage",
        "4 at once / one after the other, 256 latent tokens",
        "On two cores, the forward pass of one image with 256 latent tokens keeps both cores busy, so a shared pass "
        "saves little. With 64 latent tokens, four images at once take 1.6 times less time, and the goal is met.",
    ),
    MissedGoal(
        "omni",
        "whole request, chunked / whole",
        "With 10 requests at once, three models share two cores, and chunks call the vocoder more often. The ratio is "
        "0.9 percentage points above the goal. With 1 and 4 requests at once, the goal is met.",
    ),
    MissedGoal(
        "orchestrator",
        "CPU per output, orchestrator",
        "The goal is for a machine on which the relay, which only forwards messages, takes 36 µs for an output. It "
        "took 87 µs on this machine. The ratio to the relay, whose goal holds for any machine, is met.",
    ),
    MissedGoal(
        "orchestrator",
        "memory of a request, orchestrator",
        "The two gRPC calls of a request take 44 KiB, as the relay shows. The record, the plan and the tasks of the "
        "request take 26 KiB, and the goal leaves 20 KiB for them.",
    ),
)
