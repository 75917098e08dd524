"""How much memory a tree is given while it grows and learns, and what it is spent on."""

from dataclasses import dataclass

_BYTES = 4  # of a number


@dataclass(frozen=True)
class Room:
    """Shares of one amount, in numbers. What is larger is left out, put in a file, or computed again when needed.

    The network, a batch and the tree itself come on top of it.
    """

    gigabytes: float = 1.4

    @property
    def maps(self) -> int:
        """Of feature maps that the first prototypes are chosen from; two maps of every class in any case."""
        return self._share(8)

    @property
    def pairs(self) -> int:
        """Distances of views to candidates; where there are more, each node of the tree compares a few of its own."""
        return self._share(4)

    @property
    def distances(self) -> int:
        """Distances of photos to prototypes; where there are more, they are measured in every sweep."""
        return self._share(1)

    @property
    def targets(self) -> int:
        """A teacher's answers; where there are more, they are in a file."""
        return self._share(1)

    def _share(self, parts: int) -> int:
        return round(self.gigabytes * 1e9 / _BYTES * parts / 14)


USUAL_ROOM = Room()
