"""New weights for a running vLLM core, from one file in shared memory, between two of its steps.

The version moves only when the core has all of them: names and shapes are checked before the core is asked.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from workers.generation.vllm_core import ASK_S, Core, CoreDied
from workers.host import StartupError
from workers.weights import check_file, expected_tensors

if TYPE_CHECKING:
    import torch

_LOAD_S = 300.0


class WeightsFile:
    """A weights file kept open, so that it can be read again after its name is gone: by a core that is restarted."""

    def __init__(self, path: Path, version: int) -> None:
        """Blocking. Raises OSError."""
        self.version = version
        self._fd = os.open(path, os.O_RDONLY)

    @property
    def path(self) -> Path:
        return Path(f"/proc/{os.getpid()}/fd/{self._fd}")

    def close(self) -> None:
        os.close(self._fd)


def wanted_tensors(model_path: Path) -> dict[str, torch.Tensor]:
    """`expected_tensors`, its failure as a StartupError. Blocking."""
    try:
        return expected_tensors(model_path)
    except Exception as error:
        raise StartupError("bad_model", f"{model_path} cannot be understood: {error}") from error


async def load_file(core: Core, file: WeightsFile, *, resume: bool) -> None:
    """`change_weights` to the file's."""

    async def load(core: Core) -> None:
        await core.ask(core.llm.collective_rpc("load_weights_file", args=(os.fspath(file.path),)), within_s=_LOAD_S)

    await change_weights(core, load, file.version, resume=resume)


async def change_weights(core: Core, change: Callable[[Core], Awaitable[None]], version: int, *, resume: bool) -> None:
    """Have the core go on with the weights that `change` gives it; KV that was computed with the old ones is computed anew.

    `resume` False leaves the core paused. Raises CoreDied: what a failed change leaves cannot be used: the core is killed.
    """
    await core.pause(clear_cache=True)
    try:
        await change(core)
    except CoreDied:
        raise
    except Exception as error:
        core.kill(f"loading weights of version {version} failed half-way: {error}")
        raise CoreDied(str(error)) from error
    await core.set_version(version)
    if resume:
        await core.resume()


async def open_checked(wanted: dict[str, torch.Tensor], path: Path, version: int) -> WeightsFile:
    """The file, if it has the tensors `wanted`. Raises ValueError."""

    def work() -> WeightsFile:
        check_file(wanted, path)
        try:
            return WeightsFile(path, version)
        except OSError as error:
            raise ValueError(f"weights file {path}: {error}") from error

    with anyio.fail_after(ASK_S):
        return await anyio.to_thread.run_sync(work)
