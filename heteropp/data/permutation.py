"""A shuffled order that need not be stored: any place of it is computed from the place alone."""

from __future__ import annotations

import math

import numpy as np

ROUNDS = 8


class Permutation:
    """A random permutation of range(count), given by its seeds.

    A Feistel network on pairs of digits below sqrt(count): each round adds to one a hash of the
    other, which can be undone, so no two places meet. Where it leads beyond count it is walked on.
    """

    def __init__(self, count: int, *seeds: int) -> None:
        self.count = count
        self.side = np.uint64(math.isqrt(count - 1) + 1)
        self.keys = np.random.SeedSequence(seeds).generate_state(ROUNDS, np.uint64)

    def at(self, places: np.ndarray) -> np.ndarray:
        """What stands at places of range(count), int64 of any shape."""
        result = self._round_trip(places.astype(np.uint64))
        while (beyond := result >= self.count).any():
            result[beyond] = self._round_trip(result[beyond])
        return result.astype(np.int64)

    def _round_trip(self, values: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, self.side)
        for key in self.keys:
            left, right = right, (left + _hash(right ^ key)) % self.side
        return left * self.side + right


def shuffled(numbers: np.ndarray, count: int, seed: int | None) -> np.ndarray:
    """Which of `count` things, int64, a run takes as its n-th: all of them once in each epoch.

    Without a seed there is one epoch, in the things' own order; -1 stands for what comes after.
    """
    epochs, places = np.divmod(np.asarray(numbers, np.int64), count)
    if seed is None:
        return np.where(epochs == 0, places, -1)
    for epoch in np.unique(epochs):
        own = epochs == epoch
        places[own] = Permutation(count, seed, int(epoch)).at(places[own])
    return places


def _hash(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; below 2^63, so that adding a digit cannot overflow."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(1)
