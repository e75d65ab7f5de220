"""Imports what numpy and torch would import in the middle of a rank's first step.

That is half a second of a core in each rank. Reading sequences needs numpy's parts, and the
backward of a given gradient torch's. The launcher, which only names what ranks call, does without.
"""
# ruff: noqa: F401

import numpy.ma
import numpy.random
import torch.fx.experimental.symbolic_shapes
