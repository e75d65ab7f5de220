"""The default planner: the plan of the least simulated step that fits, on the chips that help."""

from heteropp.search.auto.search import search

__all__ = ["search"]
