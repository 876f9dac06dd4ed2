"""Plays one rollout: the environment talks to the model through the gate, within a deadline, and says what it was worth.

One that machinery lost is played again, under another id: nothing of the lost one, which is aborted, can get into it.

Invariant: what was played has a finite reward. At a few an environment may raise, or return what cannot be trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from numbers import Real

from msgspec.structs import replace

from controller.config.schema import FailuresConfig
from controller.context import InLoopContext
from controller.environment_budget import EnvironmentBudget
from controller.first_error import explanations
from controller.foreign import await_foreign, stands_at
from controller.generation_pool import CallTrouble
from controller.records import PlayedRollout, PromptGroup
from controller.redispatch import RedispatchBudget
from controller.turns import Turns
from controller.waiting import ENVIRONMENT, Activities
from ledger.errors import CallFailedError, CallRefused, RolloutClosed
from ledger.ledger import Ledger
from ledger.reasons import Reason
from ledger.receipts import Receipt
from workers.environments.base import LARGEST_REWARD, Environment, RolloutResult, Tokens


class RolloutError(Exception):
    """An environment failed at a rollout, or returned something that cannot be trained on, once too often."""


class BadResult(Exception):
    """What an environment returned cannot be trained on. The message says why, and what is allowed."""


class Player:
    """With `echo` the environment returns each rollout's tokens. `trouble` tells what went wrong with a rollout's calls
    through no fault of its own; `forget` hears of each rollout that makes no more calls."""

    def __init__(
        self,
        *,
        environment: Environment,
        ledger: Ledger,
        make_context: Callable[[str], InLoopContext],
        forget: Callable[[str], None],
        activities: Activities | None = None,
        timeout_s: float,
        trouble: Callable[[str], CallTrouble] = lambda _: CallTrouble(),
        budget: RedispatchBudget | None = None,
        failures: EnvironmentBudget | None = None,
        turns: Turns | None = None,
        echo: bool = False,
    ) -> None:
        self._environment = environment
        self._ledger = ledger
        self._make_context = make_context
        self._trouble = trouble
        self._forget = forget
        self._activities = Activities() if activities is None else activities
        self._budget = budget or RedispatchBudget(FailuresConfig())
        self._failures = failures or EnvironmentBudget(FailuresConfig())
        self._turns = turns or Turns()
        self._timeout_s = timeout_s
        self._echo = echo
        self.playing = 0
        """Rollouts being played."""

    async def play(self, group: PromptGroup, rollout_id: str) -> PlayedRollout:
        """Open a rollout of `group`, which is dispatched, and play it. Raises RolloutError, MachineryFails, and the ledger's
        errors.

        The rollout that was played in the end may be another one, dispatched in place of this one. A cancellation leaves it
        open.
        """
        self.playing += 1
        lost: list[Receipt] = []
        name = rollout_id
        try:
            for attempt in itertools.count(1):
                played, why = await self._play_once(group, name)
                if not why:
                    self._budget.played()
                elif self._budget.lose(name, attempt, why):
                    lost.append(await self._ledger.abort(name, f"lost: {why}"))
                    again = f"{rollout_id}r{attempt}"
                    await self._ledger.replaced(group.group_id, name, again)
                    name = again
                    continue
                return replace(played, lost=tuple(lost))
        finally:
            self.playing -= 1
        raise AssertionError("the loop ends by returning")

    async def _play_once(self, group: PromptGroup, rollout_id: str) -> tuple[PlayedRollout, str]:
        """The rollout, and why it was lost to machinery, if it was."""
        try:
            played = await self._play(group, rollout_id)
            trouble = self._trouble(rollout_id)
            ended_badly = trouble.lost and (played.failure is not None or self._call_failed(rollout_id))
            return replace(played, attempts_lost=trouble.attempts_lost), trouble.lost if ended_badly else ""
        finally:
            self._forget(rollout_id)

    async def _play(self, group: PromptGroup, rollout_id: str) -> PlayedRollout:
        await self._ledger.open(rollout_id, group.group_id)
        context = self._make_context(rollout_id)
        result = RolloutResult(reward=0.0)
        failure: Reason | None = None
        detail = ""
        coroutine = self._rollout(context, group)
        at = partial(stands_at, coroutine)
        stood = ""

        def cancelled() -> None:
            nonlocal stood
            stood = at()
            context.close()

        with self._turns.playing(rollout_id, timeout_s=self._timeout_s) as overdue:
            try:
                with self._activities.doing(rollout_id, "is in the environment", on=ENVIRONMENT, at=at):
                    returned = await await_foreign(coroutine, f"rollout {rollout_id}", on_cancel=cancelled)
                result = self._checked(returned)
            except Exception as e:
                failure, detail = self._judged(e, group, rollout_id)
            else:
                self._failures.played()
        if overdue.reason is not None:
            failure, detail = overdue.reason, f"it stood at {stood}" if stood else ""
            result = RolloutResult(reward=0.0)
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
            detail=detail,
            tokens=result.tokens,
        )

    def _judged(self, error: Exception, group: PromptGroup, rollout_id: str) -> tuple[Reason | None, str]:
        """What the environment's failure makes of the rollout, and in words; None where the record says it. Raises
        RolloutError."""
        causes = list(explanations(error))
        if any(isinstance(cause, CallFailedError) for cause in causes):
            return None if self._call_failed(rollout_id) else Reason.CALL_FAILED, ""
        name = type(self._environment).__name__
        what = str(error) if isinstance(error, BadResult) else f"rollout() raised {type(error).__name__}: {error}"
        failure = f"environment {name}, prompt {group.prompt.id!r}, rollout {rollout_id}: {what}"
        fatal = self._failures.spend(failure, refused=any(isinstance(cause, CallRefused) for cause in causes))
        if fatal:
            raise RolloutError(f"{failure} ({fatal})") from error
        return Reason.ENVIRONMENT_FAILED, what

    def _call_failed(self, rollout_id: str) -> bool:
        """Whether the record says that a call failed where the rollout may have been meant to end."""
        return any(r.reason is Reason.CALL_FAILED for r in self._ledger.receipt(rollout_id).rejections)

    async def _rollout(self, context: InLoopContext, group: PromptGroup) -> object:
        return await self._environment.rollout(context, group.prompt)

    def _checked(self, result: object) -> RolloutResult:
        """Raises BadResult."""
        if not isinstance(result, RolloutResult):
            raise BadResult(f"rollout() returned {result!r}; it must return a RolloutResult")
        for name, value in {
            "reward": result.reward,
            **{f"metrics[{k!r}]": v for k, v in result.metrics.items()},
        }.items():
            # numpy's scalars are such numbers too.
            # No comparison holds of NaN.
            if not isinstance(value, Real) or not abs(value) <= LARGEST_REWARD:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise BadResult(
                    f"{name} is {value!r}; it must be a finite number of at most {LARGEST_REWARD:g} in size. Mend "
                    "the environment's scoring"
                )
        for name, kind in (("scored", str), ("tokens", Tokens)):
            value: object = getattr(result, name)
            if value is not None and not isinstance(value, kind):
                raise BadResult(f"{name} is {value!r:.200}; it must be None or a {kind.__name__}")
        if result.tokens is not None and not self._echo:
            raise BadResult(
                "rollout() returned tokens, but token_capture.enabled is true: those that the engine sampled are "
                "trained. Leave RolloutResult.tokens out, or set token_capture.enabled: false"
            )
        return result
