"""What runs beside the GPUs (generation, training, environments) and the thin async RPC to reach it."""
