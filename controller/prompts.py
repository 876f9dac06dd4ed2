"""The prompt source: hands out each prompt of an iterator once, and says where to go on after a resume.

Invariant: a prompt that was drawn from the iterator is either handed out or still held here, whatever is cancelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import anyio.to_thread

from workers.environments.base import Prompt


class PromptError(Exception):
    """The prompt iterator raised, or yielded something that is not a `Prompt`."""


class PromptSource:
    """Draws prompts in a thread, so that a slow generator does not block the loop. One consumer.

    `returned` are prompts to hand out first (in flight when the run was checkpointed); `skip` is how many the iterator
    yields that were consumed before.
    """

    def __init__(self, prompts: Iterator[Prompt], *, returned: Iterable[Prompt] = (), skip: int = 0) -> None:
        self._prompts = prompts
        self._held: deque[Prompt] = deque(returned)
        self._skip = skip
        self.drawn = 0
        """Prompts drawn from the iterator, skipped ones included: the cursor to resume from."""

    @property
    def held(self) -> tuple[Prompt, ...]:
        """Drawn but not handed out."""
        return tuple(self._held)

    async def fetch(self) -> bool:
        """Make sure `take` has a prompt; False when the iterator is exhausted.

        Raises PromptError. After a cancellation nothing more may be fetched; a prompt that was being drawn does not count as
        drawn.
        """
        if not self._held:
            # Abandoned on a cancellation: an iterator may never answer. What it then yields is drawn anew after a resume.
            self.drawn, prompt = await anyio.to_thread.run_sync(self._draw, self.drawn, abandon_on_cancel=True)
            if prompt is not None:
                self._held.append(prompt)
        return bool(self._held)

    def take(self) -> Prompt:
        """Hand out the next prompt; `fetch` must have returned True."""
        return self._held.popleft()

    def _draw(self, drawn: int) -> tuple[int, Prompt | None]:
        """How many were drawn then, and the prompt; None at the end."""
        while True:
            try:
                prompt = next(self._prompts)
            except StopIteration:
                if drawn == 0:
                    raise PromptError("the prompt iterator yielded no prompt at all: is the data set empty?") from None
                return drawn, None
            except Exception as e:
                raise PromptError(f"the prompt iterator raised after {drawn} prompts: {type(e).__name__}: {e}") from e
            drawn += 1
            if not isinstance(prompt, Prompt):  # pyright: ignore[reportUnnecessaryIsInstance]  # user code
                raise PromptError(
                    f"prompt number {drawn} is {prompt!r} of type {type(prompt).__name__}; "
                    "an environment's prompts() must yield controller.Prompt objects"
                )
            if drawn > self._skip:
                return drawn, prompt
