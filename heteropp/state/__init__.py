"""Slices of a run: checkpoints, snapshots for recovery, and moves from one plan to another."""
