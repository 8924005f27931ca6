"""Options and arguments that the commands for operators share."""

from typing import Annotated

import typer

from stagemesh.orchestrator.cli.admin.completion import (
    complete_edge,
    complete_replica,
    complete_request,
    complete_stage,
    complete_target,
)
from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER, AdminServer

Server = AdminServer
DEFAULT_SERVER = DEFAULT_ADMIN_SERVER
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="A replica, or a stage for all of its replicas.", autocompletion=complete_target
    ),
]
RequestId = Annotated[str, typer.Argument(metavar="ID", help="The request.", autocompletion=complete_request)]
Edge = Annotated[str, typer.Argument(metavar="EDGE", help="The edge, for example a->b.", autocompletion=complete_edge)]
StageFilter = Annotated[
    str, typer.Option("--stage", metavar="STAGE", help="Only those of this stage.", autocompletion=complete_stage)
]
OnTarget = Annotated[
    str,
    typer.Option("--on", metavar="TARGET", help="Only those with a share there.", autocompletion=complete_target),
]
Producer = Annotated[str, typer.Option(metavar="REPLICA", help="Only from this one.", autocompletion=complete_replica)]
Consumer = Annotated[str, typer.Option(metavar="REPLICA", help="Only to this one.", autocompletion=complete_replica)]
PageSize = Annotated[int, typer.Option(min=0, help="At most so many; 0 is 100.")]
PageToken = Annotated[str, typer.Option(metavar="TOKEN", help="Where to go on, as the page before said.")]
Timeout = Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Give up after so long.")]
