"""python -m dicomm: the `dicomm` command."""

from dicomm.cli import main

main()
