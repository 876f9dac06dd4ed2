"""The finalizer group: whatever the data plane does to a group's rows, what is proven is trained and nothing else, the
others are placeholders with the right code and no share in any baseline, and no row is left behind."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import get_args

import anyio
import numpy as np
import pytest

from controller.advantages import Estimator
from controller.finalizer import CustodyFailed
from controller.staged import READ_DEADLINES, StagedCleaner
from dataplane.errors import DataPlaneDown, DataPlaneError, RowGone
from dataplane.schema import STAGING, TRAIN
from ledger.events import GroupDropped, MemoryLog
from ledger.reasons import Reason
from ledger.receipts import Receipt
from tests.custody.planes import FaultyPlane, late
from tests.custody.rig import House, system, user
from tests.custody.tokenizers import saved
from workers.generation.rendering import ChatRenderer
from workers.training.api import LossSpec

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return ChatRenderer.load(saved(tmp_path_factory.mktemp("tokenizer"), "newlines"))


@pytest.fixture
def plane() -> FaultyPlane:
    return FaultyPlane()


@pytest.fixture
def house(renderer: ChatRenderer, plane: FaultyPlane) -> House:
    return House(Path(), renderer=renderer, plane=plane)


async def played(house: House, *turns: int, group_id: str = "g", **options) -> dict[str, list[str]]:
    """A group whose rollouts have so many turns; their staging keys by rollout id."""
    keys: dict[str, list[str]] = {}

    def rollout(n: int):
        async def play(rollout_id: str) -> None:
            replies = await house.turns(rollout_id, *["ab"] * n)
            keys[rollout_id] = [reply.coords.staging_key for reply in replies]

        return play

    await house.play(group_id, *map(rollout, turns), **options)
    return keys


def reasons(house: House) -> dict[str, str | None]:
    return {rollout_id: sample.reason for rollout_id, sample in house.samples().items()}


async def nothing_left(house: House) -> None:
    assert await house.plane.keys(STAGING) == []
    assert await house.plane.keys(TRAIN) == []


async def test_a_group_is_read_at_once_and_trained_and_leaves_nothing(house: House, plane: FaultyPlane):
    keys = await played(house, 1, 2, 3)
    await house.finalize()
    assert plane.gets[-1] == [key for rollout in keys.values() for key in rollout]
    counts, timings = house.finalizers.take_counts(), house.finalizers.take_timings()
    assert counts == counts | {"reads": 1, "rows_read": 6, "verified": 3, "rows_published": 3, "rows_cleared": 6}
    assert timings.keys() == {"fetch", "verify", "publish", "clear"}
    assert house.finalizers.take_counts() == {}
    await house.train()
    assert len(house.trainer.rows) == 3
    await nothing_left(house)


async def test_a_lost_row_costs_only_its_rollout(house: House, plane: FaultyPlane):
    keys = await played(house, 2, 2, 2, 2)
    await plane.clear(STAGING, [keys["g.1"][0], keys["g.3"][1]])
    await house.finalize()
    assert reasons(house) == {"g.0": None, "g.1": Reason.MISSING_ROW, "g.2": None, "g.3": Reason.MISSING_ROW}
    assert list(map(len, plane.gets)) == [8, 6], "one read of all, one of what is there"
    await house.train()
    await nothing_left(house)


@pytest.mark.parametrize("bad", [[0], [7], [0, 7], [3, 4, 12]])
async def test_a_row_that_spoils_its_read_costs_only_its_rollout(house: House, plane: FaultyPlane, bad: list[int]):
    keys = await played(house, *[1] * 16)
    flat = [key for rollout in keys.values() for key in rollout]
    plane.bad = {flat[i] for i in bad}
    plane.gets.clear()
    await house.finalize()
    expected = {f"g.{i}": Reason.MALFORMED_ROW if i in bad else None for i in range(16)}
    assert reasons(house) == expected
    assert len(plane.gets) <= 1 + 2 * 4 * len(bad), "halved again and again, not read one by one"
    await house.train()
    await nothing_left(house)


async def test_rows_that_the_plane_names_are_read_apart(house: House, plane: FaultyPlane):
    keys = await played(house, *[1] * 16)
    await plane.clear(STAGING, keys["g.5"])
    await plane.put(STAGING, {keys["g.5"][0]: {"token_ids": np.arange(3)}})
    plane.gets.clear()
    await house.finalize()
    assert {r for r, reason in reasons(house).items() if reason} == {"g.5"}
    assert reasons(house)["g.5"] is Reason.MALFORMED_ROW
    assert sorted(map(len, plane.gets)) == [1, 15, 16]


async def test_a_read_without_an_answer_is_tried_again_in_halves(house: House, plane: FaultyPlane):
    await played(house, *[1] * 8)
    plane.gets.clear()
    plane.fail = late("get", STAGING, READ_DEADLINES - 1)
    await house.finalize()
    assert set(reasons(house).values()) == {None}
    assert [len(keys) for keys in plane.gets] == [8, 4, 2, 2, 4]
    await house.train()
    await nothing_left(house)


async def test_a_plane_that_never_answers_costs_the_group_and_not_the_run(house: House, plane: FaultyPlane):
    await played(house, 1, 1, group_id="a")
    await played(house, 1, 1, group_id="b")
    plane.gets.clear()
    plane.fail = late("get", STAGING, READ_DEADLINES)
    await house.finalize()
    assert house.finalizers.rejections == {Reason.ROWS_UNAVAILABLE: 2}
    assert len(house.samples()) == 2, "the other group is trained"
    await house.train()
    await nothing_left(house)


async def test_an_error_of_the_plane_without_a_name_is_halved_too(house: House, plane: FaultyPlane):
    keys = await played(house, 1, 1, 1)
    plane.gets.clear()

    def fail(operation: str, partition: str, asked) -> None:
        if operation == "get" and keys["g.1"][0] in asked:
            raise DataPlaneError("get failed in TransferQueue: who knows")

    plane.fail = fail
    await house.finalize()
    assert reasons(house) == {"g.0": None, "g.1": Reason.ROWS_UNAVAILABLE, "g.2": None}


async def test_a_plane_that_is_down_ends_the_run(house: House, plane: FaultyPlane):
    await played(house, 1, 1)

    def fail(operation: str, partition: str, keys) -> None:
        raise DataPlaneDown("the servers are gone")

    plane.fail = fail
    with pytest.raises(ExceptionGroup) as error:
        await house.finalize()
    assert error.group_contains(DataPlaneDown)


async def test_rows_that_are_not_taken_in_time_are_put_again(house: House, plane: FaultyPlane):
    await played(house, 1, 1)
    plane.fail = late("put", TRAIN, 2)
    await house.finalize()
    assert house.finalizers.take_counts()["puts_timed_out"] == 2
    await house.train()
    assert len(house.trainer.rows) == 2
    await nothing_left(house)


async def test_rows_that_are_never_taken_make_placeholders(house: House, plane: FaultyPlane):
    await played(house, 1, 1, group_id="a")
    plane.fail = late("put", TRAIN, 3)
    await house.finalize()
    assert house.finalizers.rejections == {Reason.NOT_PUBLISHED: 2}
    assert house.samples() == {}
    await nothing_left(house)


async def test_rows_that_are_not_cleared_in_time_are_cleared_with_the_next_group(house: House, plane: FaultyPlane):
    await played(house, 2, group_id="a")
    await played(house, 1, group_id="b")
    plane.fail = late("clear", STAGING, 1)
    await house.finalize()
    assert await plane.keys(STAGING) == []


async def test_what_unanswered_calls_staged_is_cleared_even_when_it_comes_late():
    plane, now = FaultyPlane(), 0.0
    cleaner = StagedCleaner(plane, Counter(), late_after_s=60, clock=lambda: now)

    def receipt(rollout_id: str, *, orphans: bool) -> Receipt:
        return Receipt(
            rollout_id=rollout_id,
            version=1,
            head="",
            trajectory="terminal",
            terminal=None,
            selection=None,
            chain=(),
            branches=(),
            rejections=(),
            staging_keys=(),
            orphans=(f"{rollout_id}/0",) if orphans else (),
        )

    row = {"token_ids": np.arange(2)}
    await plane.put(STAGING, {"g.0/0-11111111": row, "g.00/0-11111111": row})
    await cleaner.clear([receipt("g.0", orphans=True)])
    assert await plane.keys(STAGING) == ["g.00/0-11111111"], "another rollout's rows are its own"
    await plane.put(STAGING, {"g.0/0-22222222": row})
    now = 59.0
    await cleaner.clear([receipt("h.0", orphans=False)])
    assert "g.0/0-22222222" in await plane.keys(STAGING)
    now = 61.0
    await cleaner.clear([receipt("h.1", orphans=True)])
    assert await plane.keys(STAGING) == ["g.00/0-11111111"]
    plane.fail = late("keys", STAGING, 1)
    await plane.put(STAGING, {"h.1/0-22222222": row})
    now = 122.0
    await cleaner.clear([receipt("h.2", orphans=False)])
    now = 183.0
    await cleaner.clear([])
    assert await plane.keys(STAGING) == ["g.00/0-11111111"]


async def test_a_group_without_any_proven_rollout_is_dropped(house: House, plane: FaultyPlane):
    keys = await played(house, 1, 1)
    await plane.clear(STAGING, [key for rollout in keys.values() for key in rollout])
    await house.finalize()
    assert house.samples() == {}
    assert isinstance(house.log, MemoryLog)
    (dropped,) = [event for event in house.log.events if isinstance(event, GroupDropped)]
    assert dropped.reason == Reason.NO_VALID_ROLLOUT
    assert (house.ledger.account.dropped, house.ledger.account.live) == (2, 0)
    await nothing_left(house)


ON_FAILURE = {"placeholder": {"g.0", "g.2"}, "drop_group": set()}


@pytest.mark.parametrize("on_failure", ON_FAILURE)
async def test_what_a_failure_of_custody_costs_is_configured(renderer: ChatRenderer, plane: FaultyPlane, on_failure):
    house = House(Path(), renderer=renderer, plane=plane, on_failure=on_failure)
    keys = await played(house, 1, 1, 1)
    await plane.clear(STAGING, keys["g.1"])
    await house.finalize()
    assert {r for r, sample in house.samples().items() if sample.valid} == ON_FAILURE[on_failure]
    if on_failure == "drop_group":
        assert isinstance(house.log, MemoryLog)
        (dropped,) = [event for event in house.log.events if isinstance(event, GroupDropped)]
        assert dropped.reason == Reason.MISSING_ROW
        await nothing_left(house)


async def test_a_failure_of_custody_can_end_the_run(renderer: ChatRenderer, plane: FaultyPlane):
    house = House(Path(), renderer=renderer, plane=plane, on_failure="abort")
    keys = await played(house, 1, 1)
    await plane.clear(STAGING, keys["g.1"])
    with pytest.raises(ExceptionGroup) as error:
        await house.finalize()
    assert error.group_contains(CustodyFailed, match=r"rollout 'g\.1' cannot be trained: missing_row")
    assert await plane.keys(TRAIN) == []


@pytest.mark.parametrize("on_failure", ["drop_group", "abort"])
async def test_rollouts_that_came_to_no_good_end_are_placeholders_all_the_same(renderer: ChatRenderer, on_failure):
    house = House(Path(), renderer=renderer, on_failure=on_failure)
    await played(house, 1, 0, 1, failures=[None, None, Reason.ROLLOUT_TIMEOUT])
    await house.finalize()
    assert reasons(house) == {"g.0": None, "g.1": Reason.NO_CALLS, "g.2": Reason.ROLLOUT_TIMEOUT}


REWARDS = [1.0, 0.0, 5.0, -3.0, 0.5]
PLACEHOLDERS = {2, 3}


@pytest.mark.parametrize("estimator", [e for e in get_args(Estimator) if e != "opo"])  # Other rollouts, other lengths.
async def test_a_placeholder_keeps_its_reward_out_of_every_baseline(renderer: ChatRenderer, estimator: Estimator):
    """A group with two placeholders trains exactly as the group without them."""

    async def advantages(rewards: list[float], lost: set[int]) -> list[float]:
        plane = FaultyPlane()
        house = House(Path(), renderer=renderer, plane=plane, estimator=estimator)
        keys = await played(house, *[1] * len(rewards), rewards=rewards)
        await plane.clear(STAGING, [key for i in lost for key in keys[f"g.{i}"]])
        await house.finalize()
        assert [s.reward for s in house.samples().values()] == rewards
        await house.train()
        await nothing_left(house)
        return [row.advantage for row in sorted(house.trainer.rows, key=lambda row: row.key)]

    valid = [reward for i, reward in enumerate(REWARDS) if i not in PLACEHOLDERS]
    assert await advantages(REWARDS, PLACEHOLDERS) == pytest.approx(await advantages(valid, set()))
    whole = await advantages(REWARDS, set())
    assert whole != pytest.approx(await advantages(valid, set()))


@pytest.mark.parametrize("credit", ["equal", "per_token", "per_branch"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
async def test_all_conversations_of_a_rollout_are_trained_with_its_advantage(
    renderer: ChatRenderer, credit, aggregation
):
    house = House(
        Path(), renderer=renderer, trajectory="branches", credit=credit, loss=LossSpec(aggregation=aggregation)
    )
    calls: dict[str, dict[str, str | None]] = {}

    async def many(rollout_id: str) -> None:
        (first,) = await house.turns(rollout_id, "ab")
        await house.chat(rollout_id, user("ab"), first.message, user("left"))
        await house.chat(rollout_id, user("ab"), first.message, user("right"))
        await house.chat(rollout_id, system("help"), user("x"))
        calls[rollout_id] = {f"{rollout_id}/{i}": f"{rollout_id}/0" if i in (1, 2) else None for i in range(4)}

    async def one(rollout_id: str) -> None:
        await house.turns(rollout_id, "ab", "ok")
        calls[rollout_id] = {f"{rollout_id}/0": None, f"{rollout_id}/1": f"{rollout_id}/0"}

    await house.play("g", many, one, rewards=[1.0, 0.0])
    await house.finalize()
    samples = house.samples()
    assert [sample.keys for sample in samples.values()] == [["g.0", "g.0/2", "g.0/3"], ["g.1"]]
    tokens = {
        rollout_id: house.proves(sample, await house.rows(sample), calls[rollout_id])
        for rollout_id, sample in samples.items()
    }
    assert tokens == {r: sum(len(house.engine.emitted[c].token_ids) for c in calls[r]) for r in calls}
    await house.train()
    (begun,) = house.trainer.begun
    assert (begun.sequences, begun.loss_tokens) == (4, sum(tokens.values()))
    rows = {row.key: row for row in house.trainer.rows}
    assert len({rows[key].advantage for key in samples["g.0"].keys}) == 1
    assert rows["g.0"].advantage == -rows["g.1"].advantage > 0
    if credit == "per_branch":
        assert {row.weight for row in rows.values()} == {1.0}
    elif aggregation == "sequence_mean":
        # Weight over rows times row means: one rollout counts as much as the other.
        assert sum(rows[key].weight for key in samples["g.0"].keys) == pytest.approx(rows["g.1"].weight)
    account = house.ledger.account
    assert (account.dispatched, account.trained, account.lost, account.duplicated) == (2, 2, 0, 0)
    await nothing_left(house)


async def test_a_branch_that_is_not_proven_costs_only_itself(renderer: ChatRenderer, plane: FaultyPlane):
    house = House(Path(), renderer=renderer, plane=plane, trajectory="branches")
    (rollout_id,) = await house.dispatch("g", 1)
    main = await house.turns(rollout_id, "ab", "ok")
    helper = await house.chat(rollout_id, system("help"), user("x"))
    await house.ledger.declare_terminal(rollout_id, main[-1].coords.call_id)
    plane.bad = {helper.coords.staging_key}
    await house.end("g", [rollout_id])
    await house.finalize()
    (sample,) = house.samples().values()
    assert sample.keys == ["g.0"]
    assert house.finalizers.take_counts()["conversations_left_out"] == 1
    await house.train()
    await nothing_left(house)


async def test_evicted_groups_leave_no_row_of_any_branch(renderer: ChatRenderer):
    house = House(Path(), renderer=renderer, trajectory="branches")

    async def two(rollout_id: str) -> None:
        await house.turns(rollout_id, "ab")
        await house.turns(rollout_id, "ok")

    await house.play("g", two)
    await house.finalize()
    assert await house.plane.keys(TRAIN) == ["g.0", "g.0/1"]
    house.state.step = 5000
    await house.pump._evict()
    await nothing_left(house)


async def test_a_cancelled_publication_leaves_all_rows_or_none(renderer: ChatRenderer):
    class Slow(FaultyPlane):
        async def put(self, partition, rows, *, timeout=None):
            await super().put(partition, rows)
            if partition == TRAIN:
                await anyio.sleep(0.05)

    plane = Slow()
    house = House(Path(), renderer=renderer, plane=plane)
    await played(house, 1, 1)
    with anyio.move_on_after(0.02):
        await house.finalizers.run()
    assert await plane.keys(TRAIN) == []


async def test_a_row_gone_without_a_name_ends_in_halves(house: House, plane: FaultyPlane):
    """An error that names rows of others must not loop for ever."""
    await played(house, 1, 1)

    def fail(operation: str, partition: str, keys) -> None:
        if operation == "get" and "g.1/0" in "".join(keys):
            raise RowGone("no such row", partition=partition, keys=["another"])

    plane.fail = fail
    await house.finalize()
    assert reasons(house) == {"g.0": None, "g.1": Reason.ROWS_UNAVAILABLE}
