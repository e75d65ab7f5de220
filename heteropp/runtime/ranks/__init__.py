"""The processes: how they start, what they run on, how they reach and watch each other."""
