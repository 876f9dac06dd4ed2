"""A process that is there to be killed: it writes a ledger's journal as fast as it can, and notes what was acknowledged.

Run as a module it forks such a process for each line on stdin, `FOLDER NOTES SEED HISTORY_BYTES`, and prints its pid, and
its end when it is killed. Notes go to a file, after the acknowledgement: what a killed process wrote is kept.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import anyio
import anyio.to_thread

from ledger.events import Event, encode
from ledger.journal import Journal
from ledger.ledger import Ledger
from tests.ledger.journal.histories import end_group, play_group
from tests.ledger.rig import Rig

PLAYERS = 6


class Noting:
    """An `EventLog` that notes what was acknowledged."""

    def __init__(self, journal: Journal, notes: int) -> None:
        self._journal = journal
        self._notes = notes

    async def append(self, event: Event) -> None:
        await self._journal.append(event)
        data = encode(event)
        os.write(self._notes, len(data).to_bytes(4, "little") + data)


async def write_until_killed(folder: Path, notes: Path, seed: int, history_bytes: int) -> None:
    journal, events = await Journal.open(folder, segment_bytes=8000, history_bytes=history_bytes)
    fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ledger = Ledger(Noting(journal, fd))
    await anyio.to_thread.run_sync(ledger.restore, events)
    await ledger.resumed(0)
    rig, rng = Rig(ledger=ledger), random.Random(seed)

    async def play(player: int) -> None:
        n = 0
        while True:
            group_id = f"{seed}-{player}-{n}"
            await play_group(rig, group_id, size=2, rng=rng)
            await end_group(rig, group_id, step=n, rng=rng)
            if rng.random() < 0.3:
                await ledger.checkpointed(n)
            n += 1

    async with anyio.create_task_group() as tg:
        for player in range(PLAYERS):
            tg.start_soon(play, player)


def main() -> None:
    for line in sys.stdin:
        folder, notes, seed, history_bytes = line.split()
        pid = os.fork()
        if pid == 0:
            anyio.run(write_until_killed, Path(folder), Path(notes), int(seed), int(history_bytes))
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.WTERMSIG(status) if os.WIFSIGNALED(status) else f'exit {status}'}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
