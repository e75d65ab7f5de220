"""Running a plan: the ranks, their stage's module, actions, messages, updates and checkpoints."""
