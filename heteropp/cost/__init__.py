"""Time and memory of a stage: from traces of its modules, chip files or profiles."""
