"""Models of the Llama family in Hugging Face folders: what they say, and their weights."""
