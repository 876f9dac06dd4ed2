"""A Ray cluster of one node for a test: few resources, a token that it asks for, and gone afterwards with all it started."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 90.0
MARK = "MONOLOOP_TEST_RAY"


@dataclass(frozen=True)
class RayCluster:
    address: str
    token_file: Path
    mark: str

    def processes(self, containing: str = "") -> list[int]:
        """What it started that is still there: the mark is in the environment that they inherit."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and self.mark.encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if containing in command:
                        found.append(int(entry.name))
            except OSError:
                continue
        return sorted(found)


@contextmanager
def ray_cluster(cpus: int = 4) -> Generator[RayCluster]:
    """`ray start --head`, up in some 5 s. Its sockets need short paths, so its files are in the temp folder."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        token_file = Path(folder) / "token"
        token_file.write_text(secrets.token_hex(16))
        token_file.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mark = secrets.token_hex(8)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"),
                *("--node-ip-address=127.0.0.1", f"--num-cpus={cpus}", "--object-store-memory=80000000"),
                *("--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}/ray"),
            ],
            env={**os.environ, MARK: mark, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token_file)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        cluster = RayCluster(f"127.0.0.1:{port}", token_file, mark)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not cluster.processes("raylet/raylet"):
                assert process.poll() is None, "ray did not start"
                assert time.monotonic() < deadline, "ray did not start in time"
                time.sleep(0.1)
            yield cluster
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            while left := cluster.processes():
                for pid in left:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                time.sleep(0.05)
