"""The status server answers whatever the loop does, to this machine only."""

from __future__ import annotations

import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import anyio
import anyio.to_thread
import msgspec
import pytest

from controller.sentinel.sentinel import Sentinel
from controller.waits import status
from controller.waits.graph import WaitGraph
from controller.waits.server import STATUS_FILE, StatusAddress, StatusServer, status_file
from controller.waits.view import idle_graph

pytestmark = pytest.mark.anyio


@contextmanager
def serving() -> Generator[str]:
    with Sentinel(report_over_ms=60_000) as sentinel:
        with StatusServer(sentinel, lambda: idle_graph("r", "starting the data plane", sentinel)).serving() as url:
            yield url


def get(url: str, host: str | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host} if host else {})) as answer:
        return answer.read()


async def in_thread(url: str, host: str | None = None) -> bytes:
    return await anyio.to_thread.run_sync(get, url, host)


async def test_it_says_what_the_controller_does_before_there_is_a_run() -> None:
    with serving() as url:
        graph = msgspec.json.decode(await in_thread(f"{url}/debug/waits"), type=WaitGraph)
        stacks = (await in_thread(f"{url}/debug/stacks")).decode()
    assert (graph.run, graph.pid, graph.doing, graph.culprit) == ("r", os.getpid(), "starting the data plane", None)
    assert "test_it_says_what_the_controller_does_before_there_is_a_run" in stacks


async def test_it_answers_while_the_loop_is_blocked_and_says_where() -> None:
    answers: dict[str, bytes] = {}

    def ask(url: str) -> None:
        time.sleep(1.2)
        for path in ("health", "debug/waits"):
            answers[path] = get(f"{url}/{path}")

    with serving() as url:
        thread = Thread(target=ask, args=(url,))
        thread.start()
        thread.join(30)  # Blocks the loop.
    graph = msgspec.json.decode(answers["debug/waits"], type=WaitGraph)
    assert graph.culprit is not None
    assert graph.culprit.part == "event loop"
    assert f"{__file__}" in graph.culprit.why
    assert msgspec.json.decode(answers["health"])["status"] == "blocked"


async def test_it_refuses_what_was_not_addressed_to_this_machine() -> None:
    with serving() as url:
        with pytest.raises(urllib.error.HTTPError, match="403"):
            await in_thread(f"{url}/debug/waits", "attacker.example:80")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await in_thread(f"{url}/debug")


async def test_a_worker_that_was_stopped_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def graph() -> WaitGraph:
        return WaitGraph(run="r", pid=os.getpid(), time=0.0, doing="training", processes={"generation-0": child.pid})

    async with await anyio.open_process(["sleep", "60"]) as child:
        with Sentinel(report_over_ms=60_000) as sentinel, StatusServer(sentinel, graph).serving() as url:
            try:
                await anyio.to_thread.run_sync(status.main, [url])
                assert "not healthy" not in capsys.readouterr().out
                child.send_signal(signal.SIGSTOP)
                await anyio.to_thread.run_sync(os.waitid, os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
                await anyio.to_thread.run_sync(status.main, [url])
            finally:
                child.kill()
    told = capsys.readouterr().out
    assert f"not healthy: generation-0: process {child.pid} is stopped" in told
    assert f"processes: generation-0 {child.pid}" in told


async def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    with serving() as url:
        reading, writing = os.pipe()
        os.close(reading)
        command = [sys.executable, "-m", "controller", "status", url]
        try:
            done = await anyio.run_process(command, stdout=writing, check=False)
        finally:
            os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


async def test_the_status_of_a_run_that_is_not_there_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status.main([str(tmp_path)]) == 1
    assert f"no run is active in {tmp_path}: there is no status.json" in capsys.readouterr().err
    with status_file(tmp_path, "http://127.0.0.1:9"):
        assert msgspec.json.decode((tmp_path / STATUS_FILE).read_bytes(), type=StatusAddress).pid == os.getpid()
        assert status.main([str(tmp_path)]) == 1
    assert f"its process {os.getpid()} is in state R" in capsys.readouterr().err
    assert not (tmp_path / STATUS_FILE).exists()
    (tmp_path / "summary.json").touch()
    assert status.main([str(tmp_path)]) == 1
    assert "says how the last one ended" in capsys.readouterr().err
