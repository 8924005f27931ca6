"""Creates a job server from its config, and serves its gRPC API."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from sqlalchemy import URL

from stagemesh.client import AsyncClient
from stagemesh.common.errors import InvalidRequestError, file_access
from stagemesh.common.media.store import MediaStore
from stagemesh.common.process import settings
from stagemesh.common.tasks import end_tasks
from stagemesh.jobs.config import JobServerConfig, check_database_url
from stagemesh.jobs.database import Database, when_available
from stagemesh.jobs.job_table import JobTable
from stagemesh.jobs.servicer import SERVICE_NAME, JobServicer
from stagemesh.jobs.watcher import JobWatcher
from stagemesh.jobs.worker import Worker
from stagemesh.rpc.call_limits import CALLS_PER_CALLER
from stagemesh.rpc.callers import CLIENT
from stagemesh.rpc.server import Server
from stagemesh.v1 import jobs_pb2_grpc

_GRACE_S = 2.0


async def serve(config: JobServerConfig, stopping: asyncio.Event) -> None:
    """Serves JobService, and runs jobs, until `stopping` is set. Running jobs then wait for the next job server.

    The health service reports "" and JobService as SERVING when the database has been migrated, and "liveness" from the
    start. Raises InvalidRequestError (INVALID_CONFIG) if the file with the URL of the database cannot be read, or does
    not contain such a URL.
    """
    store = MediaStore(config.media, writer=f"{config.pipeline}.{config.name}", spool=settings.spool_dir())
    store.prepare()
    server = Server.of_process(config.listen, config, roles={CLIENT}, calls_per_caller=CALLS_PER_CALLER)
    database = Database(_database_url(config))
    table = JobTable(database, config)
    client = AsyncClient(*config.servers)
    worker = Worker(config, table, client=client, store=store, spool=settings.spool_dir())
    watcher = JobWatcher(table)
    servicer = JobServicer(config, table, store=store, worker=worker, watcher=watcher)
    server.add(SERVICE_NAME, jobs_pb2_grpc.add_JobServiceServicer_to_server, servicer)
    async with AsyncExitStack() as stack:
        stack.callback(database.close)
        stack.push_async_callback(client.close)
        await stack.enter_async_context(server.serving(grace_s=_GRACE_S))
        working = asyncio.create_task(_work(database, worker, watcher, server), name="work")
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait([working, waiting], return_when=asyncio.FIRST_COMPLETED)
        # Closed clients do not stop their requests, so that the next job server attaches to them.
        client.closed = True
        await end_tasks([working, waiting])
        if not working.cancelled():
            # Only a defect, or a database of a later version, ends the work.
            await working


def _database_url(config: JobServerConfig) -> str | URL:
    if not config.database_file:
        return config.database or URL.create("sqlite", database=str(settings.jobs_database(config.pipeline)))
    remedy = "; name a file that contains the URL of the database"
    try:
        with file_access(
            f"database_file: {config.database_file} cannot be read", reason="INVALID_CONFIG", remedy=remedy
        ):
            url = Path(config.database_file).read_text().strip()
        check_database_url(url)
    except ValueError as exc:
        raise InvalidRequestError(f"database_file: {config.database_file}: {exc}", reason="INVALID_CONFIG") from exc
    return url


async def _work(database: Database, worker: Worker, watcher: JobWatcher, server: Server) -> None:
    await when_available(database.migrate)
    server.set_health("", SERVICE_NAME, serving=True)
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run(), name="run jobs")
        group.create_task(watcher.run(), name="watch jobs")
