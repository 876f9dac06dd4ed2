"""The same run on every backend: nothing of the configuration changes but the data plane's section, and no row is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from dataplane import software
from tests.dataplane.ray_cluster import ray_cluster
from tests.e2e.running import conserved, finished

pytestmark = [pytest.mark.anyio, pytest.mark.campaign]
needs_mooncake = pytest.mark.skipif(software.mooncake_problem() is not None, reason=str(software.mooncake_problem()))


async def trains(config: dict[str, Any], folder: Path, dataplane: dict[str, Any]) -> None:
    config["run"]["steps"] = 2
    run = await finished(config | {"dataplane": dataplane}, folder)
    assert conserved(run.summary()), run.summary()
    assert run.summary()["trained"] == 2 * 2 * 4
    assert not (run.run_dir / "dataplane.json").exists()


@needs_mooncake
async def test_a_run_on_mooncake(config: dict[str, Any], tmp_path: Path) -> None:
    await trains(config, tmp_path, {"backend": "mooncake", "storage_units": 2, "mooncake": {"memory_mb": 64}})


async def test_a_run_on_a_ray_cluster(config: dict[str, Any], tmp_path: Path) -> None:
    with ray_cluster() as cluster:
        ray = {"address": cluster.address, "token_file": str(cluster.token_file), "cpus_per_server": 0.5}
        await trains(config, tmp_path, {"servers": "ray", "ray": ray})
        assert await anyio.to_thread.run_sync(cluster.processes, "dataplane.serve") == []
        if software.mooncake_problem() is None:
            config["run"]["dir"] = "mooncake"
            mooncake = {"backend": "mooncake", "mooncake": {"memory_mb": 64}}
            await trains(config, tmp_path, {"servers": "ray", "ray": ray, **mooncake})
            assert await anyio.to_thread.run_sync(cluster.processes, "dataplane.serve") == []
