"""Whether a chip does what PyTorch expects of a device: its runtime and PyTorch's operators."""
