"""What the data plane needs: the packages of its backend, the files it names, and room for the rows that live at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from controller.config.figures import context_tokens, live_groups
from controller.config.model_dir import ModelFacts
from controller.config.problems import Problem
from controller.config.schema import Config, DataPlaneConfig
from dataplane import software

STAGED_BYTES = TRAINED_BYTES = 8 + 1 + 4 + 8
"""Of one token in each partition: id, mask, logprob, weight version."""

PROCESS_MB = 300
"""Of a storage process that has no rows."""


def plane(config: Config, model: ModelFacts | None) -> Iterator[Problem]:
    dataplane = config.dataplane
    yield from _packages(dataplane)
    yield from _unused(dataplane)
    yield from _processes(dataplane)
    token_file = dataplane.ray.token_file
    if dataplane.servers == "ray" and token_file is not None and not os.access(token_file, os.R_OK):
        yield Problem(
            path="dataplane.ray.token_file",
            what=f"{token_file} cannot be read",
            allowed="a file that holds the cluster's token, or null",
            remedy=f"paths are relative to where you start it: looked for {Path(token_file).absolute()}",
        )
    if dataplane.backend == "mooncake":
        yield from _room(config, model)


def _packages(dataplane: DataPlaneConfig) -> Iterator[Problem]:
    for key, value, fallback, problem in (
        ("backend", "mooncake", "simple", software.mooncake_problem),
        ("servers", "ray", "local", software.ray_problem),
    ):
        if getattr(dataplane, key) == value and (what := problem()):
            reason, _, remedy = what.partition(": ")
            yield Problem(
                path=f"dataplane.{key}",
                what=f"{value}, but {reason}",
                allowed=f"{fallback}, or {value} where that is installed",
                remedy=remedy,
            )


def _unused(dataplane: DataPlaneConfig) -> Iterator[Problem]:
    default = DataPlaneConfig()
    mooncake = dataplane.backend == "mooncake"
    devices = dataplane.mooncake.devices
    for key, idle, switch in (
        ("mooncake", not mooncake and dataplane.mooncake != default.mooncake, "backend: mooncake"),
        ("mooncake.devices", mooncake and devices and dataplane.mooncake.protocol != "rdma", "mooncake.protocol: rdma"),
        ("ray", dataplane.servers != "ray" and dataplane.ray != default.ray, "servers: ray"),
    ):
        if idle:
            yield Problem(
                path=f"dataplane.{key}",
                what="has no effect",
                allowed=f"nothing, unless dataplane.{switch}",
                warning=True,
            )


def _processes(dataplane: DataPlaneConfig) -> Iterator[Problem]:
    """A Ray cluster says by itself how many it has room for."""
    units, most = dataplane.storage_units, int(_machine_mb() / PROCESS_MB)
    if dataplane.servers == "local" and units > most:
        yield Problem(
            path="dataplane.storage_units",
            what=f"{units:,} processes, which take {PROCESS_MB} MiB each without any rows",
            allowed=f"at most {most:,}, for which this machine's memory suffices; a few are plenty",
        )


def _room(config: Config, model: ModelFacts | None) -> Iterator[Problem]:
    """MooncakeStore lends a fixed amount of memory, and a put that does not fit fails."""
    dataplane, rollout = config.dataplane, config.rollout
    room = dataplane.storage_units * dataplane.mooncake.memory_mb
    context = context_tokens(config, model)
    if context is not None:
        rollouts = live_groups(rollout) * rollout.group_size
        wanted = rollouts * context * (STAGED_BYTES + TRAINED_BYTES) / 2**20
        if wanted > room:
            yield Problem(
                path="dataplane.mooncake.memory_mb",
                what=f"{dataplane.mooncake.memory_mb} x {dataplane.storage_units} storage units = {room:,} MiB",
                allowed=(
                    f">= {wanted:,.0f} MiB together, if every one of the {rollouts} rollouts that live at a time grew to "
                    f"{context} tokens, staged and published; what does not fit is lost to training"
                ),
                warning=True,
            )
    if dataplane.servers == "local":
        machine = _machine_mb()
        if room > machine:
            yield Problem(
                path="dataplane.mooncake.memory_mb",
                what=f"{dataplane.mooncake.memory_mb} x {dataplane.storage_units} storage units = {room:,} MiB",
                allowed=f"at most {machine:,.0f} MiB together, this machine's memory",
                remedy="lower it, or dataplane.storage_units",
            )


def _machine_mb() -> float:
    """This machine's memory, in MiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20
