"""The partitions of a run and their columns."""

from __future__ import annotations

STAGING = "staging"
"""One row per model call: the call's token delta as captured beside the engine (see `TokenDelta`)."""
STAGING_COLUMNS = ("token_ids", "token_mask", "logprobs", "weight_versions")

TRAIN = "train"
"""One row per proven conversation, ready for the trainer."""
TRAIN_COLUMNS = ("input_ids", "loss_mask", "rollout_logprobs", "weight_versions")

HEALTH = "health"
"""Probes that a health check puts, reads and clears."""

PARTITIONS = (STAGING, TRAIN, HEALTH)

ROUTED_EXPERTS = "routed_experts"
"""Optional, in both partitions: the experts that each token was routed to, int16 [tokens * layers * topk], -1 where the
engine knew none."""
ROUTES_SHAPE = "routes_shape"
"""Beside it in the train partition: int32 [2], layers and topk. For staged rows the ledger's coordinates say so."""
