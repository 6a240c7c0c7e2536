"""`python -m virtshim`."""

from virtshim.cli.main import main

main()
