"""The run's data-plane servers, as its configuration says, and the file by which they are found while the run lasts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from controller.config.schema import DataPlaneConfig
from controller.private_file import private_file
from controller.threads import in_thread
from dataplane.servers import Servers, start_servers

PLANE_FILE = "dataplane.json"
"""In the run's folder; `python -m dataplane doctor --address` takes it."""


@asynccontextmanager
async def open_plane(config: DataPlaneConfig, run_dir: Path, *, start_timeout_s: float) -> AsyncGenerator[Servers]:
    """Servers that serve; stopped on leaving. Raises DataPlaneDown when they do not come up."""
    servers = start_servers(
        storage_units=config.storage_units,
        timeout_s=start_timeout_s,
        plane_timeout_s=config.timeout_s,
        mooncake=config.mooncake if config.backend == "mooncake" else None,
        ray=config.ray if config.servers == "ray" else None,
    )
    async with servers, in_thread(private_file(run_dir / PLANE_FILE, servers.spec)):
        yield servers
