"""Layers cut over tensor-parallel ranks, and a backward whose weight gradients can wait."""
