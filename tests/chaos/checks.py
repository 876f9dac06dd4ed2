"""What must hold of a run on fakes: while it goes on, whatever breaks, and at its end."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio
import numpy as np

from controller.buffer import GroupState
from dataplane.plane import Column
from dataplane.schema import STAGING
from ledger.events import GroupDispatched, GroupTrained, MemoryLog, RolloutFinalized
from tests.fakes.house import FakeHouse
from workers.generation.api import GENERATE
from workers.generation.engine import Generation

ENDING_S = 30.0
"""For what must be finished when a run is cancelled: a put or a clear under way, and then the sweep."""


class Watch:
    """Looks at a house all along. A run that ends takes a moment for it: its tasks end before its groups do."""

    def __init__(self, house: FakeHouse) -> None:
        self._house = house
        self._ending_since: float | None = None

    def idle(self) -> None:
        """Between two events, when every task waits: nothing that counts as taken is held by no one, or twice."""
        run, buffer = self._house.run, self._house.run.buffer
        hold_at_event(self._house)
        assert buffer.permits_in_use == len(buffer.entries)
        assert run.pool.outstanding == sum(worker.in_flight[GENERATE.name] for worker in self._house.workers)
        tasks = Counter(task.get_name().rpartition(".")[2] for task in asyncio.all_tasks())
        generating = sum(e.state is GroupState.GENERATING for e in buffer.entries)
        assert tasks["_play_group"] <= generating
        if tasks["_play_group"] < generating and self._ending_since is None:
            self._ending_since = anyio.current_time()

    def ended(self) -> None:
        if self._ending_since is not None:
            assert anyio.current_time() - self._ending_since < ENDING_S


def hold_at_event(house: FakeHouse) -> None:
    buffer, account = house.run.buffer, house.run.ledger.account
    # A reservation has its permit one turn of the loop before it has its entry.
    assert buffer.permits_in_use - len(buffer.entries) in (0, 1)
    assert buffer.permits_in_use <= buffer.capacity
    assert account.lost == account.duplicated == 0, account


def hold_at_the_end(house: FakeHouse) -> None:
    """Conservation, an empty house, and nothing trained that was not sampled so, or twice."""
    run = house.run
    rollouts, groups = run.accounts()
    for accounts in (rollouts, groups):
        assert accounts.dispatched == accounts.trained + accounts.evicted + accounts.dropped + accounts.aborted
        assert accounts.lost == accounts.duplicated == 0
    assert run.ledger.account.live == 0
    assert not run.buffer.entries
    assert run.buffer.permits_in_use == 0
    assert (run.pool.outstanding, run.pool.waiting) == (0, 0)
    assert house.environment.playing == 0
    assert not house.left, f"rows are left: {house.left}"
    assert not house.trained.twice
    on_record = trained_by_record(house)
    trained = {key.partition("/")[0] for key in house.trained.rows}
    if house.error is None:
        assert on_record == trained
    else:
        # An optimizer step whose end was not heard of is in the trainer's state, and not in the record.
        assert on_record <= trained
    for key, row in house.trained.rows.items():
        require_proof(house, key, row)


def hold_when_undisturbed(house: FakeHouse) -> None:
    """When nothing went wrong, only rollouts that were not finalized any more have rows for the sweep."""
    log = house.log
    assert isinstance(log, MemoryLog)
    finalized = {event.rollout_id for event in log.events if isinstance(event, RolloutFinalized)}
    staged = {key.partition("/")[0] for key in house.before_sweep.get(STAGING, ())}
    assert not staged & finalized


def trained_by_record(house: FakeHouse) -> set[str]:
    """The rollouts that the ledger holds to be trained."""
    log = house.log
    assert isinstance(log, MemoryLog)
    members: dict[str, set[str]] = {}
    verified: set[str] = set()
    found: set[str] = set()
    for event in log.events:
        match event:
            case RolloutFinalized(reason=None):
                verified.add(event.rollout_id)
            case GroupDispatched():
                members[event.group_id] = set(event.rollout_ids)
            case GroupTrained():
                found |= {r for r in verified if r.partition(".")[0] == event.group_id}
            case _:
                pass
    return found


def require_proof(house: FakeHouse, key: str, row: dict[str, Column]) -> None:
    """Every loss token was emitted by an engine, at that place, with that logprob and under that version."""
    ids: list[int] = row["input_ids"].tolist()
    sampled = house.emitted[key.partition("/")[0]]
    assert any([*prompt, *generation.token_ids] == ids for prompt, generation in sampled), (
        f"{key}: no such conversation"
    )
    proven: set[int] = set()
    for prompt, generation in sampled:
        if ids[: len(prompt)] == prompt and ids[len(prompt) :][: len(generation.token_ids)] == generation.token_ids:
            proven |= _proven(row, len(prompt), generation)
    loss = set(np.flatnonzero(row["loss_mask"]).tolist())
    assert loss
    assert loss <= proven, f"{key}: nobody sampled tokens {sorted(loss - proven)} so"


def _proven(row: dict[str, Column], start: int, generation: Generation) -> set[int]:
    versions = {i: span.version for span in generation.weight_spans for i in range(span.start, span.end)}
    return {
        start + i
        for i, logprob in enumerate(generation.logprobs)
        if row["rollout_logprobs"][start + i] == np.float32(logprob)
        and row["weight_versions"][start + i] == versions[i]
    }
