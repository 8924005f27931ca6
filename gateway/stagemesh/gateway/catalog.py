"""The models of a gateway: the pipelines of its orchestrators, and those that each caller can use."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal, TypeAlias

from fastapi.security.utils import get_authorization_scheme_param
from starlette.requests import HTTPConnection

from stagemesh.client import AsyncClient, ClientOptions, RetryPolicy
from stagemesh.common.errors import (
    NotFoundError,
    PermissionDeniedError,
    StagemeshError,
    UnauthenticatedError,
    UnsupportedError,
)
from stagemesh.common.plugins.descriptors import INPUT, TEXT, kind_to_wire
from stagemesh.common.tasks import end_tasks
from stagemesh.common.wire.versions import own_protocol
from stagemesh.gateway.config import Aliases
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.limits import name_of_host
from stagemesh.gateway.parameters import warn
from stagemesh.v1 import signature_pb2
from stagemesh.v1.orchestrator_pb2 import DescribePipelineRequest, DescribePipelineResponse, OutputDescription

Kind: TypeAlias = Literal["text", "audio", "image"]
_Asking: TypeAlias = asyncio.Task[DescribePipelineResponse | StagemeshError]

_SYNONYMS: Mapping[str, Sequence[str]] = {
    "voice": ("speaker",),
    "instructions": ("instruction",),
    "ref_text": ("reference_text",),
    "non_streaming_mode": ("whole_text",),
}
"""Further names of the options to which parameters of OpenAI's API belong."""
OPENAI_VOICES = frozenset(
    "alloy ash ballad cedar coral default echo fable marin nova onyx sage shimmer verse".split()  # noqa: SIM905 - one line
)
"""OpenAI's voices, and the one that clients of SGLang-Omni send by default."""
_FRESH_S = 10.0
"""The time for which a description is used, in seconds. An upgrade may change it."""
_FAILED_S = 1.0
"""The time for which an error is used, in seconds, if there is no description."""
_EVERYONE = "everyone"
"""The owner of what callers store if the gateway does not know them."""


@dataclass(frozen=True)
class Model:
    """A model of OpenAI's API: a pipeline, with an adapter or without one."""

    id: str
    client: AsyncClient
    description: DescribePipelineResponse
    adapter: str | None = None
    voice_aliases: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def options(self) -> frozenset[str]:
        """The names of the options that a request may set."""
        return frozenset(option.name for option in self._options)

    @property
    def speaks_input(self) -> bool:
        """Whether the pipeline has stages that a session feeds with its text, without the language model."""
        fed = {edge.to_stage for edge in self.description.edges if edge.from_stage == INPUT}
        stages = (stage for stage in self.description.stages if stage.name in fed)
        return any(accepted.spec.name == TEXT for stage in stages for accepted in stage.signature.accepts)

    @property
    def chooses_tokens(self) -> bool:
        """Whether the pipeline has a language model, so that a request may set parameters of sampling."""
        return any(stage.signature.sampling for stage in self.description.stages)

    @property
    def voices(self) -> Sequence[str]:
        """The voices that the option of the voice allows. Empty if it allows any text, or does not exist."""
        name = self.option("voice")
        allowed = (option.allowed_texts for option in self._options if option.name == name)
        return list(dict.fromkeys(chain.from_iterable(allowed)))

    def find_voice(self, name: str) -> str | None:
        """Returns the voice with a name, or None for the default voice of the pipeline.

        A voice of OpenAI that no option lists is the default voice, with a warning.
        """
        if name in self.voice_aliases:
            return self.voice_aliases[name]
        if name not in OPENAI_VOICES or name in self.voices:
            return name
        warn("voice", "is a voice that the model lacks, and was replaced by the model's default voice")
        return None

    @property
    def clones_voices(self) -> bool:
        """Whether a stage reads the audio of a voice, with its text."""
        return self.reads_media and self.option("ref_text") is not None

    @property
    def reads_media(self) -> bool:
        """Whether a stage reads images, audio or videos. Its model determines which of them."""
        return any(stage.signature.media for stage in self.description.stages)

    @property
    def converses_about_media(self) -> bool:
        """Whether a language model reads the media, as parts of messages."""
        return any(stage.signature.media and stage.signature.sampling for stage in self.description.stages)

    def output(self, kind: Kind) -> OutputDescription | None:
        """Returns the first output of a kind that is sent to clients, or None if there is none."""
        outputs = (each for each in self.description.outputs if each.kind == kind_to_wire(kind) and not each.stored)
        return next(outputs, None)

    def require_output(self, kind: Kind, *, param: str = "model") -> str:
        """Returns the name of the output of a kind. Raises InvalidRequestError if the pipeline has none."""
        output = self.output(kind)
        if output is None:
            raise ParameterError(param, f"the model {self.id!r} has no {kind} output; use another model")
        return output.name

    def find_option(self, name: str, *, param: str) -> str:
        """Returns the name of the option of a parameter. Raises InvalidRequestError if no stage has it."""
        found = self.option(name)
        if found is None:
            names = " or ".join((name, *_SYNONYMS.get(name, ())))
            raise ParameterError(param, f"no stage of the model {self.id!r} has the option {names}; omit the parameter")
        return found

    @property
    def _options(self) -> Iterator[signature_pb2.OptionSpec]:
        return (option for stage in self.description.stages for option in stage.signature.options)

    def option(self, name: str) -> str | None:
        """Returns the name of the option of a parameter, or None if no stage has it."""
        return next((each for each in (name, *_SYNONYMS.get(name, ())) if each in self.options), None)


_DEFAULT_ALIASES: Mapping[str, Callable[[Model], bool]] = {
    **dict.fromkeys(
        ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15"),
        lambda model: model.output("audio") is not None,
    ),
    **dict.fromkeys(
        (
            *("whisper-1", "gpt-transcribe", "gpt-4o-transcribe", "gpt-4o-transcribe-diarize"),
            *("gpt-4o-mini-transcribe", "gpt-4o-mini-transcribe-2025-12-15"),
        ),
        lambda model: model.reads_media and model.output("text") is not None,
    ),
}
"""The condition for a pipeline to serve an OpenAI model, by the name of the OpenAI model."""


@dataclass
class _Server:
    """The orchestrators of a pipeline."""

    client: AsyncClient
    _description: DescribePipelineResponse | None = None
    _asking: _Asking | None = None
    _fresh_until_s: float = 0.0

    def describe(self) -> _Asking:
        """Returns the task that asks for the description, which all requests share until its result is too old.

        If the orchestrators cannot be reached, its result is the last description. The result is their error if there
        is none, or if they reject the caller.
        """
        if self._asking is None or (self._asking.done() and time.monotonic() > self._fresh_until_s):
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> DescribePipelineResponse | StagemeshError:
        try:
            self._description = await self.client.describe()
        except StagemeshError as exc:
            if self._description is None or isinstance(exc, UnauthenticatedError | PermissionDeniedError):
                self._fresh_until_s = time.monotonic() + _FAILED_S
                return exc
        self._fresh_until_s = time.monotonic() + _FRESH_S
        return self._description

    async def close(self) -> None:
        """Closes the connections."""
        if self._asking is not None:
            await end_tasks([self._asking])
        await self.client.close()


class Catalog:
    """Finds models by their ids: the name of a pipeline, or the name, a colon and the name of an adapter."""

    def __init__(self, clients: Sequence[AsyncClient], caller: str | None, aliases: Aliases) -> None:
        self.caller, self._aliases = caller, aliases
        """The name of the caller. None if the gateway does not know its callers, which then share the catalog."""
        self.requests = 0
        """The number of running requests and open WebSockets of the caller."""
        self._servers = [_Server(client) for client in clients]

    async def find(self, model_id: str) -> Model:
        """Returns the model of a pipeline, or of an alias.

        An OpenAI model that speaks or transcribes is by default an alias of the first pipeline that can. Raises
        NotFoundError if no pipeline has the name, and the errors of unreachable servers.
        """
        name, colon, adapter = self._aliases.models.get(model_id, model_id).partition(":")
        found, models = await self.first(name), list[Model]()
        if found is None:
            models = await self.models()
            can = _DEFAULT_ALIASES.get(model_id)
            found = None if can is None else next(filter(can, models), None)
        if found is not None:
            return replace(found, id=model_id, adapter=adapter if colon else None)
        names = ", ".join(model.id for model in models)
        raise NotFoundError(
            f"the model {model_id[:140]!r} does not exist; use one of {names}",
            reason="UNKNOWN_PIPELINE",
            metadata={"pipeline": name[:140]},
        )

    @contextmanager
    def counted_request(self) -> Generator["Catalog"]:
        """Counts a request within the block, in which the connections are not closed for other callers."""
        self.requests += 1
        try:
            yield self
        finally:
            self.requests -= 1

    async def models(self) -> list[Model]:
        """Returns the models whose orchestrators can be reached, without adapters."""
        asked = [server.describe() for server in self._servers]
        await asyncio.wait(asked)
        return self._described(asked)

    async def first(self, name: str | None = None) -> Model | None:
        """Returns the first model that is described, or the one with a name. Asks all servers at the same time.

        Returns None if no model has the name. If servers failed, raises the last of their errors instead: without a
        name, if no orchestrator accepts the caller.
        """
        asked = [server.describe() for server in self._servers]
        waiting = set(asked)
        while waiting:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for model in self._described(asked):
                if name in {None, model.id}:
                    return model
        for task in reversed(asked):
            if isinstance(failure := task.result(), StagemeshError):
                # Other requests raise the error, too, and each adds its traceback.
                raise copy(failure)
        return None

    def _described(self, asked: Sequence[_Asking]) -> list[Model]:
        """Returns the models of the servers that have answered."""
        pairs = zip(self._servers, asked, strict=True)
        return [
            Model(found.pipeline, server.client, found, voice_aliases=self._aliases.voices)
            for server, task in pairs
            if task.done() and isinstance(found := task.result(), DescribePipelineResponse)
        ]

    async def owner(self) -> str:
        """Returns the owner of what the caller stores, as a name of a folder.

        The owner is the caller as the first orchestrator knows it, so that the caller's next token has the same owner.
        Raises the error of this orchestrator if it rejects the caller, or cannot be reached.
        """
        if self.caller is None:
            return _EVERYONE
        # A revoked token is rejected at once, as no other call checks it.
        caller = (await self._servers[0].client.describe()).caller
        if not caller:
            raise UnsupportedError("the orchestrator does not name its callers; upgrade it, or store nothing")
        return hashlib.sha256(caller.encode()).hexdigest()

    async def close(self) -> None:
        """Closes the connections."""
        for server in self._servers:
            await server.close()


_MAX_CALLERS = 128
"""The number of callers whose connections are kept."""
_BEARER = "bearer"
_PROTOCOL_OF_TOKEN = "openai-insecure-api-key."  # noqa: S105 - the prefix of a token
_RETRIES = RetryPolicy(max_asked_pause_s=0)
"""A request that is rejected for the load of its pipeline is not repeated: clients of HTTP do that themselves."""
_CHECK_S = 10.0


class _TokenClient(AsyncClient):
    """A client without a token, which asks orchestrators about the tokens of callers."""

    async def find_caller(self, token: str) -> str:
        """Returns the name of the caller with a token. Raises UnauthenticatedError if the token is not valid."""
        request, headers = DescribePipelineRequest(protocol=own_protocol()), (("authorization", f"Bearer {token}"),)
        answer = await self._call(lambda stub: stub.DescribePipeline(request, metadata=headers, timeout=_CHECK_S))
        return answer.caller


class Callers:
    """The catalogs of callers, each with connections that present the caller's own token.

    Tokens that are not known are checked over connections that they share. Guessed tokens therefore open none.
    """

    def __init__(
        self, servers: Sequence[Sequence[str]], tls: str | None, *, forwards_tokens: bool, aliases: Aliases
    ) -> None:
        self.forwards_tokens = forwards_tokens
        """Whether each request has the token of its caller, which the orchestrators check."""
        self._servers, self._aliases = servers, aliases
        self._options: ClientOptions = {"retry_policy": _RETRIES}
        if tls is not None:
            self._options["tls"] = tls
        self._checks = [_TokenClient(*each, **self._options) for each in servers] if forwards_tokens else []
        self._catalogs = OrderedDict[str, Catalog]()

    async def catalog(self, request: HTTPConnection) -> Catalog:
        """Returns the catalog of the caller of a request.

        Raises UnauthenticatedError if the caller needs a token, and the last orchestrator's error if none accepts it.
        """
        token, caller = "", None
        if self.forwards_tokens:
            token = find_token(request)
            if not token:
                raise UnauthenticatedError("a token is missing; send Authorization: Bearer TOKEN", reason="NO_TOKEN")
            if not (token.isascii() and token.isprintable()):
                raise UnauthenticatedError("the token has characters that no token has", reason="INVALID_TOKEN")
            if token not in self._catalogs:
                caller = await self._find_caller(token)
                await self._drop_idle()
        # Nothing is awaited from here on: the caller of this method counts its request before the next eviction.
        catalog = self._catalogs.pop(token, None) or self._connect(token, caller)
        self._catalogs[token] = catalog
        return catalog

    def name(self, request: HTTPConnection) -> str:
        """Returns a name of the caller for limits: the one that an orchestrator knows, or the name of its host."""
        catalog = self._catalogs.get(find_token(request)) if self.forwards_tokens else None
        if catalog is not None and catalog.caller:
            return catalog.caller
        return "" if request.client is None else name_of_host(request.client.host)

    async def close(self) -> None:
        """Closes all connections."""
        for catalog in self._catalogs.values():
            await catalog.close()
        for client in self._checks:
            await client.close()

    async def _find_caller(self, token: str) -> str:
        """Returns the name of the caller with a token. Raises the last orchestrator's error if none accepts it."""
        for check in self._checks[:-1]:
            with suppress(StagemeshError):
                return await check.find_caller(token)
        return await self._checks[-1].find_caller(token)

    def _connect(self, token: str, caller: str | None) -> Catalog:
        options: ClientOptions = self._options if caller is None else {**self._options, "token": token}
        return Catalog([AsyncClient(*addresses, **options) for addresses in self._servers], caller, self._aliases)

    async def _drop_idle(self) -> None:
        """Closes the connections of callers without a request until there is space for one more, the oldest first."""
        while len(self._catalogs) >= _MAX_CALLERS:
            idle = next((token for token, catalog in self._catalogs.items() if not catalog.requests), None)
            if idle is None:
                return
            await self._catalogs.pop(idle).close()


async def catalog_of(request: HTTPConnection) -> Catalog:
    """Returns the catalog of the caller of a request. Raises the errors of `Callers.catalog`."""
    callers: Callers = request.app.state.callers
    return await callers.catalog(request)


async def find_model(request: HTTPConnection, model_id: str) -> Model:
    """Returns a model of the caller of a request. Raises the errors of `Callers.catalog` and `Catalog.find`."""
    return await (await catalog_of(request)).find(model_id)


def offered_protocol(websocket: HTTPConnection) -> str | None:
    """Returns the subprotocol of OpenAI's realtime API, if the caller has offered it."""
    protocols = websocket.scope["subprotocols"]
    return next((each for each in protocols if each and not each.startswith(_PROTOCOL_OF_TOKEN)), None)


def find_token(request: HTTPConnection) -> str:
    """Returns the token of a request, or an empty text.

    Web pages cannot set headers of a WebSocket. OpenAI's clients offer the token as one of its subprotocols.
    """
    scheme, token = get_authorization_scheme_param(request.headers.get("authorization"))
    if scheme.lower() == _BEARER:
        return token
    protocols = request.scope.get("subprotocols", ())
    offered = next((each for each in protocols if each.startswith(_PROTOCOL_OF_TOKEN)), "")
    return offered.removeprefix(_PROTOCOL_OF_TOKEN)
