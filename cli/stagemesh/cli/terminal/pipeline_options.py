"""The arguments and options of commands that load a pipeline file."""

from collections.abc import Sequence

from stagemesh.cli.terminal.options import Kind, argument, option, read_pairs

PIPELINE = argument(
    str,
    "Use the built-in pipeline with this name, for example speech, or the YAML file at this path.",
    metavar="PIPELINE",
)
SETTINGS = option(
    [Kind.PAIR], "Override a value of the pipeline file, for example edges.*.connector=grpc. Repeatable.", "--set"
)
REPLICAS = option(
    list[str],
    "Set the number of replicas of a stage, for example thinker=2. Repeatable. Other stages have the number of "
    "replicas that the pipeline file sets.",
    "--replicas",
    metavar="STAGE=N",
)


def read_overrides(settings: Sequence[str] | None, replicas: Sequence[str] | None = None) -> dict[str, str]:
    """Returns the overrides of the pipeline file that the options --set and --replicas contain.

    The result maps dotted keys of the file, such as "stages.thinker.replicas", to values.
    """
    counts = read_pairs(replicas, option="--replicas", convert=int)
    return {
        **read_pairs(settings, option="--set", convert=str),
        **{f"stages.{stage}.replicas": str(count) for stage, count in counts.items()},
    }
