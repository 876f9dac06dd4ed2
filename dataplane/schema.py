"""The two partitions of a run and their columns."""

from __future__ import annotations

STAGING = "staging"
"""One row per model call: the call's token delta as captured beside the engine (see `TokenDelta`)."""
STAGING_COLUMNS = ("token_ids", "token_mask", "logprobs", "weight_versions")

TRAIN = "train"
"""One row per verified rollout, ready for the trainer."""
TRAIN_COLUMNS = ("input_ids", "loss_mask", "rollout_logprobs", "weight_versions")
