"""What tools/scale-bench measures: ranks in C++, ranks that train, and the laws of their growth."""


class Failed(Exception):
    """A job, or a part of it, that did not do what it should; the message is one sentence."""
