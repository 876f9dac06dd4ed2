"""What the built-in environments set aside for evaluation is never among their training prompts, whatever the seeds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ledger.records import Message
from tests.workers.environments.scripted import ScriptedContext
from workers.environments.agent_process import AgentProcess
from workers.environments.base import ChatAnswer
from workers.environments.held_out import MAX_SKIPPED, Split
from workers.environments.reasoning_gym import ReasoningGym
from workers.environments.reverse_text import ReverseText

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Only 200 different questions."""


def test_reverse_text_never_trains_on_a_held_out_word() -> None:
    environment = ReverseText(min_length=1, max_length=2, held_out_share=0.2)  # 702 words, so that all come up
    held_out = [prompt.data["word"] for prompt in environment.held_out(5)]
    trained = {p.data["word"] for seed in (0, 5) for p in islice(environment.prompts(seed), 5000)}

    assert len(set(held_out)) == len(held_out)
    assert 100 < len(held_out) < 180
    assert not trained & set(held_out)
    assert len(trained) + len(held_out) > 690, "the two sides are all words there are"


def test_a_held_out_sequence_follows_from_its_seed() -> None:
    environment = ReverseText(held_out_share=0.1)
    first, again, other = ([p.id for p in islice(environment.held_out(seed), 20)] for seed in (1, 1, 2))
    assert first == again != other


def test_a_reasoning_gym_task_with_few_questions_is_split_without_an_overlap() -> None:
    pytest.importorskip("reasoning_gym")
    environment = ReasoningGym("chain_sum", task_args=SUMS, held_out_share=0.25, size=300)
    held_out = {p.data["question"] for p in islice(environment.held_out(10_000), 48)}
    trained = [p.data["question"] for seed in (0, 10_000) for p in environment.prompts(seed)]

    assert len(held_out) == 48
    assert len(trained) == 600, "as many as asked for, however many are held out"
    assert not held_out & set(trained)


class Cut(ScriptedContext):
    """Every answer was cut at the length limit."""

    async def chat(self, messages: Any, **options: Any) -> ChatAnswer:
        await super().chat(messages, **options)
        return ChatAnswer(
            call_id="rollout-0/0",
            message=Message(role="assistant", content=self._answer([])),
            finish_reason="length",
            prompt_tokens=1,
            completion_tokens=1,
        )


@pytest.mark.anyio
async def test_a_truncated_answer_counts_only_where_it_is_to_and_an_exact_reward_knows_no_half_points() -> None:
    gym = pytest.importorskip("reasoning_gym")
    right = gym.create_dataset("chain_sum", seed=0, size=10_000, **SUMS)[0]["answer"]
    for score_truncated, reward in ((True, 1.0), (False, 0.0)):
        environment = ReasoningGym("chain_sum", task_args=SUMS, score_truncated=score_truncated)
        prompt = next(environment.prompts(0))
        assert (await environment.rollout(Cut(lambda _: right), prompt)).reward == reward
    word = gym.create_dataset("spell_backward", seed=0, size=10_000)[0]["answer"]
    partly = word[:-1] + ("a" if word[-1] != "a" else "b")
    scores: list[float] = []
    for form in ("score", "exact"):
        environment = ReasoningGym("spell_backward", reward=form)
        result = await environment.rollout(ScriptedContext(lambda _: partly), next(environment.prompts(0)))
        scores.append(result.reward)
    assert 0 < scores[0] < 1
    assert scores[1] == 0


def test_an_agents_held_out_prompts_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    for name, texts in (("train", "abc"), ("test", "xyz")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train, test = (str(tmp_path / f"{name}.jsonl") for name in ("train", "test"))
    environment = AgentProcess(["true"], train, held_out_prompts=test)
    assert sorted(p.data["text"] for p in environment.held_out(0)) == ["x", "y", "z"]
    assert {p.data["text"] for p in islice(environment.prompts(0), 30)} == {"a", "b", "c"}
    with pytest.raises(ValueError, match="held_out_prompts: there is no file"):
        AgentProcess(["true"], train, held_out_prompts=str(tmp_path / "missing"))
    with pytest.raises(ValueError, match="held_out_prompts: is null"):
        next(AgentProcess(["true"], train).held_out(0))


def test_an_environment_that_sets_nothing_aside_says_what_to_set() -> None:
    with pytest.raises(ValueError, match=r"held_out_share: is 0.*set it, to 0\.1"):
        next(ReverseText().held_out(0))
    for share in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match=f"held_out_share: .*got {share}"):
            ReverseText(held_out_share=share)


def test_a_side_of_the_split_that_is_empty_ends_instead_of_searching_for_ever() -> None:
    drawn = itertools.count()

    def same() -> Iterator[str]:
        return ("the only question" for _ in drawn)

    share = 0.5 if Split(0.5).holds_out("the only question") else 0.999
    assert Split(share).holds_out("the only question")
    assert list(Split(share).held_out(same(), str)) == ["the only question"]
    with pytest.raises(ValueError, match="leaves no question to train on"):
        next(Split(share).trained(same(), str))
    assert next(drawn) < 3 * MAX_SKIPPED
