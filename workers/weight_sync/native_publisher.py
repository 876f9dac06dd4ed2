"""The trainer's half of vLLM's own weight transfer, NCCL or CUDA IPC: a copy of the weights on its GPU, sent to who asks.

Each engine has a connection, a thread and, for NCCL, a group with the trainer of its own: one that dies or freezes holds up
no other. vLLM's trainer-side engine drives the transfer; its calls to the inference side go over the connection.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from workers.generation.vllm_names import vllm
from workers.weight_sync import dialogue
from workers.weight_sync.dialogue import Ask, Begin, Broken, Command, Done, Failed, Hello, Line, Offered, Sent
from workers.weight_sync.ipc_handles import plain
from workers.weight_sync.spec import WeightSyncSpec

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_TRANSFER = "distributed.weight_transfer"


class NativePublisher:
    """The address is `host:port/key`. Only the last published version is sent; its copy takes the weights' size once more
    on the trainer's GPU, and twice while the next one is made."""

    def __init__(self, spec: WeightSyncSpec) -> None:
        self._spec = spec
        self._key = secrets.token_hex(16)
        self._offer: tuple[int, dict[str, Tensor]] | None = None
        self._listener: socket.socket | None = None
        self._lines: set[socket.socket] = set()

    def publish(self, weights: Mapping[str, Tensor], version: int) -> str:
        """See `WeightPublisher.publish`."""
        import torch

        copies = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
        device = next(iter(copies.values())).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the copies are read by other threads, on other streams
        self._offer = (version, copies)
        if self._listener is None:
            self._listener = socket.create_server((self._spec.host, 0), backlog=128)
            threading.Thread(target=self._accept, args=(self._listener,), name="weights", daemon=True).start()
        return f"{self._spec.host}:{self._listener.getsockname()[1]}/{self._key}"

    def close(self) -> None:
        if self._listener is not None:
            # A blocked accept or recv returns when its socket is shut down, not when it is closed.
            for connection in (self._listener, *self._lines):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            self._lines.add(connection)
            threading.Thread(target=self._talk, args=(connection,), name="weights", daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(self._spec.timeout_s)
                line = Line(connection)
                hello = line.receive()
                if not isinstance(hello, Hello) or not hmac.compare_digest(hello.key, self._key):
                    raise Broken("an engine must say hello with the address's key")
                sender = _Sender(line, self._spec, hello.gpus)
                try:
                    while True:
                        connection.settimeout(None)  # until the next step's weights
                        ask = line.receive()
                        connection.settimeout(self._spec.timeout_s)
                        self._answer(line, sender, ask)
                finally:
                    sender.close()
        except (Broken, TimeoutError) as error:
            logger.info("an engine's connection ended: %s", error)
        except Exception:
            logger.exception("sending weights failed")
        finally:
            self._lines.discard(connection)

    def _answer(self, line: Line, sender: _Sender, ask: dialogue.AnyMessage) -> None:
        if not isinstance(ask, Ask):
            raise Broken(f"{type(ask).__name__} instead of Ask")
        assert self._offer is not None
        version, weights = self._offer
        if ask.version != version:
            line.send(Failed(why=f"weight version {ask.version} is not offered, {version} is"))
            return
        line.send(
            Offered(
                names=list(weights),
                dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
                shapes=[list(tensor.shape) for tensor in weights.values()],
            )
        )
        if not isinstance(line.receive(), Begin):
            raise Broken("no Begin after Offered")
        try:
            sender.send(weights)
        except Exception as error:
            line.send(Failed(why=f"{type(error).__name__}: {error}"))
            raise
        line.send(Sent())


class _Client:
    """vLLM's `VLLMWeightSyncClient`: its calls are carried out by the engine at the other end. Raises Broken, TimeoutError,
    or RuntimeError with what the engine says."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._have(Command(step="init", info=init_info))

    def start_weight_update(self) -> None:
        self._have(Command(step="start"))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        info = {name: value for name, value in update_info.items() if value is not None}
        if "ipc_handles" in info:
            info["ipc_handles"] = [
                {gpu: plain(handle) for gpu, handle in handles.items()} for handles in info["ipc_handles"]
            ]
        self._have(Command(step="update", info=info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._have(Command(step="finish"))

    def _have(self, command: Command) -> None:
        self._line.send(command)
        done = self._line.receive()
        if not isinstance(done, Done):
            raise Broken(f"{type(done).__name__} instead of Done")
        if done.error:
            raise RuntimeError(f"the engine failed to {command.step}: {done.error}")


class _Source:
    """vLLM's `WeightSource` over the version that is being sent."""

    def __init__(self) -> None:
        self.weights: Mapping[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        meta = vllm(f"{_TRANSFER}.base:ParamMeta")
        return [meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()


class _Sender:
    """vLLM's trainer-side engine for one inference engine, made at the first transfer and used again while nothing fails."""

    def __init__(self, line: Line, spec: WeightSyncSpec, gpus: int) -> None:
        self._line = line
        self._spec = spec
        self._gpus = gpus
        self._source = _Source()
        self._engine: Any = None

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Raises whatever goes wrong; not to be used again then."""
        import torch

        self._source.weights = weights
        torch.cuda.set_device(next(iter(weights.values())).device)
        # vLLM's broadcast has no deadline: a peer that is gone would leave this thread, and the GPU's queue, waiting.
        watch = threading.Timer(self._spec.timeout_s, self._abort)
        watch.daemon = True
        watch.start()
        try:
            if self._engine is None:
                self._engine = self._open()
            self._engine.send_weights()
        finally:
            watch.cancel()

    def close(self) -> None:
        if self._engine is not None and self._spec.transport == "nccl":
            self._abort()

    def _open(self) -> Any:
        client = _Client(self._line)
        if self._spec.transport == "ipc":
            init: Any = vllm(f"{_TRANSFER}.ipc_engine:IPCTrainerInitInfo")(rank=0)
            return vllm(f"{_TRANSFER}.ipc_engine:IPCTrainerWeightTransferEngine").trainer_init(
                init, client=client, source=self._source
            )
        init = vllm(f"{_TRANSFER}.nccl_engine:NCCLTrainerInitInfo")(
            rank=0,
            master_address=self._spec.host,
            master_port=_free_port(self._spec.host),
            world_size=1 + self._gpus,
        )
        return vllm(f"{_TRANSFER}.nccl_engine:NCCLTrainerWeightTransferEngine").trainer_init(
            init, client=client, source=self._source
        )

    def _abort(self) -> None:
        """End whatever the group is doing, also in the middle of it."""
        group = getattr(self._engine, "model_update_group", None)
        if group is not None:
            self._engine.model_update_group = None
            group.nccl.ncclCommAbort(group.comm)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as probe:
        return int(probe.getsockname()[1])
