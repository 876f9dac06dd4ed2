"""Any program that speaks the OpenAI API as an agent: one process per rollout, pointed at the rollout's gate.

It finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, where OpenAI's own clients look for them. Its prompt comes on
stdin, or as its last argument. What it did is scored by the last line that it prints,

    {"reward": 0.5, "metrics": {"exact": 0}, "terminal": "<id of the response that was the answer>"}

or a bare number, or by a function of yours. `terminal` is needed only when it held several conversations.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, cast
from urllib.parse import urlsplit

import anyio
import msgspec
from msgspec import Meta, Struct

from workers.environments.base import LARGEST_REWARD, Prompt, RolloutContext, RolloutResult
from workers.environments.offload import WorkerDied, offload
from workers.environments.program import OutputTooLarge, run_program

logger = logging.getLogger(__name__)

_Source: TypeAlias = Path | Callable[[int], Iterator[Prompt]]

_MAX_OUTPUT_BYTES = 4 * 2**20
_MAX_METRICS = 64
_SHOWN = 300
"""Characters of a failed agent's last line in messages."""

Number: TypeAlias = Annotated[float, Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]
Name: TypeAlias = Annotated[str, Meta(max_length=100)]


class Verdict(Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent prints last, or a scorer returns."""

    reward: Number
    metrics: Annotated[dict[Name, Number], Meta(max_length=_MAX_METRICS)] = {}
    terminal: str | None = None


class AgentsFail(RuntimeError):
    """Too many agents failed one after another: the program, not the policy, is at fault."""


class _Failed(Exception):
    """This rollout's agent did not come to a verdict. `errors`: what it said on stderr in the end."""

    def __init__(self, why: str, errors: str = "") -> None:
        super().__init__(why)
        self.errors = errors


class AgentProcess:
    """`command`: the program and its arguments; `python` is the interpreter that runs the controller.

    `prompts`: a file of JSON lines, each a prompt, or `module:function`, which is given the seed and yields `Prompt`s.
    `shuffle` and `repeat` are for a file: each pass in an order of its own, which follows from the seed, and endlessly.
    `held_out_prompts`: likewise, those that an evaluation asks, each once.
    `prompt_as`: how the agent gets its prompt; as JSON, unless it is text.
    `scorer`: `module:function`, given the prompt's data and all that the agent printed. It returns a reward, or a mapping
    with `reward` and `metrics`, and runs in a process of its own for at most `score_timeout_s`.
    `env`: more environment variables. `max_processes` agents run at the same time.
    `timeout_s`: an agent is killed after it; null leaves that to rollout.timeout_s.

    An agent that exits with another status than 0, is killed, or prints no verdict has failed: its reward is 0, and the
    metric `agent_failed` 1. `max_failures_in_a_row` of them end the run.
    """

    def __init__(
        self,
        command: list[str],
        prompts: str,
        shuffle: bool = True,
        repeat: bool = True,
        held_out_prompts: str | None = None,
        prompt_as: Literal["stdin", "argument"] = "stdin",
        scorer: str | None = None,
        score_timeout_s: float = 30.0,
        env: dict[str, str] | None = None,
        timeout_s: float | None = None,
        max_processes: int = 32,
        max_failures_in_a_row: int = 16,
    ) -> None:
        self._command = _resolved(command)
        self._source = _prompt_source(prompts, "prompts")
        self._held_out = None if held_out_prompts is None else _prompt_source(held_out_prompts, "held_out_prompts")
        self._shuffle = shuffle
        self._repeat = repeat
        self._prompt_as: Literal["stdin", "argument"] = prompt_as
        self._scorer = scorer
        if scorer is not None:
            _function(scorer, "scorer")
        self._score_timeout_s = _positive(score_timeout_s, "score_timeout_s")
        self._env = {**os.environ, **(env or {})}
        self._timeout_s = math.inf if timeout_s is None else _positive(timeout_s, "timeout_s")
        if max_processes < 1 or max_failures_in_a_row < 1:
            raise ValueError("max_processes and max_failures_in_a_row: at least 1")
        self._places = anyio.CapacityLimiter(max_processes)
        self._max_failures_in_a_row = max_failures_in_a_row
        self._failures_in_a_row = 0

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return self._drawn(self._source, seed, itertools.count() if self._repeat else range(1))

    def held_out(self, seed: int) -> Iterator[Prompt]:
        if self._held_out is None:
            raise ValueError(
                "held_out_prompts: is null, so that there is nothing to ask; name a file or module:function"
            )
        return self._drawn(self._held_out, seed, range(1))

    def _drawn(self, source: _Source, seed: int, passes: Iterable[int]) -> Iterator[Prompt]:
        if not isinstance(source, Path):
            yield from source(seed)
            return
        listed = _read_prompts(source)
        rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
        for number in passes:
            if self._shuffle:
                rng.shuffle(listed)
            for name, data in listed:
                yield Prompt(id=f"{name}-{number}" if number else name, data=data)

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        try:
            verdict = await self._play(ctx, prompt)
        except _Failed as failure:
            self._count_failure(ctx.rollout_id, failure)
            return RolloutResult(reward=0.0, metrics={"agent_failed": 1.0})
        self._failures_in_a_row = 0
        if verdict.terminal is not None:
            ctx.declare_terminal(verdict.terminal)
        return RolloutResult(reward=verdict.reward, metrics={**verdict.metrics, "agent_failed": 0.0})

    async def _play(self, ctx: RolloutContext, prompt: Prompt) -> Verdict:
        text = prompt.data if isinstance(prompt.data, str) else json.dumps(prompt.data, ensure_ascii=False)
        as_argument = self._prompt_as == "argument"
        mark = "OPENAI_API_KEY", ctx.api_key
        env = {**_without_proxy(self._env, ctx.base_url), "OPENAI_BASE_URL": ctx.base_url, mark[0]: mark[1]}
        async with self._places:
            try:
                with anyio.fail_after(None if math.isinf(self._timeout_s) else self._timeout_s):
                    done = await run_program(
                        [*self._command, text] if as_argument else self._command,
                        stdin=b"" if as_argument else text.encode(),
                        env=env,
                        mark=mark,
                        max_output_bytes=_MAX_OUTPUT_BYTES,
                    )
            except TimeoutError:
                raise _Failed(f"it ran longer than {self._timeout_s:g} s and was killed") from None
            except OutputTooLarge as error:
                raise _Failed(str(error)) from None
        output = done.output.decode(errors="replace")
        if done.status != 0:
            how = f"exited with status {done.status}" if done.status > 0 else f"was ended by signal {-done.status}"
            errors = done.errors.decode(errors="replace").strip()
            last = errors.rpartition("\n")[2][:_SHOWN]
            raise _Failed(f"it {how}" + (f"; its last words: {last}" if last else ""), errors)
        return _last_line(output) if self._scorer is None else await self._score(self._scorer, prompt.data, output)

    async def _score(self, scorer: str, data: Any, output: str) -> Verdict:
        try:
            found = await offload(_call_scorer, scorer, data, output, timeout_s=self._score_timeout_s)
        except (TimeoutError, WorkerDied) as error:
            raise _Failed(f"it could not be scored: {error}") from error
        try:
            return _verdict(found)
        except msgspec.ValidationError as error:
            raise TypeError(
                f"scorer {scorer} returned {found!r}, not a reward or a mapping with one: {error}"
            ) from error

    def _count_failure(self, rollout_id: str, failure: _Failed) -> None:
        self._failures_in_a_row += 1
        level = logging.WARNING if self._failures_in_a_row == 1 else logging.INFO
        more = f"\n{failure.errors}" if "\n" in failure.errors else ""
        logger.log(level, "the agent of rollout %s failed: %s%s", rollout_id, failure, more)
        if self._failures_in_a_row >= self._max_failures_in_a_row:
            command = " ".join(self._command)
            raise AgentsFail(f"{self._failures_in_a_row} agents in a row failed ({command}). The last one: {failure}")


def _without_proxy(env: Mapping[str, str], url: str) -> dict[str, str]:
    """The gate is reached directly, whatever proxy the agent uses for others."""
    host = urlsplit(url).hostname or ""
    exempt = {name: ",".join(filter(None, [env.get(name), host])) for name in ("no_proxy", "NO_PROXY")}
    return {**env, **exempt}


def _resolved(command: list[str]) -> list[str]:
    if not command or not all(command):
        raise ValueError("command: a program and its arguments, none of them empty")
    program, *arguments = command
    if program == "python":
        return [sys.executable, *arguments]
    found = shutil.which(program)
    if found is None:
        raise ValueError(f"command: there is no program {program!r}, neither on the PATH nor as a file that can be run")
    return [found, *arguments]


def _prompt_source(prompts: str, argument: str) -> _Source:
    path = Path(prompts)
    if path.is_file():
        try:
            _read_prompts(path)
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from error
        return path
    if ":" in prompts and "/" not in prompts:
        return _function(prompts, argument)
    raise ValueError(f"{argument}: there is no file {prompts!r}, and it is no module:function")


def _read_prompts(path: Path) -> list[tuple[str, Any]]:
    """Names and data. A name is the prompt's `id`, if it has one, or where it stands."""
    listed: list[tuple[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                data: Any = msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} line {number}: {error}") from error
            listed.append((_name(data) or f"{path.stem}-{number}", data))
    if not listed:
        raise ValueError(f"{path} is empty")
    if len({name for name, _ in listed}) < len(listed):
        raise ValueError(f"{path}: two prompts have the same id")
    return listed


def _name(data: object) -> str | None:
    given = cast("dict[str, Any]", data).get("id") if isinstance(data, dict) else None
    return None if given is None else str(given)


def _function(name: str, argument: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"{argument}: {name}: importing {module} failed: {error}") from error
    if not callable(found):
        raise ValueError(f"{argument}: {name}: {module} has no function {attribute!r}")
    return found


def _call_scorer(name: str, data: Any, output: str) -> Any:
    """Runs in a worker process."""
    return _function(name, "scorer")(data, output)


def _last_line(output: str) -> Verdict:
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    try:
        return _verdict(msgspec.json.decode(last))
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise _Failed(
            f'its last line must be a number or {{"reward": ..., "metrics": {{...}}, "terminal": "..."}}, '
            f"and is {last[:200]!r}: {error}"
        ) from error


def _verdict(found: Any) -> Verdict:
    """Raises ValidationError for what is no verdict; a reward that is not a number (NaN) is one."""
    return msgspec.convert({"reward": float(found)} if isinstance(found, int | float) else found, Verdict)


def _positive(seconds: float, argument: str) -> float:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{argument}: a finite number of seconds above 0; got {seconds}")
    return seconds
