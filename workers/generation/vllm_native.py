"""An engine's half of vLLM's own weight transfer: it asks the trainer for a version and does in its workers what that says.

What will come is compared with the model before the engine is paused. Once its weights have begun to change, a failure
leaves a core that cannot be relied on: it is killed, as after any failed load, and serves again when it has its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from workers.generation.intake import WeightsUnavailable
from workers.generation.updates import UpdatingEngine
from workers.generation.vllm_core import Core
from workers.generation.vllm_engine import VLLMEngine
from workers.weight_sync import dialogue
from workers.weight_sync.dialogue import Ask, Begin, Broken, Command, Done, Failed, Hello, Offered, Sent
from workers.weights import check_tensors


class NativeIntake:
    """A `WeightIntake`. Use on one event loop; one load at a time."""

    def __init__(self, engine: VLLMEngine, updating: UpdatingEngine, *, timeout_s: float) -> None:
        self._engine = engine
        self._updating = updating
        self._timeout_s = timeout_s
        self._line: _Line | None = None
        self._turn = anyio.Lock()

    async def load(self, address: str, version: int) -> None:
        """See `WeightIntake.load`. A cancellation before the engine is paused leaves it as it was; later the load ends,
        within its deadline, one way or the other."""
        async with self._turn:
            loaded = False
            try:
                line, offered = await self._asked(address, version)
                check_tensors(self._engine.wanted, _meta(offered), f"the tensors of weight version {version}")
                receive = partial(self._receive, line)
                await self._updating.update(lambda: self._engine.receive_weights(receive, version))
                loaded = True
            finally:
                if not loaded:
                    await self._hang_up()

    async def _asked(self, address: str, version: int) -> tuple[_Line, Offered]:
        try:
            with anyio.fail_after(self._timeout_s):
                # Of the same core: a trainer's group is with the workers of one.
                if self._line is None or self._line.pids != self._engine.core_pids:
                    await self._hang_up()
                    self._line = await _Line.connect(address, self._engine)
                await self._line.send(Ask(version=version))
                answer = await self._line.receive()
        except (OSError, Broken, TimeoutError) as error:
            raise WeightsUnavailable(f"weight version {version}: no answer from the trainer: {error!r}") from error
        if not isinstance(answer, Offered):
            raise WeightsUnavailable(f"weight version {version}: the trainer says {answer}")
        return self._line, answer

    async def _receive(self, line: _Line, core: Core) -> None:
        """Do as the trainer says until everything is there. Raises TimeoutError, Broken, or what a command does."""
        with anyio.fail_after(self._timeout_s):
            await line.send(Begin())
            while True:
                match await line.receive():
                    case Command() as command:
                        try:
                            await _carry_out(core, command)
                        except Exception as error:
                            await line.send(Done(error=f"{type(error).__name__}: {error}"))
                            raise
                        await line.send(Done())
                    case Sent():
                        return
                    case Failed(why=why):
                        raise Broken(f"the trainer failed: {why}")
                    case other:
                        raise Broken(f"{type(other).__name__} from the trainer")

    async def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            await line.aclose()


class _Line:
    """A connection to the trainer. Every method raises Broken when it ends."""

    @classmethod
    async def connect(cls, address: str, engine: VLLMEngine) -> _Line:
        where, _, key = address.partition("/")
        host, _, port = where.rpartition(":")
        if not (host and key and port.isdecimal()):
            raise ValueError(f"{address!r} is no address of a trainer: it looks like host:port/key")
        line = cls(await anyio.connect_tcp(host, int(port)), engine.core_pids)
        await line.send(Hello(key=key, gpus=engine.gpus))
        return line

    def __init__(self, stream: SocketStream, pids: list[int]) -> None:
        self.pids = pids
        self._stream = stream
        self._reader = BufferedByteReceiveStream(stream)

    async def send(self, message: dialogue.AnyMessage) -> None:
        try:
            await self._stream.send(dialogue.encode(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise Broken("the trainer's connection is closed") from error

    async def receive(self) -> dialogue.AnyMessage:
        try:
            size = dialogue.length(await self._reader.receive_exactly(4))
            return dialogue.decode(await self._reader.receive_exactly(size))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise Broken("the trainer closed the connection") from error

    async def aclose(self) -> None:
        await anyio.aclose_forcefully(self._stream)


async def _carry_out(core: Core, command: Command) -> None:
    llm = core.llm
    match command.step:
        case "init":
            call = llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": command.info})
        case "start":
            call = llm.collective_rpc("start_weight_update")
        case "update":
            call = llm.collective_rpc("update_weights_plainly", args=(command.info,))
        case "finish":
            call = llm.collective_rpc("finish_weight_update")
    await core.ask(call, within_s=float("inf"))  # within the deadline of the whole


def _meta(offered: Offered) -> Mapping[str, Any]:
    """The offered tensors, without data. Raises ValueError."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for name, dtype_name, shape in zip(offered.names, offered.dtypes, offered.shapes, strict=True):
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"tensor {name} is of {dtype_name!r}, which is no dtype")
        tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
    return tensors
