"""The gate's HTTP server: who may come in, how much and for how long; what is asked goes to `agents` and `control`.

Whatever is sent, it is answered with an answer or an error in OpenAI's shape, and no request outlives its connection or the
server. An error of the ledger itself ends `serve`. The log has the first refusal of each kind, as agents often tell nobody.
"""

from __future__ import annotations

import logging
import socket

import anyio
import anyio.to_thread
from aiohttp import web
from anyio.abc import TaskStatus
from msgspec import Struct

from ledger import ids
from ledger.errors import LedgerError
from ledger.gate import Gate
from ledger.http.agents import CHAT, COMPLETIONS, MODELS, Agents
from ledger.http.connections import BACKLOG, HttpServer, cut_off_silent_readers
from ledger.http.control import Control
from ledger.http.errors import MAX_MESSAGE, ApiError, ended, failed, is_fatal, of_ledger
from ledger.http.keys import Keys
from ledger.http.replays import Replays
from ledger.http.responses import json_response, refusal
from ledger.http.sampling import SamplingRules
from ledger.http.streaming import stream
from ledger.ledger import Ledger

PREFIX = "ng-rollout"
_CLOSE_S = 10.0
"""For running requests to be settled and answered when the server ends."""
_FLUSH_S = 2.0
_LINGER_S = 2.0
"""For the rest of a body that is refused, so that its sender can read why."""

logger = logging.getLogger(__name__)


class Limits(Struct, frozen=True, kw_only=True):
    """What one run's agents may use."""

    max_body_bytes: int = 2 * 2**20
    max_open_rollouts: int = 4096
    """Rollouts with calls running at the same time."""
    max_connections: int = 4096
    """For more, idle ones are closed, or they themselves."""
    read_timeout_s: float = 30.0
    """For the rest of a request's body, once its headers are there."""
    send_timeout_s: float = 60.0
    """A client that takes nothing of an answer for so long is cut off."""
    idle_timeout_s: float = 120.0
    """For a connection's next request, headers included."""
    keep_alive_s: float = 10.0
    """Between the comments of a stream whose call is running."""


class GateServer:
    """Use `serve`. `url` is the address that agents are told, without a path; `model` the name that answers carry."""

    def __init__(
        self, gate: Gate, ledger: Ledger, rules: SamplingRules, *, url: str, model: str, limits: Limits | None = None
    ) -> None:
        self._gate = gate
        self._rules = rules
        self._url = url
        self._model = model
        self._limits = limits or Limits()
        self._control = Control(ledger)
        self._keys = Keys()
        self._agents: Agents | None = None
        self._replays: Replays | None = None
        self._scopes: set[anyio.CancelScope] = set()
        self._http: HttpServer | None = None
        self._logged: set[str] = set()
        """Codes of refusals."""
        self._failed = anyio.Event()
        self._failure: Exception | None = None

    @property
    def control_token(self) -> str:
        return self._keys.control_token

    @property
    def in_flight(self) -> int:
        """Requests being answered."""
        return len(self._scopes)

    @property
    def connections(self) -> int:
        return 0 if self._http is None else len(self._http.connections)

    def base_url(self, rollout_id: str) -> str:
        """What an OpenAI client of this rollout needs as its `base_url`."""
        return f"{self._url}/{PREFIX}/{rollout_id}/v1"

    def api_key(self, rollout_id: str) -> str:
        """What an OpenAI client of this rollout needs as its `api_key`."""
        return self._keys.of(rollout_id)

    def forget(self, rollout_id: str) -> None:
        """The rollout is over: answers to its idempotency keys are not kept any longer."""
        if self._replays is not None:
            self._replays.forget(rollout_id)

    async def serve(
        self, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve on a listening socket, which is closed in the end, until cancelled. Raises the ledger's failure.

        In the end running calls are cancelled, settled and answered with 503.
        """
        http = self._http = HttpServer(
            self._respond,
            max_connections=self._limits.max_connections,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            keepalive_timeout=self._limits.idle_timeout_s,
            lingering_time=_LINGER_S,
        )
        runner = web.ServerRunner(http, shutdown_timeout=_FLUSH_S)
        cut_off_silent_readers(listener, self._limits.send_timeout_s)
        try:
            async with anyio.create_task_group() as tasks:
                self._replays = Replays(tasks)
                self._agents = Agents(
                    self._gate,
                    self._rules,
                    self._replays,
                    model=self._model,
                    max_open_rollouts=self._limits.max_open_rollouts,
                    fail=self._fail,
                )
                await runner.setup()
                await web.SockSite(runner, listener, backlog=BACKLOG).start()
                task_status.started()
                await self._failed.wait()
                tasks.cancel_scope.cancel()
        finally:
            self._agents = None
            for scope in self._scopes:
                scope.cancel()
            with anyio.move_on_after(_CLOSE_S, shield=True):
                await runner.cleanup()
            listener.close()
        assert self._failure is not None
        raise self._failure

    def _log(self, request: web.BaseRequest, error: ApiError) -> None:
        """Once for each code, of which there are few. Failed calls are in the ledger."""
        if error.status < 500 and error.code not in self._logged:
            self._logged.add(error.code)
            logger.warning(
                "the gate refused %s %.200s: %d %s: %s (others of this kind are not logged)",
                request.method,
                request.raw_path,
                error.status,
                error.code,
                error.message[:MAX_MESSAGE],
            )

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._failed.set()

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        try:
            with scope:
                return await self._answer(request)
        except ApiError as error:
            self._log(request, error)
            return refusal(error)
        except ConnectionError:
            raise  # The client is gone.
        except Exception:
            logger.exception("the gate failed at %s %s", request.method, request.raw_path[:200])
            return refusal(failed())
        finally:
            self._scopes.discard(scope)
        return refusal(ended())

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        match _path(request).split("/", 4)[1:]:
            case [root, rollout_id, "v1", endpoint] if root == PREFIX:
                return await self._answer_agent(request, rollout_id, endpoint)
            case ["control", "rollouts"]:
                self._keys.check_control(request.headers.get("Authorization"))
                _check_method(request, "GET")
                return json_response(self._control.rollouts())
            case ["control", "rollouts", rollout_id, verb]:
                return await self._answer_control(request, rollout_id, verb)
            case _:
                raise _no_such_path(request, f"/{PREFIX}/<rollout id>/v1 and /control/rollouts")

    async def _answer_agent(self, request: web.BaseRequest, rollout_id: str, endpoint: str) -> web.StreamResponse:
        _check_id(rollout_id)
        self._keys.check_agent(rollout_id, request.headers.get("Authorization"))
        agents = self._agents
        if agents is None:
            raise ended()
        if endpoint == MODELS:
            _check_method(request, "GET")
            return json_response(agents.models())
        if endpoint not in (CHAT, COMPLETIONS):
            raise _no_such_path(request, f"{CHAT}, {COMPLETIONS} and {MODELS}")
        _check_method(request, "POST")
        body = await self._read(request)
        prepared = agents.prepare(rollout_id, endpoint, body, request.headers.get("Idempotency-Key"))
        if prepared.stream:
            return await stream(request, prepared, keep_alive_s=self._limits.keep_alive_s)
        outcome = await prepared.answer()
        if isinstance(outcome, ApiError):
            raise outcome
        return json_response(await anyio.to_thread.run_sync(outcome.whole) if outcome.large else outcome.whole())

    async def _answer_control(self, request: web.BaseRequest, rollout_id: str, verb: str) -> web.StreamResponse:
        self._keys.check_control(request.headers.get("Authorization"))
        _check_id(rollout_id)
        if verb not in ("manifest", "seal", "declare"):
            raise _no_such_path(request, "manifest, seal and declare")
        _check_method(request, "GET" if verb == "manifest" else "POST")
        body = await self._read(request)
        try:
            if verb == "manifest":
                return json_response(self._control.manifest(rollout_id))
            if verb == "seal":
                return json_response(await self._control.seal(rollout_id))
            return json_response(await self._control.declare(rollout_id, body))
        except LedgerError as error:
            if is_fatal(error):
                self._fail(error)
            raise of_ledger(error) from error

    async def _read(self, request: web.BaseRequest) -> bytes:
        limit = self._limits.max_body_bytes
        content = request.content
        if content.is_eof() and content.exception() is None:
            body = content.read_nowait(-1)
            if len(body) > limit:
                raise _too_large(limit)
            return body
        size = request.content_length or 0
        parts: list[bytes] = []
        with anyio.move_on_after(self._limits.read_timeout_s):
            if size <= limit:
                size = 0
                try:
                    async for part in content.iter_any():
                        parts.append(part)
                        size += len(part)
                        if size > limit:
                            break
                    else:
                        return b"".join(parts)
                except web.RequestPayloadError as error:
                    raise ApiError(400, "broken_body", f"the body is not complete HTTP: {error}") from error
            raise _too_large(limit)
        raise ApiError(
            408, "slow_body", f"the body was not there {self._limits.read_timeout_s:g} s after the headers", retry=True
        )


def _path(request: web.BaseRequest) -> str:
    """Of the request's target, which is a whole URL when a client sends it as to a proxy (RFC 9112, 3.2.2)."""
    path = request.raw_path.partition("?")[0]
    return path if path.startswith("/") else "/" + path.partition("://")[2].partition("/")[2]


def _check_id(rollout_id: str) -> None:
    try:
        ids.check_rollout_id(rollout_id)
    except ValueError as error:
        text = f"{error}; the path is /{PREFIX}/<rollout id>/v1/..., as in the context's base_url"
        raise ApiError(400, "illegal_rollout_id", text, param="rollout_id", retry=False) from error


def _check_method(request: web.BaseRequest, method: str) -> None:
    if request.method != method:
        raise ApiError(
            405, "wrong_method", f"{request.raw_path[:200]} takes {method}, not {request.method}", retry=False
        )


def _no_such_path(request: web.BaseRequest, known: str) -> ApiError:
    return ApiError(404, "unknown_path", f"there is no {request.raw_path[:200]!r}; there are {known}", retry=False)


def _too_large(limit: int) -> ApiError:
    text = f"the body has more than {limit} bytes: shorten the conversation, or raise gate.max_body_bytes"
    return ApiError(413, "body_too_large", text, retry=False)
