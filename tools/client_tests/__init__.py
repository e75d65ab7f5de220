"""Test suites of PyTorch, transformers, accelerate and peft, run on a chip and counted."""
