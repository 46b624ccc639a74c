"""``python -m promptmill``: the command line, also where the console script's path cannot be run."""

from promptmill.cli.main import main

main()
