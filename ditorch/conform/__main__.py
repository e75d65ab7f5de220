"""`python -m ditorch.conform`: the conform command by itself."""

import typer

from ditorch.conform.cli import conform

if __name__ == "__main__":
    typer.run(conform)
