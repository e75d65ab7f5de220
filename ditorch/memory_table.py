"""torch.<device>.memory_summary, for every device that ditorch shows."""

from __future__ import annotations


def memory_table(
    allocated_bytes: int, peak_allocated_bytes: int, reserved_bytes: int, peak_reserved_bytes: int
) -> str:
    """A line for each, for people to read."""
    rows = {
        "allocated": allocated_bytes,
        "peak allocated": peak_allocated_bytes,
        "reserved": reserved_bytes,
        "peak reserved": peak_reserved_bytes,
    }
    return "\n".join(f"{name:>14}: {value:15,} bytes" for name, value in rows.items())
