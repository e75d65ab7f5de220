"""What a stage computes: its module, forward and backward."""
