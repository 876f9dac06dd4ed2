"""Which settings of the samplers go together, so that no step waits for groups that cannot come."""

from __future__ import annotations

from collections.abc import Iterator

from controller.config.figures import live_groups, min_groups
from controller.config.problems import Problem
from controller.config.schema import Config
from controller.config.surroundings import own_class


def sampling(config: Config) -> Iterator[Problem]:
    rollout = config.rollout
    if ":" in rollout.sampler:
        yield from own_class(
            "rollout.sampler", rollout.sampler, "windowed, ready_first, weight_fifo, in_order or module:Class"
        )
        if min_groups(rollout) < rollout.groups_per_step:
            yield _not_of(
                "min_step_batch_fraction",
                f"{rollout.min_step_batch_fraction:g}",
                rollout.sampler,
                "1",
                "a built-in one",
            )
    elif rollout.sampler_args:
        yield _not_of("sampler_args", "is given", rollout.sampler, "nothing", "a sampler of your own")
    if rollout.staleness_from == "oldest_token" and rollout.sampler != "windowed":
        yield _not_of("staleness_from", "oldest_token", rollout.sampler, "dispatch", "windowed")
    if rollout.freshest_first and (rollout.sampler != "windowed" or rollout.over_sampling == 1):
        yield Problem(
            path="rollout.freshest_first",
            what=f"true with rollout.sampler {rollout.sampler} and rollout.over_sampling {rollout.over_sampling:g}",
            allowed="false, unless windowed has a surplus: else the oldest groups would wait until they are too old",
            remedy="remove it, or set rollout.over_sampling: 1.5",
        )
    if rollout.over_sampling > 1 and rollout.sampler != "windowed":
        yield Problem(
            path="rollout.over_sampling",
            what=f"{rollout.over_sampling:g} with rollout.sampler {rollout.sampler}",
            allowed="1 but for windowed, the only one that leaves a surplus over",
            remedy="remove it, or set rollout.sampler: windowed",
        )
    elif rollout.over_sampling > 1 and rollout.max_staleness == 0:
        live = live_groups(rollout)
        yield Problem(
            path="rollout.over_sampling",
            what=f"{rollout.over_sampling:g} with rollout.max_staleness 0",
            allowed=(
                f"1 with max_staleness 0: of {live} groups a step trains {rollout.groups_per_step}, and the "
                f"{live - rollout.groups_per_step} others are 1 step old for the next one, 1 > 0, so each is evicted"
            ),
            remedy="remove it, or set rollout.max_staleness: 1",
        )
    live = live_groups(rollout)
    if rollout.max_in_flight_groups is not None and rollout.max_in_flight_groups > live:
        yield Problem(
            path="rollout.max_in_flight_groups",
            what=f"{rollout.max_in_flight_groups} has no effect: the sampler never holds more than {live} groups",
            allowed=f"an integer from 1 to {live} (fewer than groups_per_step is fine: ready groups do not count)",
            warning=True,
        )


def _not_of(key: str, value: str, sampler: str, allowed: str, of: str) -> Problem:
    return Problem(
        path=f"rollout.{key}",
        what=f"{value} with rollout.sampler {sampler}",
        allowed=f"{allowed}, unless rollout.sampler is {of}",
        remedy="remove it",
    )
