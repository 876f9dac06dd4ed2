from __future__ import annotations

from itertools import islice

import pytest

from examples.my_environment import SecondChance
from tests.workers.environments.scripted import ScriptedContext
from workers.environments.base import Prompt
from workers.environments.registry import BadEnvironment, make_environment

pytestmark = pytest.mark.anyio

PROMPT = Prompt(id="p", data={"word": "abcd"})


async def test_the_first_answer_earns_all_when_it_is_right() -> None:
    context = ScriptedContext(lambda _: "dcba")
    result = await SecondChance().rollout(context, PROMPT)
    assert (result.reward, result.metrics) == (1.0, {"solved": 1.0, "attempts": 1.0})
    assert len(context.calls) == 1


async def test_a_second_answer_continues_the_conversation_and_earns_less() -> None:
    context = ScriptedContext(lambda messages: "dcbx" if len(messages) == 1 else "dcba")
    result = await SecondChance(discount=0.5).rollout(context, PROMPT)
    assert (result.reward, result.metrics) == (0.5, {"solved": 1.0, "attempts": 2.0})
    assert [(m.role, m.content) for m in context.calls[1]] == [
        ("user", "Reverse: abcd"),
        ("assistant", "dcbx"),
        ("user", "Reverse: abcd"),
    ]


async def test_after_the_last_attempt_the_part_that_is_right_counts() -> None:
    context = ScriptedContext(lambda _: "dcbx")
    result = await SecondChance(attempts=3, discount=0.5).rollout(context, PROMPT)
    assert result.reward == 0.75 * 0.25
    assert len(context.calls) == 3


def test_its_prompts_follow_from_the_seed() -> None:
    first, again = (list(islice(SecondChance().prompts(5), 20)) for _ in range(2))
    assert first == again


def test_a_configuration_makes_it_and_its_arguments_are_checked() -> None:
    assert isinstance(make_environment("examples.my_environment:SecondChance", {"attempts": 3}), SecondChance)
    with pytest.raises(BadEnvironment, match="attempts: at least 1; got 0"):
        make_environment("examples.my_environment:SecondChance", {"attempts": 0})
