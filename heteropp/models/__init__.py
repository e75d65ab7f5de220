"""What is trained: a folder for each family, and the tensor-parallel layers that they share."""
