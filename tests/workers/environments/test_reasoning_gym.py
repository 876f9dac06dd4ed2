from __future__ import annotations

from itertools import islice
from typing import Any

import anyio
import msgspec
import pytest

from ledger.records import Message
from tests.workers.environments.scripted import ScriptedContext
from workers.environments import reasoning_gym as adapter
from workers.environments.base import Prompt
from workers.environments.reasoning_gym import ReasoningGym, extract_answer

reasoning_gym = pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.anyio

HANG_GUARD_S = 120

# Among them: the default scorer and tasks' own ones, a scorer that compares tuples (arc_agi), one that parses mathematics.
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3},
    "spell_backward": {"min_word_len": 4, "max_word_len": 8},
    "basic_arithmetic": {},
    "countdown": {},
    "arc_agi": {},
    "gsm_symbolic": {},
    "polynomial_equations": {},
    "mini_sudoku": {},
}


def solution(task: str, args: dict[str, Any], seed: int, index: int) -> str:
    return reasoning_gym.create_dataset(task, seed=seed, size=10_000, **args)[index]["answer"]


async def test_the_right_answer_scores_one_and_a_wrong_one_less_in_every_task() -> None:
    with anyio.fail_after(HANG_GUARD_S):
        for task, args in TASKS.items():
            environment = ReasoningGym(task, task_args=args)
            for index, prompt in enumerate(islice(environment.prompts(7), 2)):
                right = solution(task, args, 7, index)
                result = await environment.rollout(ScriptedContext(lambda _, text=right: text), prompt)
                assert (result.reward, result.metrics) == (1.0, {"exact": 1.0, "unscored": 0.0}), task
                wrong = await environment.rollout(ScriptedContext(lambda _: "no idea"), prompt)
                assert 0.0 <= wrong.reward < 1.0, task
                assert wrong.metrics["exact"] == 0.0, task


async def test_the_question_is_the_prompt_after_the_system_prompt() -> None:
    environment = ReasoningGym("chain_sum", system_prompt="Only the number.", answer="last_number")
    prompt = next(environment.prompts(0))
    context = ScriptedContext(lambda _: "nothing to score")

    result = await environment.rollout(context, prompt)

    assert context.calls == [
        [Message(role="system", content="Only the number."), Message(role="user", content=prompt.data["question"])]
    ]
    assert (result.reward, result.metrics) == (0.0, {"exact": 0.0, "unscored": 0.0})


async def test_an_answer_on_which_the_scorer_fails_scores_zero_and_is_counted() -> None:
    environment = ReasoningGym("prime_factorization")
    result = await environment.rollout(ScriptedContext(lambda _: "hello"), next(environment.prompts(0)))
    assert (result.reward, result.metrics) == (0.0, {"exact": 0.0, "unscored": 1.0})


async def test_an_answer_on_which_the_scorer_never_ends_scores_zero_and_is_counted() -> None:
    environment = ReasoningGym("countdown", score_timeout_s=5)
    with anyio.fail_after(HANG_GUARD_S):
        result = await environment.rollout(ScriptedContext(lambda _: "9**9**9**9**9"), next(environment.prompts(0)))
    assert (result.reward, result.metrics) == (0.0, {"exact": 0.0, "unscored": 1.0})


async def test_a_task_that_generates_another_entry_when_asked_again_is_an_error_with_its_remedy() -> None:
    environment = ReasoningGym("chain_sum")
    prompt = next(environment.prompts(0))
    other = Prompt(id=prompt.id, data={**prompt.data, "question": "What is something else?"})
    with pytest.raises(RuntimeError, match="PYTHONHASHSEED=0"):
        await environment.rollout(ScriptedContext(lambda _: "1"), other)


def test_a_seed_names_one_sequence_of_json_like_prompts() -> None:
    first, again, other = (list(islice(ReasoningGym("chain_sum").prompts(seed), 20)) for seed in (1, 1, 2))
    assert first == again
    assert [p.data["question"] for p in first] != [p.data["question"] for p in other]
    assert len({p.id for p in first}) == 20
    assert msgspec.json.decode(msgspec.json.encode(first), type=list[Prompt]) == first


def test_size_ends_the_prompts() -> None:
    assert len(list(ReasoningGym("chain_sum", size=3).prompts(0))) == 3


def test_an_endless_sequence_goes_on_seamlessly_where_one_data_set_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(islice(ReasoningGym("chain_sum").prompts(5), 9))
    for cached in (adapter._draw, adapter._dataset):
        cached.cache_clear()
    monkeypatch.setattr(adapter, "_CHUNK", 4)
    assert list(islice(ReasoningGym("chain_sum").prompts(5), 9)) == whole


@pytest.mark.parametrize(
    ("form", "text", "answer"),
    [
        ("text", "  42\n", "42"),
        ("text", " \n", None),
        ("last_number", "3 + 4 = 7.", "7"),
        ("last_number", "it is -12", "-12"),
        ("last_number", "5-3", "3"),
        ("last_number", "about 1,234,567.5 dollars", "1234567.5"),
        ("last_number", "1, 2", "2"),
        ("last_number", "none", None),
        ("tag", "<answer>1</answer> no: <answer>\n2 </answer>!", "2"),
        ("tag", "<answer>two\nlines</answer>", "two\nlines"),
        ("tag", "<answer></answer>", None),
        ("tag", "<answer>open", None),
    ],
)
def test_the_answer_is_taken_from_the_completion(form: Any, text: str, answer: str | None) -> None:
    assert extract_answer(text, form) == answer


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"task": "chain_summ"}, "no task 'chain_summ'; the nearest names are chain_sum"),
        ({"task": "chain_sum", "task_args": {"min_term": 1}}, "task_args.min_term: .*it takes .*min_terms"),
        ({"task": "chain_sum", "task_args": {"seed": 1}}, "task_args.seed"),
        ({"task": "chain_sum", "task_args": {"min_terms": 5, "max_terms": 2}}, "task_args: not what .* allows"),
        ({"task": "chain_sum", "task_args": {"min_terms": "many"}}, "task_args: not what .* allows"),
        ({"task": "chain_sum", "size": 0}, "size: at least 1"),
        ({"task": "chain_sum", "score_timeout_s": 0}, "score_timeout_s"),
    ],
)
def test_mistakes_are_found_at_once(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        ReasoningGym(**arguments)
