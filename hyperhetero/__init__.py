"""What every command of the house shares; it knows nothing of the packages that stand on it."""
