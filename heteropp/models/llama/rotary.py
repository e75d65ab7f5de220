"""The angles of rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heteropp.models.llama.model import LlamaModel


def rotary_frequencies(model: LlamaModel) -> Tensor:
    """Radians per position by which each pair of a head is turned: [head size / 2], float64."""
    half = model.head_size // 2
    frequency = model.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    scaling = model.rope_scaling
    if scaling is None:
        return frequency
    # Llama 3.1: wavelengths that the first, shorter context held many times keep theirs, those
    # that it hardly held grow by the factor, and those in between by something in between
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling.factor)
