"""The commands; each is a thin face of the library."""
