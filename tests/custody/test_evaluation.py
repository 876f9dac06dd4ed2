"""An evaluation plays held-out prompts as all others are played, and leaves nothing behind but its report."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import anyio
import pytest

from controller.config.problems import ConfigError
from controller.config.schema import EvaluationConfig
from controller.evaluation import HeldOutLeak, draw_held_out, is_held_out, without_held_out
from controller.player import RolloutError
from controller.reporting.evaluation_report import EvaluationReport
from controller.rollout_pump import group_id_of
from dataplane.schema import TRAIN
from ledger.account import Account
from ledger.events import GroupDispatched, GroupEvaluated, MemoryLog, RolloutAborted, RolloutFinalized
from ledger.http.bodies import ChatBody
from ledger.http.sampling import SamplingRules
from ledger.reasons import Reason
from ledger.records import CallRequest, Sampling
from tests.custody.rig import House
from tests.custody.tokenizers import saved
from workers.environments.base import Prompt, RolloutContext, RolloutResult
from workers.rpc.errors import HandlerError, RemoteError

pytestmark = pytest.mark.anyio

HANG_GUARD_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tokenizer"), "newlines")


class Scored:
    """Each sample of question n is worth n, less the sample's number; the most that was played at a time is kept."""

    def __init__(self) -> None:
        self.playing = self.most = 0

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return (Prompt(id=f"t{seed}-{i}", data={"word": f"t{i}"}) for i in range(100))

    def held_out(self, seed: int) -> Iterator[Prompt]:
        return (Prompt(id=f"h{i}", data={"word": f"h{seed + i}"}) for i in range(6))

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        self.playing += 1
        self.most = max(self.most, self.playing)
        try:
            await ctx.chat([{"role": "user", "content": prompt.data["word"]}])
        finally:
            self.playing -= 1
        number = int(prompt.id.removeprefix("h"))
        return RolloutResult(reward=number - int(ctx.rollout_id.rpartition(".")[2]), metrics={"even": (number + 1) % 2})


class Hangs(Scored):
    """The last question is never answered."""

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        result = await super().rollout(ctx, prompt)
        if prompt.id == "h3":
            await anyio.sleep_forever()
        return result


def questions(n: int = 4) -> tuple[Prompt, ...]:
    return draw_held_out(Scored(), EvaluationConfig(questions=n))


def house(folder: Path, environment: Scored | None = None, samples: int = 2, **options: Any) -> House:
    config = EvaluationConfig(questions=4, samples=samples, every_steps=options.pop("every_steps", None))
    environment = environment or Scored()
    return House(folder, environment=environment, evaluation=config, questions=questions(), **options)


async def evaluate(house: House) -> None:
    with anyio.fail_after(HANG_GUARD_S):
        async with anyio.create_task_group() as tg:
            tg.start_soon(house.finalizers.run)
            await house.evaluator.evaluate()
            tg.cancel_scope.cancel()


async def test_it_reports_what_was_played_and_leaves_no_row_and_no_account(folder: Path):
    environment = Scored()
    rig = house(folder, environment)
    await evaluate(rig)
    (report,) = rig.evaluations
    assert (report.step, report.questions, report.samples, report.rejected) == (0, 4, 2, 0)
    assert report.reward_mean == pytest.approx(1.0)
    assert report.reward_best == pytest.approx(1.5)
    assert report.reward_error == pytest.approx(0.6454972)  # of -0.5, 0.5, 1.5 and 2.5
    assert report.environment == {"even": 0.5}
    assert report.oldest_version == 0
    assert environment.most <= 4, "no more at a time than there are places"
    assert rig.ledger.account == Account()
    assert await rig.plane.keys(TRAIN) == []
    assert await rig.staged() == []
    assert (rig.evaluator.played, rig.evaluator.remaining, rig.evaluator.playing) == (8, 0, 0)
    assert rig.finalizers.committed == 0


async def test_every_rollout_of_it_is_on_record_as_held_out_and_verified(folder: Path):
    rig = house(folder)
    await evaluate(rig)
    assert isinstance(rig.log, MemoryLog)
    dispatched = [e for e in rig.log.events if isinstance(e, GroupDispatched)]
    finalized = [e for e in rig.log.events if isinstance(e, RolloutFinalized)]
    evaluated = [e for e in rig.log.events if isinstance(e, GroupEvaluated)]
    assert all(e.held_out for e in dispatched)
    assert {e.group_id for e in dispatched} == {e.group_id for e in evaluated}
    assert [e.reason for e in finalized] == [None] * 8
    assert rig.ledger.last_group == "", "the numbers of training groups go on without it"
    assert all(is_held_out(e.rollout_id) for e in finalized)
    assert not is_held_out(group_id_of(3))


async def test_a_rollout_that_times_out_counts_with_reward_0_as_unproven(folder: Path):
    rig = house(folder, Hangs(), rollout_timeout_s=0.3)
    await evaluate(rig)
    (report,) = rig.evaluations
    assert report.rejected == 2
    assert report.reward_mean == pytest.approx((-0.5 + 0.5 + 1.5 + 0) / 4)
    reasons = [e.reason for e in rig.log.events if isinstance(e, RolloutFinalized)]  # type: ignore[attr-defined]
    assert sorted(map(str, reasons)) == ["None"] * 6 + [str(Reason.ROLLOUT_TIMEOUT)] * 2
    assert rig.finalizers.rejections == {}, "what is not trained in any case was not lost to training"


async def test_cancelled_it_reports_nothing_and_its_rollouts_are_ended_with_the_run(folder: Path):
    rig = house(folder, Hangs())
    with anyio.fail_after(HANG_GUARD_S):
        async with anyio.create_task_group() as tg:
            tg.start_soon(rig.finalizers.run)
            tg.start_soon(rig.evaluator.evaluate)
            while rig.evaluator.remaining != 2:
                await anyio.sleep(0.01)
            tg.cancel_scope.cancel()
    assert rig.evaluations == []
    await rig.ledger.give_up("stopped")
    assert rig.ledger.entries() == []
    assert rig.ledger.account == Account()
    aborted = [e for e in rig.log.events if isinstance(e, RolloutAborted)]  # type: ignore[attr-defined]
    assert {e.rollout_id for e in aborted} >= {"e000000.3.0", "e000000.3.1"}


async def test_a_call_that_was_lost_is_made_again_and_what_it_staged_is_cleared(folder: Path):
    rig = house(folder)

    def lose(request: CallRequest) -> bool:
        if request.attempt == 0 and request.rollout_id == "e000000.1.0":
            raise RemoteError(HandlerError("staging_failed", "no answer, and yet staged", retryable=True).failure)
        return False

    rig.client.lose = lose
    await evaluate(rig)
    (report,) = rig.evaluations
    assert report.rejected == 0
    assert report.reward_mean == pytest.approx(1.0)
    assert await rig.staged() == []


async def test_a_failing_environment_ends_it_with_the_prompt_in_the_message(folder: Path):
    class Fails(Scored):
        async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
            raise LookupError("mine")

    with pytest.raises(BaseExceptionGroup) as caught:
        await evaluate(house(folder, Fails()))
    assert caught.group_contains(RolloutError, match=r"environment Fails, prompt 'h\d', rollout e000000.*LookupError")


def recorded(*steps: int) -> list[EvaluationReport]:
    return [
        EvaluationReport(
            step=step,
            time=0.0,
            seconds=1.0,
            questions=1,
            samples=1,
            reward_mean=0.0,
            reward_error=None,
            reward_best=0.0,
            environment={},
            completion_length_mean=None,
            truncated_fraction=None,
        )
        for step in steps
    ]


def due(folder: Path, *done: int, every: int | None = None, steps: int = 5) -> list[int]:
    """The steps at which an evaluation is due, in a run that goes on from the last of those that are `done`."""
    rig = house(folder, recorded=recorded(*done), every_steps=every)
    found: list[int] = []
    rig.state.step = max(done, default=0)
    while rig.state.step <= steps:
        if rig.evaluator.due(last=rig.state.step == steps):
            found.append(rig.state.step)
            rig.evaluator._done.add(rig.state.step)
        rig.state.step += 1
    return found


def test_it_is_due_before_the_first_step_after_the_last_and_every_so_many_but_never_twice(folder: Path):
    assert due(folder) == [0, 5]
    assert due(folder, every=2) == [0, 2, 4, 5]
    assert due(folder, 0, 2, every=2) == [4, 5], "a resumed run does not repeat what is recorded"
    assert due(folder, 0, 5) == []
    assert not House(folder).evaluator.due(last=True), "without questions there is none"


def test_an_environment_without_held_out_prompts_is_named_with_a_remedy():
    class Without:
        pass

    class TooFew(Scored):
        def held_out(self, seed: int) -> Iterator[Prompt]:
            return islice(super().held_out(seed), 2)

    class Twice(Scored):
        def held_out(self, seed: int) -> Iterator[Prompt]:
            yield from (Prompt(id="same"), Prompt(id="same"))

    class Raises(Scored):
        def held_out(self, seed: int) -> Iterator[Prompt]:
            raise ValueError("share: is 0")

    class Strange(Scored):
        def held_out(self, seed: int) -> Iterator[Any]:
            return iter(["text"] * 3)

    for environment, message in (
        (Without(), r"environment Without offers no held-out prompts\n.*give it a method `held_out\(self, seed\)`"),
        (TooFew(), "3 > 2, all that environment TooFew holds out"),
        (Twice(), "yielded an id twice"),
        (Raises(), "environment Raises offers no held-out prompts: share: is 0"),
        (Strange(), "yielded 'text'"),
    ):
        with pytest.raises(ConfigError, match=rf"(?s)evaluation\.questions: .*{message}"):
            draw_held_out(environment, EvaluationConfig(questions=2 if environment.__class__ is Twice else 3))
    assert draw_held_out(Without(), EvaluationConfig()) == ()


def test_a_training_prompt_that_is_held_out_ends_the_run():
    held_out = questions()
    fresh = list(islice(Scored().prompts(0), 5))
    assert list(without_held_out(iter(fresh), held_out)) == fresh
    for leak in (Prompt(id=held_out[2].id, data="other"), Prompt(id="other", data=held_out[2].data)):
        leaking = without_held_out(iter([fresh[0], leak]), held_out)
        assert next(leaking) is fresh[0]
        with pytest.raises(HeldOutLeak, match=f"{leak.id!r} is held out"):
            next(leaking)


def test_calls_of_held_out_rollouts_over_http_have_a_sampling_of_their_own():
    run, greedy = (Sampling(max_tokens=8, temperature=t) for t in (1.0, 0.0))
    rules = SamplingRules(run, "fixed", lambda rollout_id: greedy if is_held_out(rollout_id) else None)
    body: Any = ChatBody(messages=[])
    assert rules.of("e000000.1.0", body).temperature == 0
    assert rules.of("g000000.1", body).temperature == 1
