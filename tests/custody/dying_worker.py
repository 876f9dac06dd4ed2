"""A generation worker that is killed as soon as the row of the call in DIES_AFTER is staged: no reply comes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from dataplane.plane import Row
from dataplane.spec import PlaneSpec, connect
from workers.generation import service


class LastPut:
    """A data plane, but for that."""

    def __init__(self, plane: Any) -> None:
        self._plane = plane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    async def put(self, partition: str, rows: Mapping[str, Row], **options: Any) -> None:
        await self._plane.put(partition, rows, **options)
        if any(key.startswith(os.environ["DIES_AFTER"]) for key in rows):
            os.kill(os.getpid(), signal.SIGKILL)


async def connected(spec: PlaneSpec) -> Any:
    return LastPut(await connect(spec))


if __name__ == "__main__":
    service.connect = connected
    service.main()
