"""Training data: documents to a token file, and the sequences that every layout reads from it."""
