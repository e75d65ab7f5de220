"""The commands; each is a thin face of the library.

The top of a command's module imports what --help needs: typer, rich and the names of choices. What
the command does is imported in the functions that do it, so that help comes at once.
"""
