"""How `python -m controller` ends: the process's exit codes."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    FINISHED = 0, "All steps were trained, or the environment's prompts ran out; or --check found nothing wrong."
    FAILED = 1, "The run failed; the message says of what, `error.log` in the run's folder has the traceback."
    USAGE = 2, "The command line or the configuration is wrong; nothing was started."
    STALLED = 3, "The watchdog ended a run that made no progress; the message says what waited for what."
    BLOCKED = (
        4,
        "Something kept the event loop longer than `loop.exit_after_s` or `loop.fail_over_ms`; the message says where.",
    )
    INTERRUPTED = 130, "SIGINT: the run stopped at a checkpoint that `--resume auto` continues."
    TERMINATED = 143, "SIGTERM: likewise."

    meaning: str

    def __new__(cls, code: int, meaning: str) -> Exit:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member
