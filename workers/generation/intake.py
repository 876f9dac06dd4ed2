"""How a generation worker takes in a version that the trainer has published: received first, then loaded between two steps.

Whatever happens, the engine serves a version whole, the old one or the new one, or says that it does not serve.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio
import anyio.to_thread

from workers.generation.engine import Engine
from workers.generation.updates import UpdatingEngine
from workers.host import StartupError
from workers.weight_sync.spec import NATIVE, WeightSyncSpec
from workers.weight_sync.transport import WeightTransport, make_transport

if TYPE_CHECKING:
    from workers.generation.torch_engine import TorchEngine
    from workers.generation.vllm_engine import VLLMEngine

T = TypeVar("T")

_LEAVE_S = 10.0
_SLACK_S = 5.0
"""For a transport that keeps its deadline, just so."""


class WeightsUnavailable(Exception):
    """The version did not arrive; `__cause__` is why. The engine is as it was."""


class WeightIntake(Protocol):
    async def load(self, address: str, version: int) -> None:
        """Have the engine serve `version`. Raises ValueError for weights that do not fit the model, WeightsUnavailable, or
        EngineDead."""
        ...


async def make_intake(engine: TorchEngine | VLLMEngine, updating: UpdatingEngine, spec: WeightSyncSpec) -> WeightIntake:
    """What `engine` gets its weights by, under the mode of `updating`. Raises StartupError."""
    if spec.transport not in NATIVE:
        transport = await anyio.to_thread.run_sync(make_transport, spec, abandon_on_cancel=True)
        return TransportIntake(updating, transport, timeout_s=spec.timeout_s)
    from workers.generation.vllm_engine import VLLMEngine
    from workers.generation.vllm_native import NativeIntake

    if not isinstance(engine, VLLMEngine):
        raise StartupError(
            "bad_spec",
            f"weight_sync.transport {spec.transport} is vLLM's own, and generation.engine is torch",
            "set generation.engine: vllm, or weight_sync.transport: file or gloo",
        )
    return NativeIntake(engine, updating, timeout_s=spec.timeout_s)


class TransportIntake:
    """By a transport that leaves a file."""

    def __init__(self, engine: Engine, transport: WeightTransport, *, timeout_s: float) -> None:
        self._engine = engine
        self._transport = transport
        self._timeout_s = timeout_s

    async def load(self, address: str, version: int) -> None:
        """See `WeightIntake.load`. A cancellation while the version is on its way leaves the engine as it was."""
        async with self._received(address, version) as path:
            await self._engine.load_weights(path, version)

    @asynccontextmanager
    async def _received(self, address: str, version: int) -> AsyncGenerator[Path]:
        manager = self._transport.receive(address, version, timeout_s=self._timeout_s)
        what = f"weight version {version}"
        try:
            with anyio.fail_after(self._timeout_s + _SLACK_S):
                path = await _entered(manager)
        except TimeoutError as error:
            raise WeightsUnavailable(f"{what} did not arrive within {self._timeout_s:g} s: {error}") from error
        except ValueError:
            raise
        except Exception as error:
            raise WeightsUnavailable(f"{what} did not arrive: {error or repr(error)}") from error
        try:
            yield path
        finally:
            with anyio.move_on_after(_LEAVE_S, shield=True):
                await anyio.to_thread.run_sync(manager.__exit__, None, None, None, abandon_on_cancel=True)


async def _entered(manager: AbstractContextManager[T]) -> T:
    """Enter in a thread. One whose caller has left in the meantime is left again there, as soon as it is entered."""
    lock = threading.Lock()
    abandoned = entered = False

    def enter() -> T:
        nonlocal entered
        value = manager.__enter__()
        with lock:
            entered = True
            gone = abandoned
        if gone:
            manager.__exit__(None, None, None)
        return value

    try:
        return await anyio.to_thread.run_sync(enter, abandon_on_cancel=True)
    except anyio.get_cancelled_exc_class():
        with lock:
            abandoned = True
            late = entered
        if late:
            manager.__exit__(None, None, None)
        raise
