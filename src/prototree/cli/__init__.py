"""The command line: parse, call, print. Nothing here imports torch before a command needs it."""

from prototree.cli import data, inspect, predict, train  # noqa: F401  (each adds its commands)
from prototree.cli.app import app, main

__all__ = ["app", "main"]
