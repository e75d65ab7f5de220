"""The Llama family: its parameters, its stages as modules, and its Hugging Face folders."""
