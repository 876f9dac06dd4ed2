"""A rollout that machinery lost is played again under another id, within budgets; what failed by itself is not."""

from __future__ import annotations

from typing import Any

import pytest

from controller.config.schema import FailuresConfig
from controller.generation_pool import CallTrouble
from controller.player import Player
from controller.records import PlayedRollout, PromptGroup
from controller.redispatch import MachineryFails, RedispatchBudget
from ledger.account import Account
from ledger.errors import CallFailedError
from ledger.events import MemoryLog, RolloutReplaced
from ledger.ledger import Ledger
from ledger.lineage import fingerprint
from ledger.reasons import CallFailure, Reason
from ledger.records import Message
from workers.environments.base import Prompt, RolloutResult

pytestmark = pytest.mark.anyio

GROUP = PromptGroup(group_id="g", prompt=Prompt(id="p"), start_version=0, rollout_ids=("g.0",))


class Context:
    terminal = None

    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id

    def close(self) -> None: ...


class Rig:
    """An environment that makes one call per rollout; the first `failing` ones fail, by machinery if `infra`."""

    def __init__(self, *, failing: int, infra: bool = True, returns: bool = False, **failures: Any) -> None:
        self.log = MemoryLog()
        self.ledger = Ledger(self.log)
        self.budget = RedispatchBudget(FailuresConfig(**failures))
        self.failing = failing
        self.returns = returns
        self.played: list[str] = []
        self.forgotten: list[str] = []
        trouble = CallTrouble(attempts_lost=True, lost="generation-0 died" if infra else "")
        make_context: Any = Context
        environment: Any = self
        self.player = Player(
            environment=environment,
            ledger=self.ledger,
            make_context=make_context,
            trouble=lambda rollout_id: trouble if len(self.played) <= self.failing else CallTrouble(),
            forget=self.forgotten.append,
            budget=self.budget,
            timeout_s=60.0,
        )

    async def rollout(self, ctx: Any, prompt: Prompt) -> RolloutResult:
        self.played.append(ctx.rollout_id)
        admission = await self.ledger.admit(ctx.rollout_id, fingerprint([Message(role="user", content="x")]))
        if len(self.played) <= self.failing:
            await self.ledger.fail(admission.call_id, CallFailure.GENERATION_FAILED, "told to")
            if self.returns:  # as an agent does that swallows its errors
                return RolloutResult(reward=0.0)
            try:
                raise CallFailedError(admission.call_id, CallFailure.GENERATION_FAILED, "told to")
            except CallFailedError as error:
                raise RuntimeError("the tool loop gave up") from error
        return RolloutResult(reward=1.0)

    async def play(self) -> PlayedRollout:
        await self.ledger.dispatched("g", "p", ["g.0"], 0)
        return await self.player.play(GROUP, "g.0")


@pytest.mark.parametrize("returns", [False, True])
async def test_a_lost_rollout_is_played_again_and_nothing_of_it_stays(returns: bool):
    rig = Rig(failing=2, returns=returns)
    played = await rig.play()
    assert (played.rollout_id, played.reward, played.failure) == ("g.0r2", 1.0, None)
    assert rig.played == rig.forgotten == ["g.0", "g.0r1", "g.0r2"]
    assert [r.orphans for r in played.lost] == [("g.0/0",), ("g.0r1/0",)], "their rows are cleared with the group"
    assert [(e.rollout_id, e.by) for e in rig.log.events if isinstance(e, RolloutReplaced)] == [
        ("g.0", "g.0r1"),
        ("g.0r1", "g.0r2"),
    ]
    assert rig.ledger.account == Account(dispatched=3, live=3)
    assert (rig.budget.lost, rig.budget.again) == (2, 2)


async def test_after_its_last_attempt_it_is_a_placeholder_with_the_record_of_why():
    rig = Rig(failing=9, rollout_attempts=2)
    played = await rig.play()
    assert played.rollout_id == "g.0r1"
    assert len(played.lost) == 1
    receipt = await rig.ledger.seal_once("g.0r1", played.failure)
    assert receipt.reason is Reason.CALL_FAILED
    assert "generation_failed" in receipt.rejections[0].detail


async def test_what_failed_through_its_own_fault_is_not_played_again():
    rig = Rig(failing=1, infra=False)
    played = await rig.play()
    assert (rig.played, played.rollout_id, played.lost) == (["g.0"], "g.0", ())
    assert (await rig.ledger.seal_once("g.0", played.failure)).reason is Reason.CALL_FAILED
    assert rig.budget.lost == 0


async def test_a_budget_that_is_used_up_leaves_placeholders():
    rig = Rig(failing=9, max_lost=1)
    assert (await rig.play()).rollout_id == "g.0r1"
    assert (rig.budget.lost, rig.budget.again) == (2, 1)


async def test_rollout_after_rollout_lost_ends_the_run():
    rig = Rig(failing=9, max_lost_in_a_row=2)
    with pytest.raises(MachineryFails, match=r"2 rollouts in a row were lost .*generation-0 died"):
        await rig.play()


def test_a_rollout_that_is_played_to_its_end_breaks_the_row():
    budget = RedispatchBudget(FailuresConfig(max_lost_in_a_row=2))
    for _ in range(5):
        budget.lose("r", 1, "why")
        budget.played()
    budget.lose("r", 1, "why")
    with pytest.raises(MachineryFails):
        budget.lose("r", 1, "why")
