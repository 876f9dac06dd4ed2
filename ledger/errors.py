"""Errors of the ledger.

LedgerError
├── UnknownRollout       never dispatched or opened, or finished and forgotten
├── RolloutClosed        sealed or finished: it takes no more calls (HTTP 409)
├── UnknownCall          the rollout has no such call
├── UnknownGroup         never dispatched, or already ended and forgotten
├── IllegalTransition    the state machine has no such step from here
├── BrokenChain          a rollout's events are not those that were recorded
├── JournalError         the journal on disk
│   ├── JournalBusy      another process writes it
│   ├── JournalCorrupt   what was recorded cannot be read back
│   ├── JournalMoved     it was compacted while it was being read
│   └── JournalFailed    it takes no more events: a write failed, or it is closed
└── GateError            a model call that gets no answer
    ├── TooManyCalls     the rollout's limit of calls is used up; nothing was admitted
    ├── CallRefused      the request is not acceptable; `generate` raises it, and nothing was sampled
    └── CallFailedError  the call was admitted and failed; the ledger says so
"""

from __future__ import annotations

from pathlib import Path

from ledger.reasons import CallFailure


class LedgerError(Exception):
    """Base of all ledger errors."""


class UnknownRollout(LedgerError):
    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"rollout {rollout_id!r} is not open: never dispatched or opened, or finished and forgotten")
        self.rollout_id = rollout_id


class RolloutClosed(LedgerError):
    def __init__(self, rollout_id: str, state: str) -> None:
        super().__init__(f"rollout {rollout_id!r} is {state}: it takes no more calls and declarations")
        self.rollout_id = rollout_id
        self.state = state


class UnknownCall(LedgerError):
    def __init__(self, call_id: str) -> None:
        super().__init__(f"no call {call_id!r} was admitted")
        self.call_id = call_id


class UnknownGroup(LedgerError):
    def __init__(self, group_id: str) -> None:
        super().__init__(f"group {group_id!r} is not live: never dispatched, or already ended (each group ends once)")
        self.group_id = group_id


class IllegalTransition(LedgerError):
    """`subject` cannot do `step` in its present state."""

    def __init__(self, subject: str, state: str, step: str) -> None:
        super().__init__(f"{subject} is {state}: it cannot be {step}")
        self.subject = subject
        self.state = state
        self.step = step


class BrokenChain(LedgerError):
    def __init__(self, rollout_id: str, events: int, head: str, recorded: str) -> None:
        super().__init__(
            f"rollout {rollout_id!r}: the hash chain over its {events} events so far ends in {head[:16]}…, "
            f"but {recorded[:16]}… is recorded: one of them was dropped, added, reordered or edited"
        )
        self.rollout_id = rollout_id


class JournalError(LedgerError):
    """Base of the journal's errors. `path` is the file or folder."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"ledger {path}: {why}")
        self.path = path
        self.why = why


class JournalBusy(JournalError):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "another process is writing it")


class JournalCorrupt(JournalError):
    """`offset`: of the first byte in `path` that is not as it was written."""

    def __init__(self, path: Path, offset: int, why: str) -> None:
        super().__init__(path, f"at byte {offset}: {why}")
        self.offset = offset
        self.fault = why


class JournalMoved(JournalError):
    def __init__(self, path: Path) -> None:
        super().__init__(path, "it was compacted while it was being read; read it again")


class JournalFailed(JournalError):
    pass


class GateError(LedgerError):
    """Base of the errors that a model call can end in."""


class TooManyCalls(GateError):
    def __init__(self, rollout_id: str, limit: int) -> None:
        super().__init__(f"rollout {rollout_id!r} has made all of its {limit} model calls")
        self.rollout_id = rollout_id
        self.limit = limit


class CallRefused(GateError):
    """The request is not acceptable and nothing was sampled for it, e.g. its prompt is too long.

    The `generate` given to a gate raises it to tell such a request from a failing worker: a refused call does not reject
    the rollout.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class CallFailedError(GateError):
    """The call `call_id` failed for `reason`. The exception that caused it, if any, is the `__cause__`."""

    def __init__(self, call_id: str, reason: CallFailure, detail: str) -> None:
        super().__init__(f"call {call_id!r} failed: {reason}: {detail}")
        self.call_id = call_id
        self.reason = reason
        self.detail = detail
