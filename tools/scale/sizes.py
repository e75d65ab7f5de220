"""How many ranks the jobs of a series have."""

from __future__ import annotations

FEWEST_SIZES = 3  # two for a law, and one to hold it against
FEWEST_BARE, BARE_SIZES = 32, 4  # with fewer a plan has no data parallelism
TRAINING_SIZES = 4
MACHINE_RANKS = FEWEST_TRAINING = 8  # what a rank has for each of its machine is as in large jobs
MANY = 8192  # of the job that no machine here holds


def doublings(largest: int, count: int, fewest: int) -> list[int]:
    """Returns so many sizes up to the largest, each half the next; none below `fewest`."""
    sizes = [largest >> halvings for halvings in reversed(range(count))]
    return [size for size in sizes if size >= fewest]


def why_too_few(option: str, largest: int, fewest: int) -> str | None:
    """Returns a sentence where jobs up to that size are too few, or are no doublings."""
    least = fewest << (FEWEST_SIZES - 1)
    if largest >= least and largest & (largest - 1) == 0:
        return None
    return f"{option} is {largest}; expected 0 or a power of 2 from {least}"
