"""What is known of one stall of the loop: how long it lasted, and where the loop's thread was meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from controller.sentinel.stacks import Place, culprit_of

UNKNOWN = "unknown"
_COLLECTING = "Sentinel._collecting"


@dataclass(frozen=True)
class Stall:
    culprit: str
    """`file:line in function` of what blocked the loop; "garbage collection of generation <n>"; "unknown"; ... """
    seconds: float
    stack: tuple[Place, ...]
    """Of the loop's thread meanwhile, innermost first; empty when it was over before anyone looked."""

    def __str__(self) -> str:
        return f"the event loop was blocked for {self.seconds:.2f} s at {self.culprit}"


class Samples:
    """The stacks of one stall; the culprit is where it was seen most often."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._stacks: dict[str, tuple[Place, ...]] = {}
        self.told_s = 0.0
        """How long it had lasted when it was reported."""

    def add(self, stack: tuple[Place, ...]) -> None:
        culprit = "garbage collection" if stack[0].function == _COLLECTING else culprit_of(stack)
        self._seen[culprit] += 1
        self._stacks.setdefault(culprit, stack)

    @property
    def culprit(self) -> str:
        return self._seen.most_common(1)[0][0] if self._seen else UNKNOWN

    @property
    def stack(self) -> tuple[Place, ...]:
        return self._stacks.get(self.culprit, ())
