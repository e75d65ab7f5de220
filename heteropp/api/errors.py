"""Errors of what a caller gives, one sentence each."""

from __future__ import annotations


class InputError(ValueError):
    """What was asked for cannot be done; the message is one sentence."""


class TrainingError(RuntimeError):
    """A run ended before its last step; the message is one sentence."""
