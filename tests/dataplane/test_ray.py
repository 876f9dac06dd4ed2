"""The servers in a Ray cluster are the same servers: every case holds, and nobody but their driver joins the cluster.

One cluster takes seconds to start, so that one test does it all, whatever processes the tests are shared among.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial

import anyio
import msgspec
import pytest
import ray

from dataplane.conformance.cases import CASES
from dataplane.conformance.faults import FAULTS
from dataplane.errors import DataPlaneDown
from dataplane.ray_settings import RaySettings
from dataplane.servers import start_servers
from dataplane.spec import connect
from tests.dataplane.faults import frozen, gone
from tests.dataplane.ray_cluster import RayCluster, ray_cluster

pytestmark = pytest.mark.anyio


@pytest.mark.long
async def test_servers_in_a_ray_cluster() -> None:
    with ray_cluster() as cluster:
        settings = RaySettings(address=cluster.address, token_file=str(cluster.token_file), cpus_per_server=0.5)
        async with start_servers(storage_units=2, timeout_s=90, ray=settings) as servers:
            await every_case_holds(servers.spec)
            assert not ray.is_initialized()
            await every_fault_is_borne(cluster, servers.spec)
            await a_second_plane_is_refused(settings)
            await the_doctor_finds_it(cluster)
            (storage, *_) = cluster.processes("dataplane.serve storage")
            os.kill(storage, signal.SIGKILL)
            with (
                anyio.fail_after(30),
                pytest.raises(DataPlaneDown, match=r"storage unit \d .*was killed by SIGKILL, on node"),
            ):
                await servers.wait()
        await gone(*cluster.processes("dataplane.serve"))


async def every_case_holds(spec: object) -> None:
    for number, case in enumerate(CASES):
        plane = await connect(spec)  # type: ignore[arg-type]
        await case(plane, f"case {number}")
        await plane.aclose()


async def every_fault_is_borne(cluster: RayCluster, spec: object) -> None:
    plane = await connect(spec)  # type: ignore[arg-type]
    for pid in cluster.processes("dataplane.serve "):
        for fault in FAULTS:
            await fault(plane, f"{fault.__name__} {pid}", partial(frozen, pid))
    await plane.aclose()


async def a_second_plane_is_refused(settings: RaySettings) -> None:
    with pytest.raises(
        DataPlaneDown, match="there is a data plane in namespace 'monoloop' of this Ray cluster already"
    ):
        async with start_servers(timeout_s=60, ray=settings):
            raise AssertionError
    too_large = msgspec.structs.replace(settings, namespace="another", cpus_per_server=64)
    with pytest.raises(DataPlaneDown, match="2 servers need 128 CPUs; it has 4 CPUs"):
        async with start_servers(timeout_s=10, ray=too_large):
            raise AssertionError


async def the_doctor_finds_it(cluster: RayCluster) -> None:
    """In a process of its own: it joins the cluster to ask where the plane is."""
    doctor = [sys.executable, "-m", "dataplane", "doctor", "--address", f"ray:{cluster.address}"]
    result = await anyio.run_process([*doctor, "--token-file", str(cluster.token_file)], check=False)
    assert result.returncode == 0, result.stdout
    assert b"nothing is wrong" in result.stdout
