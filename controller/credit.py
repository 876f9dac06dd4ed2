"""How the loss is shared out among the rows of a rollout that has several (`token_capture.trajectory: branches`).

Every row of a rollout has the rollout's advantage; its weight says how much of the rollout it stands for. With one row per
rollout all weights are 1, whatever the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

Credit: TypeAlias = Literal["equal", "per_token", "per_branch"]
Aggregation: TypeAlias = Literal["token_mean", "sequence_mean", "sequence_sum"]


def row_weights(credit: Credit, aggregation: Aggregation, rollouts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The factors of a step's rows, in the shape of `rollouts`: for each trained rollout, the loss tokens of its rows.

    The trainer multiplies its own normaliser by them, which knows rows only: 1/T per token (token_mean), 1/(S n)
    (sequence_mean) or 1/(S M) (sequence_sum), for T loss tokens and S rows in the step, n loss tokens in the row and a
    constant M. With R rollouts, k rows in the row's rollout and N loss tokens in these, a token's factor becomes:

    | | token_mean | sequence_mean | sequence_sum |
    |---|---|---|---|
    | equal | 1/k over the sum of all N/k | 1/(R k n) | 1/(R k M) |
    | per_token | 1/T | 1/(R N) | 1/(R M) |
    | per_branch | 1/T | 1/(S n) | 1/(S M) |
    """
    tokens = sum(map(sum, rollouts))
    rows = sum(map(len, rollouts))
    if credit == "per_branch" or rows == 0:
        return [[1.0] * len(counts) for counts in rollouts]
    if credit == "per_token":
        match aggregation:
            case "token_mean":
                return [[1.0] * len(counts) for counts in rollouts]
            case "sequence_mean":
                return [[rows * n / (len(rollouts) * sum(counts)) for n in counts] for counts in rollouts]
            case "sequence_sum":
                return [[rows / len(rollouts)] * len(counts) for counts in rollouts]
    total = rows / len(rollouts)
    if aggregation == "token_mean":
        total = tokens / sum(sum(counts) / len(counts) for counts in rollouts)
    return [[total / len(counts)] * len(counts) for counts in rollouts]
