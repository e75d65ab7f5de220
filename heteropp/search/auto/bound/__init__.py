"""A lower bound on the simulated step of every plan for a request."""

from heteropp.search.auto.bound.beside import BoundBeside
from heteropp.search.auto.bound.step import step_bound_s

__all__ = ["BoundBeside", "step_bound_s"]
