"""``python -m graphpipe`` is the command line."""

from graphpipe.cli import main

main()
