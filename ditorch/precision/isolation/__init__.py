"""Which operator bends the loss: a script run again and again, with operators on the host."""
