"""Real worker processes that fail, hang, freeze and die: none outlives its scope, and each end is one clear error."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from anyio.abc import TaskStatus

from tests.workers.launch.worker import BREAK, DOUBLE, EXIT, IGNORES_SIGTERM, SLEEP, WEDGE, Number, Spec
from workers.launch import LaunchError, WorkerDied, WorkerProcess, launch
from workers.rpc.errors import RpcTimeout, WorkerUnreachable
from workers.rpc.method import Empty

pytestmark = pytest.mark.anyio
MODULE = "tests.workers.launch.worker"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that a run uses."""
    return "asyncio", {"use_uvloop": True}


def open_pipes() -> int:
    """How many pipes, sockets and process handles this process holds."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return sum(not link.is_absolute() for link in links)


def folders(parent: Path) -> list[Path]:
    return list(parent.iterdir())


def children() -> set[str]:
    """The pids of this process's children, zombies included."""
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}


def visible(pid: int) -> str:
    """Argv and environment."""
    return Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()


@pytest.fixture
def temp_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[Path]:
    """Where sockets go, for this test alone. (`tmp_path`, too long for a socket, must exist before the change.)"""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(autouse=True)
async def nothing_is_left(temp_folder: Path) -> AsyncGenerator[None]:
    """After each test no child, no zombie, no open pipe and no socket folder of it remains."""
    gc.collect()  # what earlier tests have left would be collected at some moment of this one
    others, pipes = children(), open_pipes()
    with anyio.fail_after(60):
        yield
    for _ in range(5):  # the loop closes a connection one turn after it was told to
        await anyio.lowlevel.checkpoint()
    assert (children() - others, folders(temp_folder)) == (set(), [])
    assert open_pipes() <= pipes


def worker(
    fault: str = "", *, name: str = "w0", start_timeout_s: float = 30.0, stop_timeout_s: float = 10.0, **spec: object
) -> AbstractAsyncContextManager[WorkerProcess]:
    return launch(
        MODULE,
        name=name,
        spec=Spec(fault=fault, **spec),
        start_timeout_s=start_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )


async def until_gone(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        await anyio.wait_readable(fd)
    finally:
        os.close(fd)


async def test_a_worker_serves_until_its_scope_is_left() -> None:
    async with worker() as process:
        assert await process.client.call(DOUBLE, Number(21)) == Number(42)
        health = await process.client.health()
        assert (health.name, health.pid) == ("w0", process.pid)
    assert await process.wait() == 0
    assert process.log[-1] == "closed"
    with pytest.raises(WorkerUnreachable):
        await process.client.call(DOUBLE, Number(1))


async def test_several_workers_start_at_once() -> None:
    workers: dict[str, WorkerProcess] = {}

    async def supervise(name: str, *, task_status: TaskStatus[None]) -> None:
        async with worker(name=name) as process:
            workers[name] = process
            task_status.started()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as running:
        async with anyio.create_task_group() as starting:
            for i in range(4):
                starting.start_soon(running.start, supervise, f"w{i}")
        assert len({process.pid for process in workers.values()}) == 4
        for name, process in workers.items():
            assert (await process.client.health()).name == name
        running.cancel_scope.cancel()


async def test_its_lines_reach_the_sink_with_its_name() -> None:
    lines: list[tuple[str, str]] = []
    async with launch(
        MODULE, name="w7", spec=Spec(), env={"GREETING": "hello"}, on_line=lambda *line: lines.append(line)
    ):
        pass
    assert lines == [("w7", "greeting: hello"), ("w7", "closed")]


async def test_a_large_spec_arrives() -> None:
    async with worker(padding="x" * 500_000) as process:
        assert await process.client.call(DOUBLE, Number(1)) == Number(2)


async def test_the_token_is_neither_in_argv_nor_in_the_environment() -> None:
    async with worker() as process:
        seen_by_others = visible(process.pid)
        token = process.client._headers.partition("Bearer ")[2].strip()
        assert token
        assert token not in seen_by_others
        assert MODULE in seen_by_others


async def test_the_worker_leads_a_session_of_its_own() -> None:
    """So that a terminal's Ctrl-C, which goes to the foreground process group, does not reach it."""
    async with worker() as process:
        assert os.getsid(process.pid) == os.getpgid(process.pid) == process.pid


async def test_its_socket_folder_is_private(temp_folder: Path) -> None:
    async with worker():
        (folder,) = folders(temp_folder)
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        ("raises", "RuntimeError", "worker w0 did not start: the model is not there"),
        ("startup_error", "no_model", "worker w0 did not start: there is no model in /nowhere\nset model.path"),
        ("exits", "died", "worker w0 did not start: exit code 3\n  | greeting: \n  | last words"),
        ("killed", "died", "worker w0 did not start: signal SIGKILL\n  | greeting: "),
        ("garbles_report", "bad_report", "worker w0 did not start: its report cannot be read"),
    ],
)
async def test_a_failed_start_is_one_clear_message(fault: str, kind: str, text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        async with worker(fault):
            pass
    assert caught.value.kind == kind
    assert str(caught.value).startswith(text)
    assert "Traceback" not in str(caught.value)


async def test_the_traceback_of_a_failed_start_is_in_the_log() -> None:
    with pytest.raises(LaunchError) as caught:
        async with worker("raises"):
            pass
    assert 'raise RuntimeError("the model is not there")' in "\n".join(caught.value.log)


async def test_a_module_that_does_not_exist_is_a_failed_start() -> None:
    with pytest.raises(LaunchError, match=r"exit code 1\n.*No module named workers.nothing"):
        async with launch("workers.nothing", name="w0", spec=Spec()):
            pass


async def test_a_spec_of_another_type_is_a_failed_start() -> None:
    with pytest.raises(LaunchError, match=r"the spec is not a Spec: Object contains unknown field `value`") as caught:
        async with launch(MODULE, name="w0", spec=Number(3)):
            pass
    assert caught.value.kind == "bad_spec"


async def test_a_worker_that_is_never_ready_is_stopped() -> None:
    with pytest.raises(LaunchError, match=r"not ready after 0\.5 s") as caught:
        async with worker("never_ready", start_timeout_s=0.5):
            pass
    assert caught.value.kind == "not_ready"


async def test_a_worker_that_hangs_at_its_start_shows_where_it_hangs() -> None:
    with pytest.raises(LaunchError, match=r"not ready after 5 s(?s:.*)\n  \|   File .* in serve\n"):
        async with worker("blocks_at_start", start_timeout_s=5, stop_timeout_s=0.2):
            pass


async def test_a_cancelled_start_leaves_nothing() -> None:
    with anyio.move_on_after(0.5) as scope:
        async with worker("blocks_at_start", stop_timeout_s=0.2):
            pass
    assert scope.cancelled_caught


async def test_an_error_in_the_scope_comes_out_as_it_is() -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        async with worker():
            raise error
    assert caught.value is error


async def test_a_cancelled_scope_stops_the_worker_cleanly() -> None:
    with anyio.CancelScope() as scope:
        async with worker() as process:
            scope.cancel()
            await anyio.sleep_forever()
    assert await process.wait() == 0
    assert process.log[-1] == "closed"


async def test_stopping_cancels_running_handlers() -> None:
    async def call(process: WorkerProcess) -> None:
        with pytest.raises(WorkerUnreachable):
            await process.client.call(SLEEP, Empty())

    async with anyio.create_task_group() as tasks, worker() as process:
        tasks.start_soon(call, process)
        while (await process.client.health()).in_flight == 0:
            pass
    assert await process.wait() == 0


async def test_watch_tells_of_a_worker_that_exits() -> None:
    async with worker() as process:
        with pytest.raises(WorkerUnreachable):
            await process.client.call(EXIT, Number(3))
        with pytest.raises(
            WorkerDied, match=r"worker w0 died, exit code 3 \(.*\)\n(?s:.*)  \| leaving with 3$"
        ) as caught:
            await process.watch()
    assert (caught.value.name, caught.value.status) == ("w0", 3)


async def test_watch_tells_of_a_worker_that_is_killed() -> None:
    async with worker() as process:
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match=r"signal SIGKILL .*memory") as caught:
            await process.watch()
    assert caught.value.status == -signal.SIGKILL


async def test_a_service_that_fails_later_ends_its_worker_with_its_traceback() -> None:
    async with worker() as process:
        await process.client.call(BREAK, Empty())
        with pytest.raises(WorkerDied, match="exit code 1") as caught:
            await process.watch()
    assert "ValueError: the engine broke" in "\n".join(caught.value.log)


async def test_a_worker_that_ignores_sigterm_is_killed() -> None:
    async with worker(stop_timeout_s=0.3) as process:
        await process.client.call(IGNORES_SIGTERM, Empty())
    assert await process.wait() == -signal.SIGKILL


async def test_a_wedged_worker_is_killed_and_shows_where_it_was_stuck() -> None:
    wedged = anyio.Event()

    def on_line(_: str, line: str) -> None:
        if line == "wedged":
            wedged.set()

    async with (
        launch(MODULE, name="w0", spec=Spec(), stop_timeout_s=0.3, on_line=on_line) as process,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(process.client.call, WEDGE, Empty())
        await wedged.wait()
        with pytest.raises(RpcTimeout):
            await process.client.health(timeout=0.3)
        tasks.cancel_scope.cancel()
    assert await process.wait() == -signal.SIGKILL
    assert " in wedge" in "\n".join(process.log)


async def test_a_sink_that_fails_ends_the_scope_and_the_worker() -> None:
    def on_line(_: str, line: str) -> None:
        raise OSError(f"disk full at {line!r}")

    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="disk full at 'greeting: '")):
        async with launch(MODULE, name="w0", spec=Spec(), on_line=on_line):
            await anyio.sleep_forever()


async def test_a_hung_thread_does_not_keep_a_stopping_worker() -> None:
    async with worker("hung_thread") as process:
        pass
    assert await process.wait() == 0


async def test_a_frozen_worker_times_calls_out_and_is_killed() -> None:
    async with worker(stop_timeout_s=0.3) as process:
        await process.client.call(DOUBLE, Number(1))
        os.kill(process.pid, signal.SIGSTOP)
        with anyio.fail_after(10):
            for _ in range(3):
                with pytest.raises(RpcTimeout):
                    await process.client.call(DOUBLE, Number(1), timeout=0.3)
            with pytest.raises(RpcTimeout):
                await process.client.health(timeout=0.3)
    assert await process.wait() == -signal.SIGKILL


async def test_a_thawed_worker_serves_again() -> None:
    async with worker() as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(RpcTimeout):
            await process.client.call(DOUBLE, Number(1), timeout=0.3)
        os.kill(process.pid, signal.SIGCONT)
        assert await process.client.call(DOUBLE, Number(2)) == Number(4)
        assert (await process.client.health()).in_flight == 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_grandchild_ends_with_its_worker(end: signal.Signals, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with worker("grandchild", pid_file=str(pid_file)) as process:
        grandchild = int(pid_file.read_text())
        os.kill(grandchild, 0)
        os.kill(process.pid, end)
        await process.wait()
        await until_gone(grandchild)


@asynccontextmanager
async def launcher(fault: str = "", pid_file: str = "") -> AsyncGenerator[tuple[int, int]]:
    """Another process that launches a worker: their pids."""
    command = [sys.executable, "-m", "tests.workers.launch.launcher", fault, pid_file]
    parent = await anyio.to_thread.run_sync(lambda: subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    assert parent.stdout is not None
    fork = 0
    try:
        line = await anyio.to_thread.run_sync(parent.stdout.readline)
        child, fork = map(int, line.split())
        yield parent.pid, child
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if fork:
            os.kill(fork, signal.SIGKILL)
            await until_gone(fork)


@pytest.mark.parametrize("fault", ["", "wedges", "fork_holds_lifeline"])
async def test_a_worker_ends_with_its_killed_launcher(fault: str) -> None:
    async with launcher(fault) as (parent, child):
        os.kill(parent, signal.SIGKILL)
        await until_gone(child)


async def test_a_grandchild_ends_with_the_killed_launcher(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with launcher("grandchild", str(pid_file)) as (parent, child):
        grandchild = int(pid_file.read_text())
        os.kill(parent, signal.SIGKILL)
        await until_gone(child)
        await until_gone(grandchild)


async def test_a_worker_started_by_hand_says_what_it_needs() -> None:
    result = await anyio.run_process([sys.executable, "-m", MODULE], input=b"hello\n", check=False)
    assert result.returncode == 1
    assert b"a worker is started by its launcher" in result.stderr
    assert b"Traceback" not in result.stderr


async def test_no_thread_is_left_behind() -> None:
    async with worker():
        pass
    before = threading.active_count()
    async with worker():
        pass
    assert threading.active_count() <= before
