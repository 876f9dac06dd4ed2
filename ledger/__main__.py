"""`python -m ledger`: reads a run's ledger, also while the run goes on or after it crashed. Writes nothing."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ledger.audit import Audit, audit
from ledger.errors import JournalCorrupt, JournalMoved, LedgerError
from ledger.events import Compacted, RunResumed
from ledger.segments import FOLDER, JournalReader, Segment, TornTail, all_files, current_files
from ledger.show import block, clean, table
from ledger.story import tell

_ATTEMPTS = 5
"""To read a journal that is compacted meanwhile."""


class NothingThere(Exception):
    """There is no ledger, or not what was asked for in it."""


def main(argv: Sequence[str] | None = None) -> int:
    """0: all is well. 1: the record is broken. 2: there is nothing to read, or the command line is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        folder = _folder(Path(arguments.run))
        if arguments.command == "verify":
            return _verify(folder)
        return _show(folder, arguments.rollout, arguments.group, as_json=arguments.json)
    except BrokenPipeError:
        # The reader has seen enough. Nothing may be left to be flushed at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (NothingThere, JournalMoved, OSError) as e:
        _note(str(e))
        return 2
    except LedgerError as e:
        _note(f"broken: {e}; `python -m ledger verify` says where")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ledger",
        description="Read a run's ledger, also while the run goes on or after it crashed. Nothing is written.",
        epilog="exit codes: 0 all is well; 1 the record is broken; 2 there is nothing to read, or a wrong command line",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="what was recorded of each rollout, and what became of it")
    verify = commands.add_parser("verify", help="prove the whole record, or name the first broken event")
    for command in (show, verify):
        command.add_argument("run", metavar="RUN", help="the run's folder, or its ledger folder")
    which = show.add_mutually_exclusive_group()
    which.add_argument("--rollout", metavar="ID", help="this rollout only, in full")
    which.add_argument("--group", metavar="ID", help="this group's rollouts only, in full")
    show.add_argument("--json", action="store_true", help="one JSON object per rollout and line")
    return parser


def _folder(run: Path) -> Path:
    for folder in (run / FOLDER, run):
        if folder.is_dir() and all_files(folder):
            return folder
    raise NothingThere(f"there is no ledger in {run}: give a run's folder (run.dir), or the {FOLDER} folder in it")


def _show(folder: Path, rollout_id: str | None, group_id: str | None, *, as_json: bool) -> int:
    files = current_files(folder)
    resumed = _resumes(files)
    reader = JournalReader(files)
    told = (
        story
        for story in tell(reader.events(), resumed=resumed)
        if rollout_id in (None, story.rollout_id) and group_id in (None, story.group_id)
    )
    in_full = rollout_id is not None or group_id is not None
    if as_json:
        lines = (msgspec.json.encode(story).decode() for story in told)
    elif in_full:
        lines = (block(story) + "\n" for story in told)
    else:
        lines = table(told)
    shown = 0
    for line in lines:
        _say(line)
        shown += 1
    _explain(reader.torn)
    if in_full and not shown:
        what = f"rollout {rollout_id}" if group_id is None else f"group {group_id}"
        raise NothingThere(f"{folder} has no {what}; without --rollout and --group all are listed")
    return 0


def _resumes(files: Sequence[Segment]) -> list[tuple[int, int]]:
    """The numbers of the events that are a `RunResumed`, and their steps."""
    found: list[tuple[int, int]] = []
    with suppress(JournalCorrupt):  # Whoever reads on will come to it.
        for number, event in enumerate(JournalReader(files).events()):
            if isinstance(event, RunResumed):
                found.append((number, event.step))
    return found


def _audit(folder: Path) -> Audit:
    for _ in range(_ATTEMPTS):
        with suppress(JournalMoved):
            return audit(folder)
    return audit(folder)


def _verify(folder: Path) -> int:
    found = _audit(folder)
    _say(f"{folder}: {found.events} events in {found.frames} frames, {found.files} files")
    if found.compacted is not None:
        _say(f"compacted: {_compacted(found.compacted)} before these events")
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in found.verdicts.most_common()) or "none"
    _say(f"finished rollouts: {verdicts}; their hash chains and receipts were recomputed")
    account = found.account
    _say(
        f"dispatched {account.dispatched} = trained {account.trained} + evicted {account.evicted} + dropped "
        f"{account.dropped} + aborted {account.aborted} + live {account.live}; "
        f"lost={account.lost} duplicated={account.duplicated}"
    )
    _explain(found.torn)
    if found.broken is not None:
        place, why = found.broken
        _say(f"BROKEN: {place}: {clean(why)}")
    else:
        _say("sound" if found.sound else "BROKEN: rollouts are lost or duplicated")
    return 0 if found.sound else 1


def _compacted(event: Compacted) -> str:
    ends = ("trained", "evicted", "dropped", "aborted")
    return ", ".join(f"{end} {getattr(event, end)}" for end in ends)


def _explain(torn: TornTail | None) -> None:
    if torn is not None:
        _note(
            f"note: the last {torn.size} bytes of {torn.place.path.name} hold no whole frame ({torn.why}): they are being "
            "written, or a crash cut them off. Nothing in them was acknowledged; a resumed run removes them."
        )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
