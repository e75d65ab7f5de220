"""What the tools that measure pipelines share: ranks, our executor, and torch's pipelining."""
