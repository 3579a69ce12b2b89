"""`python -m orbit_cli` is `orbit`."""

from orbit_cli.cli import main

main()
