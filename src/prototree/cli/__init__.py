"""The command line: parse, call, print. Nothing here imports torch before a command needs it.

The top floor: may import everything.
"""

from prototree.cli import data, inspect, predict, share, train  # noqa: F401  (each adds its commands)
from prototree.cli.console import app, main

__all__ = ["app", "main"]
