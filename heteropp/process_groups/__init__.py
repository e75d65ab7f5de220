"""What ranks say to each other through torch.distributed: collectives, and control messages."""
