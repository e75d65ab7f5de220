"""PyTorch's own c10d tests, run on the backend "dicomm" and counted."""

GATES = ("dicomm", "gloo", "mpi")  # as whose the tests are tried, in turn; see gated.py
