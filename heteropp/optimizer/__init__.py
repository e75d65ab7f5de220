"""How a rank holds parameters, gradients and optimizer state, and updates its shard (ZeRO)."""
