"""How many calls one engine is given at the same time: additive increase, multiplicative decrease (Chiu and Jain 1989).

An engine that has more requests than its KV cache holds preempts them and computes their prompts again, so that more calls
yield fewer tokens. The queue is then better kept in the controller, where a call can still go to another engine.
"""

from __future__ import annotations

from workers.generation.engine import EngineStats

DECREASE = 0.75
INCREASE = 1 / 16
"""Of the present limit, rounded up, for each look at an engine without pressure that has all the calls it may have."""
FULL = 0.95
"""Share of the KV cache from which on the next tokens may cost a preemption."""
FLOOR = 4


class CallLimit:
    """`now` is the limit, at most `ceiling`. Without `adapt` it stays there."""

    def __init__(self, ceiling: int = 4096, *, adapt: bool = True) -> None:
        self.now = ceiling
        self._ceiling = ceiling
        self._floor = min(FLOOR, ceiling)
        self._adapt = adapt
        self._preemptions = 0

    def observe(self, stats: EngineStats, outstanding: int) -> None:
        """Take an engine's answer to a probe into account. `outstanding`: calls that it has been given."""
        preempted = stats.preemptions > self._preemptions
        self._preemptions = stats.preemptions
        if not self._adapt:
            return
        crowded = stats.waiting > 0 and stats.kv_usage >= FULL
        queued = stats.waiting > max(stats.running, FLOOR)
        if preempted or crowded or queued:
            # More calls than the limit are there: the last decrease has not taken effect yet.
            if outstanding <= self.now:
                self.now = max(self._floor, int(min(self.now, outstanding) * DECREASE))
        elif outstanding >= self.now:
            self.now = min(self._ceiling, self.now + max(1, int(self.now * INCREASE)))
