"""`stagemesh new`: writes packages that add something to Stagemesh."""

from stagemesh.orchestrator.cli.new.commands import app as app
