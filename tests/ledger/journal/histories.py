"""Real histories to write and to damage: rollouts played by the rig, with every kind of call, verdict and end."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import anyio

from ledger.errors import LedgerError
from ledger.events import Event, MemoryLog
from ledger.ledger import Ledger
from ledger.lineage import fingerprint
from ledger.reasons import CallFailure, Reason
from tests.ledger.rig import Rig
from tests.ledger.worker import assistant, user


async def play_group(rig: Rig, group_id: str, *, size: int, rng: random.Random) -> None:
    """Play a group's rollouts at the same time; they are verified, rejected or aborted, each in its way."""
    rollouts = [f"{group_id}.{i}" for i in range(size)]
    held_out = group_id.startswith("e")
    await rig.ledger.dispatched(group_id, f"prompt of {group_id}", rollouts, rng.randint(0, 3), held_out=held_out)
    async with anyio.create_task_group() as tg:
        for rollout_id in rollouts:
            tg.start_soon(_play_rollout, rig, rollout_id, group_id, random.Random(rng.random()))


async def end_group(rig: Rig, group_id: str, *, step: int, rng: random.Random) -> None:
    if rng.random() < 0.7:
        await rig.ledger.committed(group_id)
        await rig.ledger.trained(group_id, step)
    else:
        await rng.choice([rig.ledger.dropped, rig.ledger.aborted, rig.ledger.evicted])(group_id, "told to")


async def _play_rollout(rig: Rig, rollout_id: str, group_id: str, rng: random.Random) -> None:
    ledger = rig.ledger
    await ledger.open(rollout_id, group_id)
    match rng.randrange(6):
        case 0:
            await rig.turns("a", rollout_id=rollout_id)
            await ledger.abort(rollout_id, "told to")
            if rng.random() < 0.5:
                await ledger.replaced(group_id, rollout_id, f"{rollout_id}r1")
                await _play_rollout(rig, f"{rollout_id}r1", group_id, rng)
            return
        case 1:
            replies = await rig.turns("a", "b", rollout_id=rollout_id)
            await ledger.declare_terminal(rollout_id, replies[rng.randrange(2)].coords.call_id)
        case 2:
            await rig.turns("a", rollout_id=rollout_id)
            await rig.chat(user("a"), assistant("never said"), user("b"), rollout_id=rollout_id)
        case 3:
            admission = await ledger.admit(rollout_id, fingerprint([user("lost")]))
            await ledger.fail(admission.call_id, rng.choice(list(CallFailure)), "told to")
        case _:
            await rig.turns(*"abcd"[: rng.randint(1, 4)], rollout_id=rollout_id)
    receipt = await ledger.seal(rollout_id, rng.choice([None, None, None, Reason.ROLLOUT_TIMEOUT]))
    staged_rows_say = rng.choice([None, None, Reason.MISSING_ROW])
    await ledger.finalize(rollout_id, receipt.reason or staged_rows_say, "told to")


@cache
def history(groups: int = 3, *, live: int = 1, seed: int = 0) -> tuple[Event, ...]:
    """The events of some groups that end, with a checkpoint after each, and of `live` that have not ended; of a held-out
    group too."""
    log = MemoryLog()

    async def play() -> None:
        rig, rng = Rig(log), random.Random(seed)
        for n in range(groups + live):
            await play_group(rig, f"g{n}", size=3, rng=rng)
            if n < groups:
                await end_group(rig, f"g{n}", step=n, rng=rng)
                if n == 0:
                    await play_group(rig, "e0", size=2, rng=rng)
                    await rig.ledger.evaluated("e0", 1)
                await rig.ledger.checkpointed(n + 1)

    with ThreadPoolExecutor(1) as thread:  # A test may have a loop in this one.
        thread.submit(anyio.run, play).result()
    return tuple(log.events)


def standing(events: Iterable[Event]) -> dict[str, Any]:
    """All that a ledger restored from these events goes on from."""
    ledger = Ledger(MemoryLog())
    rollouts: set[str] = set()
    for event in events:
        ledger.restore((event,))
        rollouts.add(getattr(event, "rollout_id", ""))
    receipts: dict[str, Any] = {}
    for rollout_id in sorted(rollouts):
        try:
            receipts[rollout_id] = ledger.receipt(rollout_id)
        except LedgerError:
            continue
    return {"account": ledger.account, "last group": ledger.last_group, "open": receipts}
