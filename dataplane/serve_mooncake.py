"""A server of MooncakeStore as a plain process: `python -m dataplane.serve_mooncake master|storage --host HOST ...`.

The master knows where every object is; a storage server lends its memory to them. Like TransferQueue's servers each prints
its `ServerAddress` when it serves, and ends when its stdin does. A connection to its port `life` ends with the process.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import socketserver
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from dataplane import software, tq_settings
from dataplane.serve import handshake_channel, serve_until_stdin_ends
from dataplane.spec import ServerAddress

START_TIMEOUT_S = 20.0
STORAGE_BUFFER_BYTES = 16 * 2**20
PR_SET_PDEATHSIG = 1

_lent: Any = None
"""Mooncake's client whose memory is lent: as long as the process lives."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["master", "storage"])
    parser.add_argument("--host", required=True)
    parser.add_argument("--master", help="host:port, for a storage server")
    parser.add_argument("--memory-mb", type=int)
    parser.add_argument("--protocol", default="tcp")
    parser.add_argument("--devices", default="")
    arguments = parser.parse_args()

    channel = handshake_channel()
    tq_settings.apply()
    if problem := software.mooncake_problem():
        raise SystemExit(problem)
    if ":" in arguments.host:
        raise SystemExit(
            f"Mooncake cannot be reached at an IPv6 address ({arguments.host}): use backend simple, or IPv4"
        )
    name, ports = _master(arguments.host) if arguments.role == "master" else _storage(arguments)
    life = Life((arguments.host, 0), Connection)
    threading.Thread(target=life.serve_forever, daemon=True).start()
    ports["life"] = life.server_address[1]
    address = ServerAddress(arguments.role, name, arguments.host, ports, software.running(software.MOONCAKE))
    serve_until_stdin_ends(channel, address)


class Connection(socketserver.BaseRequestHandler):
    """One that asks for nothing, and is held until its other end lets go."""

    def handle(self) -> None:
        while self.request.recv(64):
            pass


class Life(socketserver.ThreadingTCPServer):
    daemon_threads = True


def _master(host: str) -> tuple[str, dict[str, int]]:
    ports = {"rpc": _free_port(host), "admin": _free_port(host)}
    program = Path(software.mooncake_store().__file__).parent / "mooncake_master"
    process = subprocess.Popen(
        [
            program,
            f"--rpc_address={host}",
            f"--rpc_port={ports['rpc']}",
            f"--metrics_host={host}",
            f"--metrics_port={ports['admin']}",
            "--enable_metric_reporting=false",
            # Rows are removed by their owner only. What does not fit is refused.
            "--eviction_high_watermark_ratio=1.0",
            "--eviction_ratio=0.0",
            "--allow_evict_soft_pinned_objects=false",
            # A storage server that stands still for less than this comes back with its rows.
            "--client_ttl=60",
        ],
        stdin=subprocess.DEVNULL,
        env={"GLOG_minloglevel": "3", **os.environ},
        preexec_fn=_die_with_parent,  # no other thread runs yet
    )
    _await_listener(host, ports["rpc"], process)
    threading.Thread(target=_end_with, args=(process,), daemon=True).start()
    return f"{host}:{ports['rpc']}", ports


def _storage(arguments: argparse.Namespace) -> tuple[str, dict[str, int]]:
    store = software.mooncake_store().MooncakeDistributedStore()
    code = store.setup(
        arguments.host,
        "P2PHANDSHAKE",
        arguments.memory_mb * 2**20,
        STORAGE_BUFFER_BYTES,
        arguments.protocol,
        arguments.devices,
        arguments.master,
    )
    if code:
        raise SystemExit(f"Mooncake could not set up {arguments.memory_mb} MiB for {arguments.master}: code {code}")
    global _lent
    _lent = store
    return store.get_hostname(), {}


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with(process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    os.write(2, f"mooncake_master ended with code {code}\n".encode())
    os._exit(1)


def _await_listener(host: str, port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise SystemExit(f"mooncake_master does not listen on {host}:{port}; exit code {process.poll()}")


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    main()
