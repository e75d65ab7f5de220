"""A run from what it was asked for to its end: checks, the ranks of this machine, elastic jobs."""
