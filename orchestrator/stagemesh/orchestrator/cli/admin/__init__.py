"""`stagemesh admin`: what runs where, and what to do about it."""

import typer

from stagemesh.orchestrator.cli.admin import controls, lifecycle, lists, lora, profile, request

app = typer.Typer(help="Shows and changes what runs: for operators.", no_args_is_help=True)
app.command("pipelines")(lists.pipelines)
app.command("stages")(lists.stages)
app.command("replicas")(lists.replicas)
app.command("edges")(lists.edges)
app.command("requests")(lists.requests)
app.command("request")(request.request)
app.command("drain")(lifecycle.drain)
app.command("resume")(lifecycle.resume)
app.command("restart")(lifecycle.restart)
app.command("cancel")(request.cancel)
app.command("probe")(request.probe)
app.command("sleep")(controls.sleep)
app.command("wake")(controls.wake)
app.command("cache")(controls.cache)
app.add_typer(lora.app, name="lora")
app.add_typer(profile.app, name="profile")
