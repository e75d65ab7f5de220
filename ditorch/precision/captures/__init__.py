"""A run on disk: what a capture holds, and what is made of it in another process."""
