"""A core that dies is replaced with what it served; a host that dies takes its core along; a core holds no socket of it."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
import pytest

from ledger.records import Sampling
from tests.models import tiny_lm, tiny_model
from tests.needs import needs_vllm
from tests.workers.generation.helpers import load, worst_error
from tests.workers.generation.vllm.engines import HEAD, TOLERANCE, running_vllm, tokens_generated
from workers.generation.engine import EngineDead, EngineRestarting
from workers.generation.vllm_engine import VLLMEngine
from workers.host import StartupError
from workers.weights import save_weights

pytestmark = [pytest.mark.anyio, needs_vllm]

LONG = Sampling(max_tokens=480, seed=1)


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def test_a_dead_core_is_replaced_by_one_with_its_weights(
    engine: VLLMEngine, model_dir: Path, tmp_path: Path
) -> None:
    models = {0: load(model_dir), 4: tiny_lm(seed=2, **HEAD)}
    lost: list[str] = []
    late: list[int] = []

    async def run(name: str) -> None:
        with pytest.raises(EngineRestarting) as failure:
            await engine.generate(name, [5, 6], LONG)
        lost.append(failure.value.kind)

    async def call_that_comes_meanwhile() -> None:
        late.append(len((await engine.generate("late", [5], Sampling(max_tokens=3))).token_ids))

    for deaths, version in ((1, 0), (2, 4)):
        if version:
            save_weights(models[version], tmp_path / "w")
            await engine.load_weights(tmp_path / "w", version)
            (tmp_path / "w").unlink()  # as after a sync; the engine still has it
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for i in range(5):
                    group.start_soon(run, f"r{i}")
                await tokens_generated(engine, 20)
                kill(engine.core_pids)
                while len(lost) < 5 * deaths:
                    await anyio.sleep(0.01)
                assert not engine.stats().serving
                group.start_soon(call_that_comes_meanwhile)
        assert engine.stats().serving
        assert (engine.stats().restarts, engine.weight_version) == (deaths, version)
        got = await engine.generate("again", [5, 6], LONG)
        assert [span.version for span in got.weight_spans] == [version]
        assert worst_error(models, [5, 6], got, LONG) <= TOLERANCE
    assert lost == ["engine_restarting"] * 10
    assert late == [3, 3]
    save_weights(models[0], tmp_path / "w")
    await engine.load_weights(tmp_path / "w", 5)
    assert engine.weight_version == 5


async def kill_each_core(model_dir: Path) -> None:
    async with running_vllm(model_dir) as engine:
        for deaths in range(4):
            while engine.stats().restarts < deaths or not engine.stats().serving:
                await anyio.sleep(0.01)
            kill(engine.core_pids)
        await anyio.sleep_forever()


async def test_cores_that_die_one_after_another_end_the_engine(model_dir: Path) -> None:
    with anyio.fail_after(120), pytest.raises(ExceptionGroup) as failure:
        await kill_each_core(model_dir)
    assert failure.group_contains(EngineDead, match="4 engine cores died one after another.*SIGKILL")


@pytest.mark.parametrize(
    ("head", "arguments", "cause"),
    [
        pytest.param(
            HEAD, {"kv_cache_memory_bytes": 100}, "did not start: ValueError: No available memory", id="at the start"
        ),
        pytest.param({"head_dim": 16}, {}, "RuntimeError: .*head_dim=16", id="at the first token"),
    ],
)
async def test_the_error_that_ended_a_core_is_told(
    tmp_path: Path, head: dict[str, int], arguments: dict[str, Any], cause: str
) -> None:
    path = tiny_model(tmp_path / "model", **head)
    with anyio.fail_after(120), pytest.raises(StartupError, match=cause):
        async with running_vllm(path, vllm=arguments):
            pass


@pytest.mark.long
async def test_what_the_processes_of_a_core_met_by_is_removed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short name, for sockets
        monkeypatch.setattr(tempfile, "tempdir", folder)
        with anyio.fail_after(120):
            async with running_vllm(model_dir, vllm={"tensor_parallel_size": 2}) as engine:
                (core,) = engine.core_pids
                workers = Path(f"/proc/{core}/task/{core}/children").read_text().split()
                maps = "".join(Path(f"/proc/{worker}/maps").read_text() for worker in workers)
                shared = [line for line in maps.splitlines() if "cpushm" in line]
                assert shared
                assert all(line.endswith("(deleted)") for line in shared)
                assert not list(Path(folder).glob("vllm_dist*"))


async def test_a_core_has_no_socket_of_its_host(engine: VLLMEngine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
        restarts = engine.stats().restarts
        kill(engine.core_pids)
        with anyio.fail_after(60):
            while engine.stats().restarts == restarts or not engine.stats().serving:
                await anyio.sleep(0.01)
        (core,) = engine.core_pids
        assert f"socket:[{os.fstat(listening.fileno()).st_ino}]" in open_sockets(os.getpid())
        assert not open_sockets(os.getpid()) & open_sockets(core)


def open_sockets(pid: int) -> set[str]:
    found: set[str] = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    return found


HOST = """
import sys
from pathlib import Path
import anyio
from tests.workers.generation.vllm.engines import running_vllm

async def main():
    async with running_vllm(Path(sys.argv[1])) as engine:
        print("core", engine.core_pids[0], flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_a_host_that_is_killed_takes_its_core_with_it(model_dir: Path) -> None:
    command = [sys.executable, "-c", HOST, str(model_dir)]
    async with await anyio.open_process(command, stderr=None, start_new_session=True) as host:
        assert host.stdout is not None
        with anyio.fail_after(120):
            output = ""
            while not (found := re.search(r"core (\d+)\n", output)):
                output += (await host.stdout.receive()).decode()
        core = os.pidfd_open(int(found[1]))
        os.kill(host.pid, signal.SIGKILL)  # not its group, as its launcher would
        with anyio.fail_after(3):
            await anyio.wait_readable(core)
        os.close(core)
