"""The limit of open files, raised where every call in flight holds a connection."""

from __future__ import annotations

import resource

_ENOUGH = 65536


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files, as far as its hard limit allows; the usual 1024 is near."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
