"""Training that goes on while chips come and go: generations, and what decides on them."""
