"""Every plane does what `dataplane.conformance` asks, and no server that stands still is more than its callers can bear."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

from dataplane import conformance
from dataplane.conformance.cases import CASES, Case
from dataplane.conformance.faults import FAULTS, Fault
from dataplane.memory import MemoryPlane
from dataplane.server_process import PACKAGE_ROOT
from dataplane.servers import Servers
from dataplane.transferqueue import TransferQueuePlane
from tests.dataplane.backends import on_each_backend
from tests.dataplane.faults import frozen, serving

pytestmark = pytest.mark.anyio
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)


@each_case
async def test_of_the_memory_plane(case: Case, partition: str) -> None:
    await case(MemoryPlane(), partition)


@on_each_backend
@each_case
async def test_of_the_transferqueue_plane(case: Case, plane: TransferQueuePlane, partition: str) -> None:
    await case(plane, partition)


@on_each_backend
@each_fault
async def test_of_the_transferqueue_plane_when_a_server_stands_still(
    fault: Fault, servers: Servers, plane: TransferQueuePlane, partition: str
) -> None:
    for server, pid in servers.pids.items():
        await fault(plane, f"{partition}, {server}", partial(frozen, serving(pid)))


def test_the_lines_to_be_copied_run_on_a_plane_of_another_package(tmp_path: Path) -> None:
    lines = [line for line in str(conformance.__doc__).splitlines() if line.startswith("    ") or not line]
    (tmp_path / "test_mine.py").write_text(textwrap.dedent("\n".join(lines)))
    (tmp_path / "my_package.py").write_text(MY_PACKAGE)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "test_mine.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([PACKAGE_ROOT, str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"{len(CASES) + len(FAULTS) + 1} passed" in ran.stdout, ran.stdout + ran.stderr


MY_PACKAGE = """
from contextlib import nullcontext as freeze_mine
from dataplane.memory import MemoryPlane

async def connect_mine():
    return MemoryPlane()
"""
