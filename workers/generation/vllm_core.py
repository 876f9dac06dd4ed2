"""One life of vLLM's engine core: its process, from the start to whatever ends it.

The core is forked from this process, and ends with it (`workers.forked`). What is asked of it has a deadline, and fails at
once when the core dies.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint

from workers.forked import bound_children
from workers.generation.vllm_cause import Cause
from workers.generation.vllm_names import vllm
from workers.host import StartupError

logger = logging.getLogger(__name__)

T = TypeVar("T")

ASK_S = 60.0
"""For what a core answers between two steps."""
_STOP_S = 5.0
_KILL_S = 5.0
_CPU_CACHE_BYTES = 2 << 30
"""KV cache on a CPU at most, if the configuration does not say: vLLM would take most of the machine's memory."""


class CoreDied(Exception):
    """The engine core is gone, or was killed because it did not answer. Nothing of its requests is left."""


class CoreStats:
    """What the cores last said of themselves; `generated` and `preempted` go on counting through their restarts."""

    def __init__(self) -> None:
        self.generated = self.preempted = 0
        self._now: dict[int, tuple[int, float]] = {}

    @property
    def running(self) -> int:
        """Requests in the batch, of all data-parallel cores together."""
        return sum(running for running, _ in self._now.values())

    @property
    def kv_usage(self) -> float:
        """Of the fullest core's KV cache, 0 to 1."""
        return max((usage for _, usage in self._now.values()), default=0.0)

    def record(
        self,
        *,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        engine_idx: int = 0,
        mm_cache_stats: Any = None,
    ) -> None:
        """Takes the place of vLLM's loggers: called after each step."""
        if scheduler_stats is not None:
            self._now[engine_idx] = scheduler_stats.num_running_reqs, scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.generated += iteration_stats.num_generation_tokens
            self.preempted += iteration_stats.num_preempted_reqs


class Core:
    """A running core. `llm` is vLLM's AsyncLLM, of the event loop that started it."""

    @classmethod
    async def start(cls, arguments: Mapping[str, Any], *, threads: int, stats: CoreStats) -> Core:
        """Start a core with these engine arguments, off the loop; its weights have version 0. Raises StartupError, CoreDied.

        A cancellation returns at once; what was being started is stopped as soon as it is up.
        """
        abandoned, cause = threading.Event(), Cause()
        try:
            llm = await anyio.to_thread.run_sync(_start, arguments, threads, abandoned, cause, abandon_on_cancel=True)
        except anyio.get_cancelled_exc_class():
            abandoned.set()
            raise
        llm.logger_manager = stats
        core = cls(llm, cause)
        try:
            await core.ask(llm.collective_rpc("unlink_meeting_places"))
            await core.ask(llm.get_supported_tasks())  # remembered by it, and asked for by each request
            await core.set_version(0)
        except BaseException:
            await core.stop()
            raise
        return core

    def __init__(self, llm: Any, cause: Cause) -> None:
        self.llm = llm
        self._cause = cause
        self._processes: list[Any] = list(llm.engine_core.resources.engine_manager.processes)
        self._pidfds = [_pidfd(process.pid) for process in self._processes]
        self._asking: set[anyio.CancelScope] = set()
        self._death: str | None = None
        self._over = anyio.Event()

    @property
    def over(self) -> bool:
        """Whether it is known to have ended."""
        return self._over.is_set()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def died(self) -> str:
        """Wait until the core is over: a process of it has ended, whoever ended it, or it was stopped. Returns why."""
        async with anyio.create_task_group() as tasks:

            async def watch(process: Any, pidfd: int | None) -> None:
                if pidfd is not None:
                    await anyio.wait_readable(pidfd)
                status = process.exitcode
                how = f", {_describe(status, self._cause)}" if isinstance(status, int) else ""
                self._die(f"engine core process {process.pid} ended{how}")

            for process, pidfd in zip(self._processes, self._pidfds, strict=True):
                tasks.start_soon(watch, process, pidfd)
            await self._over.wait()
            tasks.cancel_scope.cancel()
        assert self._death is not None
        return self._death

    async def ask(self, answer: Awaitable[T], *, within_s: float = ASK_S) -> T:
        """The core's answer. Raises CoreDied when it is dead, or does not answer in time, for which it is killed."""
        if self._death is None:
            with anyio.move_on_after(within_s) as scope:
                self._asking.add(scope)
                try:
                    return await answer
                except vllm("v1.engine.exceptions:EngineDeadError") as error:
                    raise CoreDied(self._death or self._cause.text or "the engine core is dead") from error
                finally:
                    self._asking.discard(scope)
            if self._death is None:
                self.kill(f"the engine core did not answer within {within_s:g} s")
        elif hasattr(answer, "close"):
            answer.close()  # type: ignore[attr-defined]
        raise CoreDied(self._death)

    async def pause(self, *, clear_cache: bool) -> None:
        """Return when no step is running. `clear_cache` has all KV computed anew when the requests go on."""
        # Not AsyncLLM.pause_generation, which sleeps for 20 ms to have outputs arrive before it returns.
        await self.ask(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))

    async def resume(self) -> None:
        await self.ask(self.llm.engine_core.resume_scheduler_async())

    async def set_version(self, version: int) -> None:
        """The weight version that tokens are said to be of from here on."""
        await self.ask(self.llm.engine_core.set_weight_version_async(str(version)))

    def kill(self, why: str) -> None:
        """End the core's processes at once, as when what it holds cannot be relied on any more."""
        self._die(why)
        logger.error("%s; killing it", why)
        for process, pidfd in zip(self._processes, self._pidfds, strict=True):
            if pidfd is not None:
                try:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    logger.debug("process %d was gone already", process.pid)

    async def stop(self) -> None:
        """End the core and free what it held here; bounded, and shielded from cancellation. Idempotent."""
        with anyio.CancelScope(shield=True):
            self._die("the engine was closed")
            with anyio.move_on_after(_STOP_S + _KILL_S) as scope:
                await anyio.to_thread.run_sync(partial(self.llm.shutdown, timeout=_STOP_S), abandon_on_cancel=True)
            if scope.cancelled_caught:
                self.kill("the engine core did not stop")
            await checkpoint()  # the sockets are closed by what the shutdown left to the loop
        for pidfd in self._pidfds:
            if pidfd is not None:
                os.close(pidfd)
        self._pidfds = [None] * len(self._pidfds)

    def _die(self, why: str) -> None:
        if self._death is None:
            self._death = why
            self._over.set()
            for scope in tuple(self._asking):
                scope.cancel()


def _start(arguments: Mapping[str, Any], threads: int, abandoned: threading.Event, cause: Cause) -> Any:
    import torch

    def settle() -> None:
        torch.set_num_threads(threads)
        cause.listen()

    try:
        args = vllm("engine.arg_utils:AsyncEngineArgs")(**arguments)
        config = args.create_engine_config(vllm("usage.usage_lib:UsageContext").ENGINE_CONTEXT)
        if vllm("platforms:current_platform").is_cpu() and config.cache_config.kv_cache_memory_bytes is None:
            config.cache_config.kv_cache_memory_bytes = _cpu_cache_bytes(config)
    except Exception as error:
        raise StartupError("bad_spec", f"vLLM refuses generation.vllm or the model: {error}") from error
    # After the configuration, in which vLLM sets "spawn" for CPUs.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    # Set here and in the child: a pool of OpenMP threads that this process had would not survive the fork.
    torch.set_num_threads(1)
    try:
        with bound_children(settle):
            llm = vllm("v1.engine.async_llm:AsyncLLM").from_vllm_config(config)
    except Exception as error:
        raise StartupError(
            "engine_failed", f"vLLM's engine core did not start: {cause.text or error}", "its traceback is above"
        ) from error
    if abandoned.is_set():
        llm.shutdown(timeout=_STOP_S)
    return llm


def _cpu_cache_bytes(config: Any) -> int:
    """Room for the largest batch at full length, within bounds."""
    model, parallel = config.model_config, config.parallel_config
    per_token = (
        2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
        * model.dtype.itemsize
    )
    longest = model.max_model_len * per_token
    return max(min(config.scheduler_config.max_num_seqs * longest, _CPU_CACHE_BYTES), 2 * longest)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _describe(status: int, cause: Cause) -> str:
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit code {status}" + (f": {cause.text}" if cause.text else "")
