"""Evaluation: held-out prompts are played through the same gate, capture and verification as all others, between two steps.

Invariant: nothing of it is trained. Its groups are held out in the ledger, which refuses to train them; their rows are never
published; and a training prompt that repeats one of its prompts ends the run. As no weights move meanwhile, all its tokens
are of one version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import anyio
import msgspec
import numpy as np
from anyio.abc import ObjectSendStream

from controller.config.problems import ConfigError, Problem
from controller.config.schema import EvaluationConfig
from controller.gradual import gradual_task_group
from controller.player import Player
from controller.records import FinalizationRequest, PlayedRollout, PromptGroup, TrainSample, metric_means
from controller.reporting.evaluation_report import EvaluationReport
from controller.run_state import RunState
from ledger.ledger import Ledger
from workers.environments.base import Prompt

PREFIX = "e"
"""Of the ids of held-out groups and rollouts; `rollout_pump` has its own."""


class HeldOutLeak(Exception):
    """An environment gave a prompt to train on that is held out."""


def is_held_out(rollout_id: str) -> bool:
    return rollout_id.startswith(PREFIX)


def draw_held_out(environment: object, config: EvaluationConfig) -> tuple[Prompt, ...]:
    """The questions of the run's evaluations; none when it has no evaluation. Blocks. Raises ConfigError."""
    wanted, name = config.questions, type(environment).__name__
    if wanted is None:
        return ()
    draw: Any = getattr(environment, "held_out", None)
    if not callable(draw):
        raise _cannot(
            f"{wanted}, but environment {name} offers no held-out prompts",
            "give it a method `held_out(self, seed)` that yields them (workers.environments.base.Evaluable)",
        )
    try:
        drawn: Any = draw(config.seed)
        prompts: list[object] = list(islice(drawn, wanted))
    except Exception as e:
        raise _cannot(
            f"{wanted}, but environment {name} offers no held-out prompts: {e}", "see environment.args"
        ) from e
    for prompt in prompts:
        if not isinstance(prompt, Prompt):
            raise _cannot(f"held_out() of environment {name} yielded {prompt!r:.200}", "it must yield Prompt objects")
    questions = tuple(prompt for prompt in prompts if isinstance(prompt, Prompt))
    if len({prompt.id for prompt in questions}) < len(questions):
        raise _cannot(f"held_out() of environment {name} yielded an id twice", "ids must be unique")
    if len(questions) < wanted:
        raise _cannot(f"{wanted} > {len(questions)}, all that environment {name} holds out", "lower it")
    return questions


def without_held_out(prompts: Iterator[Prompt], held_out: Sequence[Prompt]) -> Iterator[Prompt]:
    """The prompts, unchanged. Raises HeldOutLeak at one with the id or the data of one that is held out."""
    ids = {prompt.id for prompt in held_out}
    data = {_key(prompt) for prompt in held_out}
    for prompt in prompts:
        # What is no prompt is for the prompt source to refuse.
        is_prompt = isinstance(prompt, Prompt)  # pyright: ignore[reportUnnecessaryIsInstance]
        if held_out and is_prompt and (prompt.id in ids or _key(prompt) in data):
            raise HeldOutLeak(f"prompt {prompt.id!r} is held out for evaluation, and prompts() yielded it too")
        yield prompt


def _key(prompt: Prompt) -> bytes:
    return msgspec.json.encode(prompt.data, order="deterministic")


def _cannot(what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(path="evaluation.questions", what=what, remedy=f"{remedy}, or set it to null")])


class Evaluator:
    """`concurrency` rollouts are played at a time. `recorded`: the evaluations of the run so far, which are not repeated."""

    def __init__(
        self,
        *,
        config: EvaluationConfig,
        questions: Sequence[Prompt],
        player: Player,
        ledger: Ledger,
        state: RunState,
        finalize: ObjectSendStream[FinalizationRequest],
        concurrency: int,
        recorded: Sequence[EvaluationReport],
        report: Callable[[EvaluationReport], None],
    ) -> None:
        self._config = config
        self._questions = questions
        self._player = player
        self._ledger = ledger
        self._state = state
        self._finalize = finalize
        self._places = anyio.CapacityLimiter(concurrency)
        # So many groups that every place is taken while some wait for their last rollout.
        self._groups = anyio.Semaphore(2 * -(-concurrency // config.samples))
        self._done = {report.step for report in recorded}
        self._report = report
        self._evaluated: dict[str, Sequence[TrainSample]] = {}
        self._last_evaluated = anyio.Event()
        self.played = 0
        """Rollouts that have been played, in all evaluations of this process."""
        self.remaining = 0
        """Rollouts that the present evaluation has not played yet."""

    @property
    def playing(self) -> int:
        return self._player.playing

    def due(self, *, last: bool = False) -> bool:
        """Whether to evaluate the present weights: before anything else, every so many steps, and when it is the `last`."""
        step, every = self._state.step, self._config.every_steps
        if not self._questions or step in self._done:
            return False
        return not self._done or last or (every is not None and step % every == 0)

    async def evaluate(self) -> None:
        """Play every question with the weights that are served, which must not move meanwhile, and report.

        Raises RolloutError, and the ledger's errors. A cancellation leaves live rollouts for whoever ends the run.
        """
        start, step = time.monotonic(), self._state.step
        self._evaluated, self._last_evaluated = {}, anyio.Event()
        self.remaining = len(self._questions) * self._config.samples
        async with gradual_task_group() as tg:
            for number, prompt in enumerate(self._questions):
                await self._groups.acquire()
                tg.start_soon(self._play_group, self._group(step, number, prompt), step)
        await self._last_evaluated.wait()
        self._done.add(step)
        self._report(_summarise(step, list(self._evaluated.values()), seconds=time.monotonic() - start))

    def evaluated(self, group_id: str, samples: Sequence[TrainSample]) -> None:
        """The finalizers have verified a held-out group."""
        self._evaluated[group_id] = samples
        if len(self._evaluated) == len(self._questions):
            self._last_evaluated.set()

    def _group(self, step: int, number: int, prompt: Prompt) -> PromptGroup:
        group_id = f"{PREFIX}{step:06d}.{number}"
        return PromptGroup(
            group_id=group_id,
            prompt=prompt,
            start_version=self._state.version,
            rollout_ids=tuple(f"{group_id}.{i}" for i in range(self._config.samples)),
        )

    async def _play_group(self, group: PromptGroup, step: int) -> None:
        try:
            request = FinalizationRequest(group_id=group.group_id, rollouts=await self._play(group), evaluation=step)
        finally:
            self._groups.release()
        await self._finalize.send(request)

    async def _play(self, group: PromptGroup) -> tuple[PlayedRollout, ...]:
        """The group's rollouts, in the order of their ids."""
        await self._ledger.dispatched(
            group.group_id, group.prompt.id, group.rollout_ids, group.start_version, held_out=True
        )
        played: dict[str, PlayedRollout] = {}

        async def play(rollout_id: str) -> None:
            async with self._places:
                played[rollout_id] = await self._player.play(group, rollout_id)
            self.played += 1
            self.remaining -= 1

        async with gradual_task_group() as tg:
            for rollout_id in group.rollout_ids:
                tg.start_soon(play, rollout_id)
        return tuple(played[rollout_id] for rollout_id in group.rollout_ids)


def _summarise(step: int, questions: Sequence[Sequence[TrainSample]], *, seconds: float) -> EvaluationReport:
    rewards = np.array([[sample.reward for sample in samples] for samples in questions])
    samples = [sample for samples in questions for sample in samples]
    proven = [sample for sample in samples if sample.valid]
    means = rewards.mean(axis=1)
    return EvaluationReport(
        step=step,
        time=time.time(),
        seconds=seconds,
        questions=len(questions),
        samples=rewards.shape[1],
        reward_mean=float(means.mean()),
        reward_error=float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None,
        reward_best=float(rewards.max(axis=1).mean()),
        environment=metric_means(samples),
        completion_length_mean=sum(s.loss_tokens for s in proven) / len(proven) if proven else None,
        truncated_fraction=sum(s.truncated for s in proven) / len(proven) if proven else None,
        rejected=len(samples) - len(proven),
        oldest_version=min((s.oldest_version for s in proven), default=None),
    )
