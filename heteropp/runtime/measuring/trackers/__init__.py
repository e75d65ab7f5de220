"""Where the steps' figures go beside metrics.jsonl: a module for each service, of that name.

A module has a class TRACKER, which opens the service for a run's folder, has `step(metrics)` for
every step and `close()`. What the class cannot open it says in a TrackingError.
"""
