"""One chaos schedule on fakes, from its seed to its verdict.

    python -m tests.chaos.campaign [SEED ...] [--first N --count M]

plays schedules apart from the test suite, and prints what became of each.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import time
from collections import Counter

import anyio

from ledger.events import Event, MemoryLog
from tests.chaos.checks import Watch, hold_at_event, hold_at_the_end, hold_when_undisturbed
from tests.chaos.faults import inflict
from tests.chaos.schedule import Schedule, schedule_of
from tests.fakes.clock import VirtualLoop, run_virtually
from tests.fakes.environment import Talker
from tests.fakes.house import FakeHouse, Speed, open_house

BUSIEST_MS = 10.0
"""Of processor time in one turn of the loop, the fakes' own work included. A turn is many calls, of 5 ms each at most."""
LONGEST_S = 3600.0


class WatchedLog(MemoryLog):
    """Has the house looked at with each event."""

    def __init__(self) -> None:
        super().__init__()
        self.house: FakeHouse | None = None

    async def append(self, event: Event) -> None:
        if self.house is not None:
            hold_at_event(self.house)
        await super().append(event)


async def play(schedule: Schedule) -> FakeHouse:
    """Play it, and check all along and at the end."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    log = WatchedLog()
    talker = Talker(200, turns=schedule.turns, think_s=0.5, naughty=schedule.naughty, seed=schedule.seed)
    async with open_house(schedule.config, talker, speed=Speed(token=0.05), seed=schedule.seed, log=log) as house:
        log.house = house
        watch = Watch(house)
        loop.when_idle(watch.idle)
        async with anyio.create_task_group() as tg:
            tg.start_soon(inflict, house, schedule)
            with anyio.fail_after(LONGEST_S):
                await house.play()
            tg.cancel_scope.cancel()
        watch.ended()
    hold_at_the_end(house)
    if not schedule.faults:
        hold_when_undisturbed(house)
    if house.error is None:
        assert house.run.state.step == schedule.config.run.steps
    else:
        named = type(house.error).__name__
        assert named in schedule.may_end_with, f"the run ended with {named}: {house.error}"
    assert loop.busiest_ms <= BUSIEST_MS, f"one turn of the loop took {loop.busiest_ms:.1f} ms"
    house.turns = loop
    return house


def played(seed: int) -> FakeHouse:
    """Raises what is wrong, with the schedule as a note."""
    schedule = schedule_of(seed)
    # As the controller does: a collection over all that was there before would keep the loop.
    gc.collect()
    gc.freeze()
    try:
        return run_virtually(play, schedule)
    except BaseException as error:
        error.add_note(f"{schedule}\nagain: python -m tests.chaos.campaign {seed}")
        raise
    finally:
        gc.unfreeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--log", action="store_true", help="show what is logged")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    if not arguments.log:
        logging.disable(logging.CRITICAL)
    ends: Counter[str] = Counter()
    for seed in [*arguments.seeds, *range(arguments.first, arguments.first + arguments.count)]:
        began = time.perf_counter()
        house = played(seed)
        end = "finished" if house.error is None else type(house.error).__name__
        ends[end] += 1
        rollouts, _ = house.run.accounts()
        print(f"{seed}: {end}, {rollouts}, {time.perf_counter() - began:.2f} s", flush=True)
    print(dict(ends))


if __name__ == "__main__":
    main()
