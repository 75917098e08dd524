"""The three ways to decide (§5.3), by name; apart from `routing`, so that pages need no torch to speak of them."""

from typing import Literal, get_args

Strategy = Literal["soft", "max_path", "greedy"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
HARD: tuple[Strategy, ...] = ("max_path", "greedy")
"""Those that follow one path."""
