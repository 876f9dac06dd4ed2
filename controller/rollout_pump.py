"""The rollout pump: dispatches prompt groups as the sampler admits them, plays their rollouts, hands them to the finalizer.

Invariant: every prompt taken from the source belongs to a live group of the buffer. The pump's first error ends the run;
groups left live by an error or a cancellation are ended by whoever ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from numbers import Real

import anyio
from anyio.abc import ObjectSendStream

from controller.buffer import GroupEntry, GroupState, ReplayBuffer
from controller.config.schema import RolloutConfig
from controller.context import InLoopContext
from controller.prompts import PromptSource
from controller.records import FinalizationRequest, PlayedRollout, PromptGroup
from controller.run_state import RunState
from controller.samplers import Sampler
from controller.waiting import Activities
from ledger.errors import RolloutClosed
from ledger.ledger import Ledger
from ledger.reasons import Reason
from workers.environments.base import Environment, RolloutResult, Tokens


class RolloutError(Exception):
    """An environment failed at a rollout, or returned something that cannot be trained on."""


def group_id_of(number: int) -> str:
    return f"g{number:06d}"


def number_after(group_id: str) -> int:
    """The number that follows that of a group; 0 for ""."""
    return int(group_id.removeprefix("g")) + 1 if group_id else 0


class RolloutPump:
    def __init__(
        self,
        *,
        config: RolloutConfig,
        environment: Environment,
        prompts: PromptSource,
        buffer: ReplayBuffer,
        state: RunState,
        sampler: Sampler,
        ledger: Ledger,
        finalize: ObjectSendStream[FinalizationRequest],
        make_context: Callable[[str], InLoopContext],
        forget: Callable[[str], None],
        activities: Activities,
        first_group: int = 0,
        echo: bool = False,
    ) -> None:
        """With `echo` the environment returns each rollout's tokens."""
        self._config = config
        self._environment = environment
        self._prompts = prompts
        self._buffer = buffer
        self._state = state
        self._sampler = sampler
        self._ledger = ledger
        self._finalize = finalize
        self._make_context = make_context
        self._forget = forget
        self._activities = activities
        self._echo = echo
        self.next_group = first_group
        self.playing = 0
        """Rollouts being played."""

    async def run(self) -> None:
        """Dispatch until the prompts are exhausted, then wait for what is in flight. Otherwise runs until cancelled."""
        async with anyio.create_task_group() as tg:
            while True:
                with self._activities.doing("rollout pump", "waiting for the sampler to admit a group"):
                    await self._buffer.wait_until(self._may_dispatch)
                entry = await self._dispatch()
                if entry is None:
                    self._state.exhaust()
                    return
                tg.start_soon(self._play_group, entry)

    def _may_dispatch(self) -> bool:
        return self._target_step() is not None

    def _target_step(self) -> int | None:
        generating = sum(e.state is GroupState.GENERATING for e in self._buffer.entries)
        if self._state.dispatch_held or generating >= (self._config.max_in_flight_groups or math.inf):
            return None
        return self._sampler.admit(self._state.view())

    async def _dispatch(self) -> GroupEntry | None:
        """Put the next prompt into the buffer as a generating group; None when there is no next prompt."""
        group_id = group_id_of(self.next_group)
        entry = await self._buffer.reserve(group_id)
        try:
            with self._activities.doing("rollout pump", "drawing a prompt"):
                if not await self._prompts.fetch():
                    return None
            # The run may have moved on while the prompt was drawn.
            await self._buffer.wait_until(self._may_dispatch)
            target_step = self._target_step()
            assert target_step is not None
            group = PromptGroup(
                group_id=group_id,
                prompt=self._prompts.take(),
                start_version=self._state.version,
                rollout_ids=tuple(f"{group_id}.{i}" for i in range(self._config.group_size)),
            )
            self.next_group += 1
            return self._buffer.dispatch(group, target_step=target_step)
        finally:
            if entry.state is GroupState.RESERVED:
                self._buffer.abort(group_id)

    async def _play_group(self, entry: GroupEntry) -> None:
        group = entry.dispatched
        await self._ledger.dispatched(
            group.group_id, prompt_id=group.prompt.id, rollout_ids=group.rollout_ids, version=group.start_version
        )
        played: dict[str, PlayedRollout] = {}

        async def play(rollout_id: str) -> None:
            self.playing += 1
            try:
                played[rollout_id] = await self._play(group, rollout_id)
            finally:
                self.playing -= 1
                self._forget(rollout_id)

        async with anyio.create_task_group() as tg:
            for rollout_id in group.rollout_ids:
                tg.start_soon(play, rollout_id)
        self._buffer.begin_finalizing(group.group_id)
        request = FinalizationRequest(
            group_id=group.group_id, rollouts=tuple(played[rollout_id] for rollout_id in group.rollout_ids)
        )
        await self._finalize.send(request)

    async def _play(self, group: PromptGroup, rollout_id: str) -> PlayedRollout:
        await self._ledger.open(rollout_id, group.group_id)
        context = self._make_context(rollout_id)
        result: object = None
        failure: Reason | None = None
        with anyio.move_on_after(self._config.timeout_s) as deadline:
            try:
                result = await self._environment.rollout(context, group.prompt)
            except Exception as e:
                raise RolloutError(self._place(group, rollout_id) + f"rollout() raised {type(e).__name__}: {e}") from e
        if deadline.cancelled_caught:
            failure, result = Reason.ROLLOUT_TIMEOUT, RolloutResult(reward=0.0)
        result = self._checked(group, rollout_id, result)
        if context.terminal is not None:
            # Sealed over the control plane, the record holds what was declared by then.
            with suppress(RolloutClosed):
                await self._ledger.declare_terminal(rollout_id, context.terminal)
        if result.scored is not None and not self._echo:
            with suppress(RolloutClosed):
                await self._ledger.witness(rollout_id, content=result.scored)
        return PlayedRollout(
            rollout_id=rollout_id,
            reward=float(result.reward),
            metrics={name: float(value) for name, value in result.metrics.items()},
            failure=failure,
            tokens=result.tokens,
        )

    def _checked(self, group: PromptGroup, rollout_id: str, result: object) -> RolloutResult:
        place = self._place(group, rollout_id)
        if not isinstance(result, RolloutResult):
            raise RolloutError(f"{place}rollout() returned {result!r}; it must return a RolloutResult")
        for name, value in {
            "reward": result.reward,
            **{f"metrics[{k!r}]": v for k, v in result.metrics.items()},
        }.items():
            # numpy's scalars are such numbers too.
            if not isinstance(value, Real) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RolloutError(
                    f"{place}{name} is {value!r}; it must be a finite number. Mend the environment's scoring"
                )
        for name, kind in (("scored", str), ("tokens", Tokens)):
            value: object = getattr(result, name)
            if value is not None and not isinstance(value, kind):
                raise RolloutError(f"{place}{name} is {value!r:.200}; it must be None or a {kind.__name__}")
        if result.tokens is not None and not self._echo:
            raise RolloutError(
                f"{place}rollout() returned tokens, but token_capture.enabled is true: those that the engine sampled are "
                "trained. Leave RolloutResult.tokens out, or set token_capture.enabled: false"
            )
        return result

    def _place(self, group: PromptGroup, rollout_id: str) -> str:
        name = type(self._environment).__name__
        return f"environment {name}, prompt {group.prompt.id!r}, rollout {rollout_id}: "
