"""A plan on predicted times: simulate.py runs it, expectation.py says what a rank may expect."""
