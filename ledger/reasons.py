"""Why a rollout is not trained, and why a call failed: every code there is, each with its meaning. The codes are stable."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeAlias

from msgspec import Struct


class _Code(StrEnum):
    meaning: str

    def __new__(cls, code: str, meaning: str) -> _Code:
        member = str.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


FailureClass: TypeAlias = Literal["infra", "data", "capture"]
"""`infra`: machinery. `data`: the prompt, or what the environment did with it. `capture`: custody that cannot be proven."""


class Reason(_Code):
    """Why a rollout is rejected: its tokens cannot be proven to be what the agent's scored conversation was."""

    NO_CALLS = "no_calls", "the rollout made no model call that the gate accepted"
    NOT_SEALED = "not_sealed", "the rollout is still open, so its record can still grow"
    ABORTED = "aborted", "the controller gave the rollout up"
    ROLLOUT_TIMEOUT = "rollout_timeout", "the rollout did not end within its deadline"
    TURN_TIMEOUT = "turn_timeout", "the environment took longer than its deadline between two model calls"
    ENVIRONMENT_FAILED = (
        "environment_failed",
        "the environment raised at this rollout, or returned what cannot be trained on",
    )
    UNSETTLED_CALL = (
        "unsettled_call",
        "a call was admitted and neither committed nor failed before the rollout was sealed",
    )
    CALL_FAILED = "call_failed", "a call failed where the conversation may have been meant to end"
    UNKNOWN_TERMINAL = "unknown_terminal", "the declared terminal is no call of this rollout"
    AMBIGUOUS_TERMINAL = "ambiguous_terminal", "no terminal was declared and the calls do not single one out"
    CONFLICTING_WITNESSES = (
        "conflicting_witnesses",
        "what the environment says of the scored answer names several conversations",
    )

    FOREIGN_CALL = "foreign_call", "the chain holds a call of another rollout"
    BROKEN_CHAIN = "broken_chain", "the chain is not one conversation from its root to the terminal call"
    EMPTY_GENERATION = "empty_generation", "a call in the chain generated no token"
    WRONG_STAGING_KEY = "wrong_staging_key", "a staging key does not belong to its call and digest"
    WRONG_EXTRAS_DIGEST = (
        "wrong_extras_digest",
        "the weight spans, finish reason or shape of the routes are not those that were captured",
    )

    MISSING_ROW = "missing_row", "a staged row of the chain is gone"
    ROWS_UNAVAILABLE = "rows_unavailable", "the data plane did not give the staged rows within its deadlines"
    MALFORMED_ROW = (
        "malformed_row",
        "a staged row has a column of the wrong shape or type, or a negative token id, or another row came in its place",
    )
    WRONG_LENGTH = "wrong_length", "a staged row is not as long as its call's delta"
    WRONG_MASK = "wrong_mask", "a staged mask is not zeros on the prompt, then ones on the generated tokens"
    BAD_LOGPROBS = "bad_logprobs", "a generated token's logprob is not finite or is positive, or a prompt token has one"
    WRONG_VERSIONS = "wrong_versions", "the weight versions do not match the call's weight spans"
    WRONG_CHAIN_HASH = "wrong_chain_hash", "the staged tokens do not extend the parent's chain hash to the recorded one"
    WRONG_CUMULATIVE_HASH = "wrong_cumulative_hash", "the conversation's tokens do not hash to the recorded value"
    WRONG_DIGEST = "wrong_digest", "a staged row does not hash to its call's digest"
    WRONG_ROUTES = (
        "wrong_routes",
        "the routed experts are not those that were captured, or only some calls of the chain have them",
    )

    NO_TOKENS = "no_tokens", "token capture is off and the environment returned no tokens"
    BAD_TOKENS = "bad_tokens", "token capture is off and the environment's tokens have an impossible shape or range"

    NOT_PUBLISHED = "not_published", "the data plane did not take the verified row within its deadlines"
    NO_VALID_ROLLOUT = "no_valid_rollout", "no rollout of the group could be verified, so the group is dropped"
    PROMPT_FAILED = (
        "prompt_failed",
        "the environment raised at too many rollouts of the prompt, so the group is dropped",
    )

    @property
    def of_the_rollout(self) -> bool:
        """The rollout itself came to no good end; nothing was wrong with its custody."""
        return self in _OF_THE_ROLLOUT

    @property
    def failure_class(self) -> FailureClass:
        """Whose failure it is, where the rejection does not know it better."""
        if self in _INFRA:
            return "infra"
        return "data" if self in _DATA else "capture"


_INFRA = frozenset({Reason.ABORTED, Reason.CALL_FAILED, Reason.ROWS_UNAVAILABLE, Reason.NOT_PUBLISHED})
_DATA = frozenset(
    {
        Reason.NO_CALLS,
        Reason.ROLLOUT_TIMEOUT,
        Reason.TURN_TIMEOUT,
        Reason.ENVIRONMENT_FAILED,
        Reason.NO_TOKENS,
        Reason.BAD_TOKENS,
        Reason.PROMPT_FAILED,
    }
)
_OF_THE_ROLLOUT = frozenset(
    {
        Reason.NO_CALLS,
        Reason.ABORTED,
        Reason.ROLLOUT_TIMEOUT,
        Reason.TURN_TIMEOUT,
        Reason.ENVIRONMENT_FAILED,
        Reason.CALL_FAILED,
    }
)


class CallFailure(_Code):
    """Why a call failed. A failed call was never answered, so no conversation can contain it."""

    REFUSED = "refused", "the request itself is not acceptable (too long, malformed); nothing was sampled"
    GENERATION_FAILED = "generation_failed", "the worker failed or was lost"
    CAPTURE_FAILED = (
        "capture_failed",
        "the exact tokens could not be kept: the parent's are gone or others, the template cannot continue them, "
        "or what the engine gave with them is malformed",
    )
    STAGING_FAILED = "staging_failed", "the tokens were sampled and could not be staged"
    TIMEOUT = "timeout", "no answer within the call's deadline"
    CANCELLED = "cancelled", "the caller stopped waiting"
    INVALID_COORDS = "invalid_coords", "the worker's answer contradicts the request or itself"

    @property
    def failure_class(self) -> FailureClass:
        match self:
            case CallFailure.REFUSED:
                return "data"
            case CallFailure.CAPTURE_FAILED | CallFailure.INVALID_COORDS:
                return "capture"
            case _:
                return "infra"


class Rejection(Struct, frozen=True):
    """A rollout's rejection, or a link's: the code for programs, the detail for people."""

    reason: Reason
    detail: str
    call: CallFailure | None = None
    """How the call failed, where that is the reason."""

    @property
    def failure_class(self) -> FailureClass:
        return self.reason.failure_class if self.call is None else self.call.failure_class
