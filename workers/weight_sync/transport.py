"""The interface of a weight transport, and how the configured one is made.

A transport is made once in the trainer, which uses `publish`, and once in each generation worker, which uses `receive`. What
arrives is a safetensors file on the engine's machine, whatever it went through: the engine checks its names, shapes and
dtypes, and swaps it in between two steps. Nothing of an engine waits while a version is on its way.

vLLM's transfers from GPU to GPU (`workers.weight_sync.native`) end in the engine itself; they have a `publish` only.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from workers.host import StartupError
from workers.weight_sync.spec import NATIVE, WeightSyncSpec

if TYPE_CHECKING:
    from torch import Tensor


class WeightPublisher(Protocol):
    """The trainer's half."""

    def publish(self, weights: Mapping[str, Tensor], version: int) -> str:
        """Make `version` available, and return the address that `receive` is given. Blocking, in the compute thread.

        `weights` are the live tensors, which the next step changes: keep a copy. A version that was published before is
        needed until the one after it has been published; one that is published again replaces itself. An error leaves
        nothing of the version.
        """
        ...

    def close(self) -> None:
        """Free everything; `receive` may fail from here on."""
        ...


class WeightTransport(WeightPublisher, Protocol):
    """Both halves. Constructed with the keyword arguments `weight_sync.args`."""

    def receive(self, address: str, version: int, *, timeout_s: float) -> AbstractContextManager[Path]:
        """A safetensors file with all tensors of `version`, which is there while the context is open.

        Entered and left in a thread, blocking; entering must end within `timeout_s`. It may raise anything, which takes the
        worker out of service until a later attempt succeeds. Several may be entered at the same time.
        """
        ...


def make_publisher(spec: WeightSyncSpec) -> WeightPublisher:
    """The trainer's half of the transport. Raises StartupError for one that cannot be made."""
    if spec.transport in NATIVE:
        from workers.weight_sync.native_publisher import NativePublisher

        return NativePublisher(spec)
    try:
        return make_transport(spec)
    except OSError as error:
        raise StartupError("bad_spec", f"weight_sync.dir: {error}", "name a folder that can be written to") from error


def make_transport(spec: WeightSyncSpec) -> WeightTransport:
    """The transport, unless it is one of vLLM's. Raises StartupError for one that cannot be made."""
    if spec.transport == "file":
        from workers.weight_sync.file import FileTransport

        return FileTransport(spec)
    if spec.transport == "gloo":
        from workers.weight_sync.gloo import GlooTransport

        return GlooTransport(spec)
    return _own(spec)


def _own(spec: WeightSyncSpec) -> WeightTransport:
    name = spec.transport
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), attribute)(**spec.args)
    except Exception as error:
        raise StartupError(
            "bad_spec",
            f"weight_sync.transport: {name} cannot be made with weight_sync.args {spec.args}: {error!r}",
            "name a class of a module that can be imported here, and the arguments that it takes",
        ) from error
    for method in ("publish", "receive", "close"):
        if not callable(getattr(made, method, None)):
            raise StartupError(
                "bad_spec",
                f"weight_sync.transport: {name} has no method {method}",
                "docs/weight_sync.md says which methods a transport has",
            )
    return cast(WeightTransport, made)
