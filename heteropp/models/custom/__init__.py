"""Models that a user writes: an embedding, blocks and a head, each a plain nn.Module."""
