"""`python -m weft`: the command `weft`, where scripts are not on the path."""

from .tools.cli import main

main(prog_name="weft")
