"""Which Ray cluster the data plane's servers run in, and where in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct


class RaySettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which Ray cluster, and where in it, where the servers run in one."""

    address: Annotated[
        str,
        Meta(pattern=r"^(auto|([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5})$", description="auto or host:port"),
    ] = "auto"
    """The cluster's address; `auto` joins the one that this machine is part of. None is ever started."""
    namespace: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]+$", description="a name")] = "monoloop"
    """Where the servers' actors get their names: one data plane to a namespace."""
    placement: Literal["spread", "pack", "driver"] = "spread"
    """`spread` over the nodes, `pack` on few of them, or all on the `driver`'s node."""
    resource: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]+$", description="a name")] | None = None
    """A custom resource that a node must have to get a server."""
    cpus_per_server: Annotated[float, Meta(ge=0)] = 1.0
    """What Ray sets aside for each."""
    token_file: Annotated[str, Meta(min_length=1, description="a path")] | None = None
    """The token of a cluster that asks for one; null leaves it to Ray (`RAY_AUTH_TOKEN`, `~/.ray/auth_token`)."""

    def environment(self) -> Mapping[str, str]:
        """What Ray must find in the environment of a process that joins."""
        # It asks once a second, 20 times if not told otherwise, also one that has refused its token.
        found = {"RAY_NUM_REDIS_GET_RETRIES": os.environ.get("RAY_NUM_REDIS_GET_RETRIES", "5")}
        if self.token_file is not None:
            found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token_file}
        return found
