"""Neural prototype trees: image classifiers that can be read in full."""

from prototree._version import __version__

__all__ = ["__version__"]
