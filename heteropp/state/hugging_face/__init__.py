"""Hugging Face folders of weights: read into any layout, and written from a checkpoint."""
