"""tools/gpu-check: its parts, each a process of its own with a time limit."""
