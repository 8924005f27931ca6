"""`stagemesh admin`: what runs where, and what to do about it."""

import typer

from stagemesh.orchestrator.cli.admin import controls, lifecycle, listing, lora, profile, request

app = typer.Typer(help="Shows and changes what runs: for operators.", no_args_is_help=True)
app.command("pipelines")(listing.pipelines)
app.command("stages")(listing.stages)
app.command("replicas")(listing.replicas)
app.command("edges")(listing.edges)
app.command("requests")(listing.requests)
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
