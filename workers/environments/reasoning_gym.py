"""Any task of the `reasoning-gym` package by name: its generator makes the prompts, its own scorer the reward."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import lru_cache
from itertools import count, islice
from typing import Any, Literal

from workers.environments.base import Prompt, RolloutContext, RolloutResult
from workers.environments.held_out import Split
from workers.environments.offload import WorkerDied, offload

AnswerFormat = Literal["text", "last_number", "tag"]

_CHUNK = 10_000
"""Entries per data set. Several tasks prepare, or limit, a whole data set at once, so an endless one is made of chunks."""
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym:
    """One question, one answer, scored by the task.

    `task`: a name of reasoning-gym's gallery. `size`: prompts in all; None is endless. `task_args`: fields of the task's
    config. `answer`: what of a completion is scored: all of its text, its last number, or what stands between the last
    `<answer>` and `</answer>` (which `system_prompt` should then ask for). `score_truncated`: whether an answer that was cut
    at a length limit has anything to score. `reward`: the task's score, which may give partial credit, or 1 for a full
    score and else 0. `score_timeout_s`: after it, scoring is given up. `held_out_share`: of all questions that the task can
    ask, how many are set aside for evaluation.

    The reward is 0 when there is nothing to score. Metrics: `exact` (the score is 1), `unscored` (the
    scorer failed on this answer or took too long; the reward is 0).

    A prompt names an entry of the data set and does not hold its solution: the scoring process generates the entry again.
    So prompts stay JSON-like and entries keep their own types (some scorers tell tuples from lists).
    """

    def __init__(
        self,
        task: str,
        size: int | None = None,
        task_args: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        answer: AnswerFormat = "text",
        score_truncated: bool = True,
        reward: Literal["score", "exact"] = "score",
        score_timeout_s: float = 30.0,
        held_out_share: float = 0.0,
    ) -> None:
        if size is not None and size < 1:
            raise ValueError(f"size: at least 1 prompt, or null for an endless number; got {size}")
        if not 0 < score_timeout_s < math.inf:
            raise ValueError(f"score_timeout_s: a finite number of seconds above 0; got {score_timeout_s}")
        _check_task(task, task_args or {})
        self._task = _Task(task, json.dumps(dict(task_args or {})))
        self._size = size
        self._system_prompt = system_prompt
        self._answer: AnswerFormat = answer
        self._score_truncated = score_truncated
        self._exact_only = reward == "exact"
        self._score_timeout_s = score_timeout_s
        self._split = Split(held_out_share)

    def prompts(self, seed: int) -> Iterator[Prompt]:
        return islice(self._split.trained(self._all(seed), _question), self._size)

    def held_out(self, seed: int) -> Iterator[Prompt]:
        return self._split.held_out(self._all(seed), _question)

    def _all(self, seed: int) -> Iterator[Prompt]:
        for index in count():
            _, entry = _draw(self._task, seed, index)
            yield Prompt(
                id=f"{self._task.name}-{seed}-{index}",
                data={"seed": seed, "index": index, "question": entry["question"]},
            )

    async def rollout(self, ctx: RolloutContext, prompt: Prompt) -> RolloutResult:
        messages = [{"role": "user", "content": _question(prompt)}]
        if self._system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        completion = await ctx.chat(messages)
        answer = extract_answer(completion.text, self._answer)
        if completion.finish_reason == "length" and not self._score_truncated:
            answer = None
        score = 0.0 if answer is None else await self._score(prompt, answer)
        exact = float(score == 1.0)
        return RolloutResult(
            reward=exact if self._exact_only else score or 0.0,
            metrics={"exact": exact, "unscored": float(score is None)},
        )

    async def _score(self, prompt: Prompt, answer: str) -> float | None:
        """None when the answer makes the scorer fail, run for too long, or bring its process down."""
        data = prompt.data
        call = (self._task, data["seed"], data["index"], data["question"], answer)
        try:
            return await offload(_score, *call, timeout_s=self._score_timeout_s)
        except (TimeoutError, WorkerDied):
            return None


def _question(prompt: Prompt) -> str:
    return prompt.data["question"]


def extract_answer(text: str, form: AnswerFormat) -> str | None:
    """The part of a completion that is to be scored; None when there is none."""
    if form == "text":
        return text.strip() or None
    found: list[str] = (_NUMBER if form == "last_number" else _TAG).findall(text)
    if not found:
        return None
    return found[-1].replace(",", "") if form == "last_number" else found[-1].strip() or None


@dataclass(frozen=True)
class _Task:
    """A task as scoring processes are told of it; `args` is JSON, so that it can be a cache's key."""

    name: str
    args: str


def _score(task: _Task, seed: int, index: int, question: str, answer: str) -> float | None:
    """Runs in a worker process."""
    dataset, entry = _draw(task, seed, index)
    if entry["question"] != question:
        raise RuntimeError(
            f"the reasoning-gym task {task.name!r} does not generate the same entry in two processes, because it depends on "
            "the hash of strings; set the environment variable PYTHONHASHSEED=0 for the whole run"
        )
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception:  # scorers expect an answer of the right form: prime_factorization raises on "hello"
        return None
    return score if math.isfinite(score) else None


@lru_cache(maxsize=256)
def _draw(task: _Task, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    """An entry, and the data set that generated it."""
    # Entry i of a data set is drawn from its seed plus i, so the next chunk's seed continues where the last one ended.
    chunk, offset = divmod(index, _CHUNK)
    dataset = _dataset(task, seed + chunk * _CHUNK)
    return dataset, dataset[offset]


@lru_cache(maxsize=4)
def _dataset(task: _Task, seed: int) -> Any:
    return _factory().create_dataset(task.name, seed=seed, size=_CHUNK, **json.loads(task.args))


def _check_task(task: str, args: Mapping[str, Any]) -> None:
    known: Mapping[str, tuple[type, Any]] = _factory().DATASETS
    if task not in known:
        raise ValueError(f"task: reasoning-gym has no task {task!r}; the nearest names are {_nearest(task, known)}")
    config_class = known[task][1]
    allowed = sorted({field.name for field in fields(config_class)} - {"seed", "size"})
    for name in args:
        if name not in allowed:
            raise ValueError(f"task_args.{name}: the task {task!r} has no such argument; it takes {', '.join(allowed)}")
    try:
        config = config_class(seed=0, size=_CHUNK, **args)
        if hasattr(config, "validate"):
            config.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"task_args: not what the task {task!r} allows: {error or repr(error)}") from error


def _nearest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return ", ".join(get_close_matches(name, names, n=5, cutoff=0.4) or names)


def _factory() -> Any:
    try:
        return importlib.import_module("reasoning_gym").factory
    except ModuleNotFoundError as error:
        if error.name != "reasoning_gym":
            raise
        raise ModuleNotFoundError(
            "this environment needs the package reasoning-gym, which is in the extra `envs`: pip install 'monoloop[envs]'",
            name=error.name,
        ) from None
