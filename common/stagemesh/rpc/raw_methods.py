"""Registers a service some of whose methods have their messages as they are on the wire."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import grpc


class _Handlers:
    """Stands in for a server, to see what the generated code would register."""

    def __init__(self) -> None:
        self.by_method: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.by_method.update(handlers)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same again, for servers without registered methods."""


def add_with_raw_methods(
    add: Callable[[grpc.aio.Server], None], server: grpc.aio.Server, *, service: str, raw: Mapping[str, Any]
) -> None:
    """Adds the service of that full name, as the generated `add` would, but for the handlers in `raw`, by method."""
    generated = _Handlers()
    add(cast("grpc.aio.Server", generated))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {**generated.by_method, **raw}),))
