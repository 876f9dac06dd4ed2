"""Plays one rollout: the environment talks to the model through the gate, within a deadline, and says what it was worth.

Invariant: what was played has a finite reward; whatever else an environment does ends the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from numbers import Real

import anyio

from controller.context import InLoopContext
from controller.foreign import await_foreign
from controller.records import PlayedRollout, PromptGroup
from ledger.errors import RolloutClosed
from ledger.ledger import Ledger
from ledger.reasons import Reason
from workers.environments.base import Environment, RolloutResult, Tokens


class RolloutError(Exception):
    """An environment failed at a rollout, or returned something that cannot be trained on."""


class Player:
    """With `echo` the environment returns each rollout's tokens. `forget` hears of each rollout that makes no more calls."""

    def __init__(
        self,
        *,
        environment: Environment,
        ledger: Ledger,
        make_context: Callable[[str], InLoopContext],
        forget: Callable[[str], None],
        timeout_s: float,
        echo: bool = False,
    ) -> None:
        self._environment = environment
        self._ledger = ledger
        self._make_context = make_context
        self._forget = forget
        self._timeout_s = timeout_s
        self._echo = echo
        self.playing = 0
        """Rollouts being played."""

    async def play(self, group: PromptGroup, rollout_id: str) -> PlayedRollout:
        """Open a rollout of `group`, which is dispatched, and play it. Raises RolloutError, and the ledger's errors.

        A cancellation leaves it open.
        """
        self.playing += 1
        try:
            return await self._play(group, rollout_id)
        finally:
            self.playing -= 1
            self._forget(rollout_id)

    async def _play(self, group: PromptGroup, rollout_id: str) -> PlayedRollout:
        await self._ledger.open(rollout_id, group.group_id)
        context = self._make_context(rollout_id)
        result: object = None
        failure: Reason | None = None
        with anyio.move_on_after(self._timeout_s) as deadline:
            try:
                result = await await_foreign(
                    self._rollout(context, group), f"rollout {rollout_id}", on_cancel=context.close
                )
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

    async def _rollout(self, context: InLoopContext, group: PromptGroup) -> object:
        return await self._environment.rollout(context, group.prompt)

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
