"""The rollout pump: dispatches prompt groups as the sampler admits them, plays their rollouts, hands them to the finalizer.

Invariant: every prompt taken from the source belongs to a live group of the buffer. The pump's first error ends the run;
groups left live by an error or a cancellation are ended by whoever ends the run.
"""

from __future__ import annotations

import math

import anyio
import anyio.lowlevel
from anyio.abc import ObjectSendStream

from controller.buffer import GroupEntry, GroupState, ReplayBuffer
from controller.config.schema import RolloutConfig
from controller.gradual import GradualTaskGroup, gradual_task_group
from controller.player import Player
from controller.prompts import PromptSource
from controller.records import FinalizationRequest, PlayedRollout, PromptGroup
from controller.run_state import RunState
from controller.samplers import Sampler
from controller.waiting import PROMPTS, ROLLOUT_PUMP, Activities
from ledger.ledger import Ledger

TOO_STALE = "too_stale"
"""Why a group is given up while it is played."""


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
        player: Player,
        prompts: PromptSource,
        buffer: ReplayBuffer,
        state: RunState,
        sampler: Sampler,
        ledger: Ledger,
        finalize: ObjectSendStream[FinalizationRequest],
        activities: Activities,
        first_group: int = 0,
    ) -> None:
        self._config = config
        self._player = player
        self._prompts = prompts
        self._buffer = buffer
        self._state = state
        self._sampler = sampler
        self._ledger = ledger
        self._finalize = finalize
        self._activities = activities
        self._abortable: dict[str, anyio.CancelScope] = {}
        """The groups that are played, less those that are being aborted."""
        self.next_group = first_group

    async def run(self) -> None:
        """Dispatch until the prompts are exhausted, then wait for what is in flight. Otherwise runs until cancelled."""
        async with anyio.create_task_group() as watch:
            watch.start_soon(self._abort_useless)
            async with gradual_task_group() as tg:
                await self._dispatch_all(tg)
            watch.cancel_scope.cancel()

    async def _dispatch_all(self, tg: GradualTaskGroup) -> None:
        while True:
            with self._activities.doing(ROLLOUT_PUMP, "waiting for the sampler to admit a group"):
                await self._buffer.wait_until(self.may_dispatch)
            entry = await self._dispatch()
            if entry is None:
                self._state.exhaust()
                return
            tg.start_soon(self._play_group, entry)

    async def _abort_useless(self) -> None:
        """Stop playing what no step can use any more: it would keep engines and slots from what can be trained."""
        while True:
            await self._buffer.wait_until(lambda: bool(self._useless()))
            for group_id in self._useless():
                if (scope := self._abortable.pop(group_id, None)) is not None:
                    scope.cancel()
                    # One in each turn of the loop, as when all are ended.
                    await anyio.lowlevel.checkpoint()

    def _useless(self) -> list[str]:
        return [g for g in self._sampler.should_abort_inflight(self._state.view()) if g in self._abortable]

    def may_dispatch(self) -> bool:
        """Whether the policy admits a group now."""
        return self._target_step() is not None

    def _target_step(self) -> int | None:
        generating = self._buffer.entries.count(GroupState.GENERATING)
        if self._state.dispatch_held or generating >= (self._config.max_in_flight_groups or math.inf):
            return None
        return self._sampler.admit(self._state.view())

    async def _dispatch(self) -> GroupEntry | None:
        """Put the next prompt into the buffer as a generating group; None when there is no next prompt."""
        group_id = group_id_of(self.next_group)
        entry = await self._buffer.reserve(group_id)
        try:
            with self._activities.doing(ROLLOUT_PUMP, "drawing a prompt", on=PROMPTS):
                if not await self._prompts.fetch():
                    return None
            # The run may have moved on while the prompt was drawn.
            await self._buffer.wait_until(self.may_dispatch)
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
            played[rollout_id] = await self._player.play(group, rollout_id)

        scope = self._abortable[group.group_id] = anyio.CancelScope()
        try:
            with scope:
                async with gradual_task_group() as tg:
                    for rollout_id in group.rollout_ids:
                        tg.start_soon(play, rollout_id)
        finally:
            self._abortable.pop(group.group_id, None)
        self._buffer.begin_finalizing(group.group_id)
        if scope.cancelled_caught:
            request = FinalizationRequest(group_id=group.group_id, rollouts=(), aborted=TOO_STALE)
        else:
            request = FinalizationRequest(
                group_id=group.group_id, rollouts=tuple(played[rollout_id] for rollout_id in group.rollout_ids)
            )
        await self._finalize.send(request)
