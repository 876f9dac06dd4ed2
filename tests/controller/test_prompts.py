"""The prompt source hands out every prompt once, whatever is cancelled, and resumes where it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import anyio
import pytest

from controller.prompts import PromptError, PromptSource
from workers.environments.base import Prompt

pytestmark = pytest.mark.anyio


def numbered(n: int) -> Iterator[Prompt]:
    return (Prompt(id=str(i)) for i in range(n))


async def drain(source: PromptSource) -> list[str]:
    ids: list[str] = []
    while await source.fetch():
        ids.append(source.take().id)
    return ids


async def test_hands_out_each_prompt_once_in_order() -> None:
    source = PromptSource(numbered(4))
    assert await drain(source) == ["0", "1", "2", "3"]
    assert not await source.fetch()
    assert source.drawn == 4


async def test_resumes_with_the_returned_prompts_then_after_the_cursor() -> None:
    source = PromptSource(numbered(6), returned=[Prompt(id="1"), Prompt(id="3")], skip=4)
    assert await drain(source) == ["1", "3", "4", "5"]
    assert source.drawn == 6


async def test_an_iterator_that_does_not_answer_does_not_hold_up_a_cancellation() -> None:
    drawing, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[Prompt]:
        drawing.set()
        go_on.wait(10)
        yield from numbered(2)

    source = PromptSource(slow())
    async with anyio.create_task_group() as tg:
        tg.start_soon(source.fetch)
        await anyio.to_thread.run_sync(drawing.wait)
        tg.cancel_scope.cancel()
    assert not go_on.is_set(), "the cancellation did not wait for the iterator"
    go_on.set()
    assert (source.drawn, source.held) == (0, ()), "what it yields then is drawn anew after a resume"


async def test_an_iterator_that_raises_names_the_place() -> None:
    def broken() -> Iterator[Prompt]:
        yield Prompt(id="0")
        raise KeyError("questions.json")

    source = PromptSource(broken())
    assert await source.fetch()
    source.take()
    with pytest.raises(PromptError, match=r"after 1 prompts: KeyError: 'questions\.json'"):
        await source.fetch()


async def test_something_that_is_no_prompt_is_refused() -> None:
    source = PromptSource(iter(["hello"]))  # type: ignore[list-item]
    with pytest.raises(PromptError, match=r"prompt number 1 is 'hello' of type str"):
        await source.fetch()
