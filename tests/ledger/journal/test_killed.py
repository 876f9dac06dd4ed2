"""kill -9 at 200 random points: what was acknowledged is there, the tail is repaired, and the next process goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from ledger.audit import audit
from ledger.events import Compacted, Event, GroupDispatched, GroupEnd, GroupEvent, RolloutEvent, decode, encode
from ledger.receipts import rebuild
from ledger.segments import current_files
from tests.ledger.journal.opened import events_in, opened

KILLS = 200
LIVES = 10
"""Of one journal: each process goes on where the one before was killed."""
MOST_NOTES = 60_000
"""Bytes."""


@pytest.fixture(scope="module")
def victims() -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ledger.journal.victim"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def killed_at(victims: subprocess.Popen[str], order: str, notes: Path, rng: random.Random) -> None:
    """Run a victim until a random moment: while it opens the journal, or after it has noted some more."""
    assert victims.stdin is not None
    assert victims.stdout is not None
    more = rng.choice([0, rng.randint(1, MOST_NOTES)])
    size = size_of(notes)
    victims.stdin.write(order + "\n")
    victims.stdin.flush()
    pid = int(victims.stdout.readline())
    deadline = time.monotonic() + 20
    while size_of(notes) < size + more and time.monotonic() < deadline:
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    assert victims.stdout.readline() == f"{signal.SIGKILL.value}\n"


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def noted(path: Path) -> list[Event]:
    """What the process knew to be acknowledged; the last note may be torn."""
    data, events = path.read_bytes() if path.exists() else b"", []
    while len(data) >= 4 and len(data) - 4 >= (size := int.from_bytes(data[:4], "little")):
        events.append(decode(data[4 : 4 + size]))
        data = data[4 + size :]
    return events


def check(events: list[Event], acknowledged: list[Event], ended: set[str]) -> None:
    """Every acknowledged event is there, apart from those of ended groups that were compacted, and can be read."""
    present = set(map(encode, events))
    compacted = isinstance(events[0], Compacted) if events else False
    groups = {e.group_id for e in events if isinstance(e, GroupDispatched)}
    for event in acknowledged:
        if encode(event) in present:
            continue
        assert compacted, f"{event} was acknowledged and is gone"
        if isinstance(event, RolloutEvent | GroupEvent):
            group_id = event.group_id if isinstance(event, GroupEvent) else event.rollout_id.rpartition(".")[0]
            assert group_id in ended - groups, f"{event} was acknowledged and is gone"
    by_rollout: dict[str, list[RolloutEvent]] = {}
    for event in events:
        if isinstance(event, RolloutEvent):
            by_rollout.setdefault(event.rollout_id, []).append(event)
    for rollout in by_rollout.values():
        rebuild(rollout)


@pytest.mark.slow
@pytest.mark.parametrize("history_bytes", [1 << 30, 20_000], ids=["everything kept", "compacted"])
def test_a_killed_process_loses_nothing_that_was_acknowledged(
    victims: subprocess.Popen[str], tmp_path: Path, history_bytes: int
):
    rng = random.Random(history_bytes)
    found = compacted = 0
    ended: set[str] = set()
    for n in range(KILLS // 2):
        folder, notes = tmp_path / f"ledger-{n // LIVES}", tmp_path / f"notes-{n // LIVES}"
        killed_at(victims, f"{folder} {notes} {n} {history_bytes}", notes, rng)
        acknowledged = noted(notes)
        if not folder.exists():
            assert not acknowledged
            continue
        report = audit(folder)
        assert report.sound, report.broken
        events = events_in(folder)
        ended |= {e.group_id for e in (*events, *acknowledged) if isinstance(e, GroupEnd)}
        check(events, acknowledged, ended)
        anyio.run(reopen, folder, events)
        if n % LIVES == LIVES - 1:
            found += len(acknowledged)
            compacted += any(segment.compacted for segment in current_files(folder))
    assert found > 20 * KILLS, "the processes were killed before they did anything"
    assert bool(compacted) == (history_bytes < 1 << 30)


async def reopen(folder: Path, events: list[Event]) -> None:
    async with opened(folder) as (_, again):
        assert again == events
    assert audit(folder).torn is None
