from __future__ import annotations

from itertools import islice

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.environments.scripted import ScriptedContext
from workers.environments.base import Prompt
from workers.environments.reverse_text import ReverseText, position_match, question

pytestmark = pytest.mark.anyio

texts = st.text(alphabet="abc", max_size=6)


@pytest.mark.parametrize(
    ("answer", "target", "reward"),
    [
        ("cba", "cba", 1.0),
        ("cbx", "cba", 2 / 3),
        ("bac", "cba", 0.0),
        ("cb", "cba", 2 / 3),
        ("cbaa", "cba", 3 / 4),
        ("", "cba", 0.0),
        ("CBA", "cba", 0.0),
        ("", "", 1.0),
    ],
)
def test_the_reward_is_the_share_of_matching_positions(answer: str, target: str, reward: float) -> None:
    assert position_match(answer, target) == pytest.approx(reward)


@given(texts, texts)
def test_the_reward_is_a_share_and_is_one_for_the_right_answer_only(answer: str, target: str) -> None:
    reward = position_match(answer, target)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (answer == target)


@given(texts.filter(bool), st.text(alphabet="abc", min_size=1, max_size=3))
def test_surplus_letters_cost(target: str, surplus: str) -> None:
    assert position_match(target + surplus, target) < 1.0


def test_a_seed_names_one_sequence_of_prompts() -> None:
    first, again, other = (list(islice(ReverseText().prompts(seed), 50)) for seed in (3, 3, 4))
    assert first == again
    assert [p.data for p in first] != [p.data for p in other]
    assert len({p.id for p in first}) == 50


@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 2**40))
def test_words_have_the_configured_lengths(shortest: int, more: int, seed: int) -> None:
    environment = ReverseText(min_length=shortest, max_length=shortest + more)
    for prompt in islice(environment.prompts(seed), 30):
        word = prompt.data["word"]
        assert shortest <= len(word) <= shortest + more
        assert word.isascii()
        assert word.islower()
        assert msgspec.json.decode(msgspec.json.encode(prompt), type=Prompt) == prompt


@pytest.mark.parametrize(("shortest", "longest"), [(0, 4), (5, 4), (-1, -1)])
def test_impossible_lengths_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ValueError, match=f"min_length={shortest}, max_length={longest}"):
        ReverseText(min_length=shortest, max_length=longest)


async def test_a_rollout_asks_once_and_scores_the_answer() -> None:
    prompt = Prompt(id="p", data={"word": "abcd"})
    right, near = ScriptedContext(lambda _: "dcba"), ScriptedContext(lambda _: "dcbb")

    perfect = await ReverseText().rollout(right, prompt)
    partial = await ReverseText().rollout(near, prompt)

    assert [[(m.role, m.content) for m in call] for call in right.calls] == [[("user", question("abcd"))]]
    assert (perfect.reward, perfect.metrics) == (1.0, {"exact": 1.0})
    assert (partial.reward, partial.metrics) == (0.75, {"exact": 0.0})


async def test_an_answer_without_content_scores_nothing() -> None:
    result = await ReverseText().rollout(ScriptedContext(lambda _: None), Prompt(id="p", data={"word": "abcd"}))
    assert result.reward == 0.0
