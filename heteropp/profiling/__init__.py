"""Measuring chips and links for a profile, and fitting a chip's efficiency to published rates."""
