"""The command line: `python -m controller --config FILE`. Checks first; imports the run's machinery only to run."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, NoReturn

import anyio

from controller.config.checks import check_config
from controller.config.load import load_config
from controller.config.plan import plan
from controller.config.problems import ConfigError
from controller.config.schema import Config
from controller.exits import Exit
from controller.leaving import leave_behind

if TYPE_CHECKING:
    from controller.reporting.summary import RunSummary
    from controller.run_dir import Resume

_LEFTOVERS_S = 10.0
_IMPORTS_S = 1.0
"""Likewise after an interrupted start-up, whose imports go on in a thread and have nothing to finish."""
_CODES = "\n".join(f"  {code.value:<4} {code.meaning}" for code in Exit)
_EPILOG = f"exit codes:\n{_CODES}\n\nEvery key of the configuration is explained in docs/configuration.md."


def program() -> NoReturn:
    """The process of a command line: it ends here, with the exit code, even if a thread of the user's code never does."""
    codes: list[int] = []
    # What is registered first is called last.
    atexit.register(lambda: codes and leave_behind(codes[0]))
    try:
        code = main(leave_when_done=True)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it, `head` or a pager, has seen enough; the interpreter would flush what is left once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = Exit.FINISHED
    codes.append(code)
    raise SystemExit(code)


def main(argv: Sequence[str] | None = None, *, leave_when_done: bool = False) -> int:
    """Run the command line and return the exit code (see `controller.exits`); argparse exits by itself, with 0 or 2.

    With `leave_when_done` the process is ended a while after a run has, if it has not by itself.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["status"]:
        from controller.waits import status

        return status.main(argv[1:])
    arguments = _parser().parse_args(argv)
    show_traceback = arguments.traceback or os.environ.get("MONOLOOP_TRACEBACK") == "1"
    try:
        config = load_config(arguments.config, arguments.set)
        findings = check_config(config)
        if findings.warnings:
            _say("\n".join(f"warning: {warning}" for warning in findings.warnings))
        if findings.problems or findings.model is None:
            raise ConfigError(findings.problems)
    except ConfigError as error:
        return _refuse(error, show_traceback)
    if arguments.check:
        print(plan(config, findings.model))  # noqa: T201
        return Exit.FINISHED
    try:
        return _run(config, arguments.resume, show_traceback, leave_when_done)
    except BaseException as error:  # what the run ended with, an interrupt before its handlers stood included
        return _explain(error, config, show_traceback)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m controller",
        description="Train a language model by asynchronous reinforcement learning, as one configuration file says.\n"
        "`python -m controller status RUN_DIR` says what an active run is waiting for.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the configuration, YAML or TOML")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key, e.g. --set rollout.group_size=16; the value is YAML or JSON and replaces what the file has; "
        "may be given several times, the last wins",
    )
    parser.add_argument(
        "--check", action="store_true", help="check the configuration, print the effective plan, start nothing"
    )
    parser.add_argument(
        "--resume",
        type=_resume,
        default="auto",
        metavar="auto|never|PATH",
        help="auto (default): go on from the newest checkpoint in run.dir, if there is one; never: begin anew, an earlier "
        "run in run.dir is moved aside; PATH: go on from this checkpoint",
    )
    parser.add_argument(
        "--traceback", action="store_true", help="print an error's traceback too, as MONOLOOP_TRACEBACK=1 does"
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    return parser


def _resume(text: str) -> Resume:
    if text == "auto" or text == "never":
        return text
    return Path(text)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("monoloop")
        except PackageNotFoundError:
            found = "(not installed: running from its source folder)"
        parser.exit(message=f"monoloop {found}\n")


def _run(config: Config, resume: Resume, show_traceback: bool, leave_when_done: bool) -> Exit:
    from controller.controller import Controller
    from controller.interrupts import Interrupted
    from controller.leaving import leave_within

    async def run() -> Exit:
        leftovers_s = _LEFTOVERS_S
        try:
            async with Controller(config, resume=resume) as controller:
                code = _exit_of(await controller.run())
        except Exception as error:
            code = _explain(error, config, show_traceback)
            if isinstance(error, Interrupted):
                leftovers_s = _IMPORTS_S
        if leave_when_done:
            # The loop and the interpreter wait for all tasks and threads, those that the user's code began too.
            leave_within(leftovers_s, code)
        return code

    use_uvloop = importlib.util.find_spec("uvloop") is not None
    return anyio.run(run, backend_options={"use_uvloop": use_uvloop})


def _exit_of(summary: RunSummary) -> Exit:
    match summary.status:
        case "finished":
            return Exit.FINISHED
        case "interrupted":
            return Exit.TERMINATED if summary.reason == "SIGTERM" else Exit.INTERRUPTED
        case "stalled":
            return Exit.STALLED
        case "failed":
            return Exit.FAILED


def _explain(error: BaseException, config: Config, show_traceback: bool) -> Exit:
    """Say on stderr what ended the run, keep its traceback in the run's folder, and return the exit code."""
    from controller.checkpoint import CheckpointError
    from controller.first_error import first_error
    from controller.interrupts import Interrupted
    from controller.run_dir import RunDirError
    from controller.sentinel.sentinel import LoopBlocked
    from controller.watchdog import RunStalled
    from workers.environments.registry import BadEnvironment

    first = first_error(error)
    if isinstance(first, KeyboardInterrupt | Interrupted):
        _say(str(first) or "interrupted before the run could stop in order")
        return Exit.TERMINATED if isinstance(first, Interrupted) and first.signal == SIGTERM else Exit.INTERRUPTED
    if isinstance(first, ConfigError | BadEnvironment | RunDirError | CheckpointError):
        return _refuse(first, show_traceback)
    text = str(first)
    lines = [f"{type(first).__name__}: {text}" if text else type(first).__name__, *getattr(first, "__notes__", ())]
    trace = "".join(traceback.format_exception(error))
    log = Path(config.run.dir) / "error.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(trace, encoding="utf-8", errors="backslashreplace")
        lines.append(f"traceback: {log}")
    except OSError as failure:
        lines.append(f"{log} cannot be written ({failure.strerror}), so the traceback is here:")
        show_traceback = True
    _say("\n".join(lines))
    if show_traceback:
        _say(trace)
    match first:
        case RunStalled():
            return Exit.STALLED
        case LoopBlocked():
            return Exit.BLOCKED
        case _:
            return Exit.FAILED


def _refuse(error: BaseException, show_traceback: bool) -> Exit:
    _say(str(error))
    if show_traceback:
        _say("".join(traceback.format_exception(error)))
    return Exit.USAGE


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201
