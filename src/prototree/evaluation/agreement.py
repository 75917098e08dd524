"""Answers beside the classes that a list says: how many are right, and what is taken for what. No torch here."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from prototree.evaluation.tables import Table, percent

_MOST = 3  # other answers named for each class


@dataclass
class Agreement:
    """Counts answers as they come; an answer of None is "I don't know"."""

    class_names: Sequence[str]
    pairs: Counter[tuple[str, str | None]] = field(default_factory=Counter)  # class and answer
    unknown: Counter[str] = field(default_factory=Counter)  # labels that the tree has no class for

    def add(self, truth: str, answer: str | None) -> None:
        if truth in self.class_names:
            self.pairs[truth, answer] += 1
        else:
            self.unknown[truth] += 1

    @property
    def n_photos(self) -> int:
        return self.pairs.total()

    @property
    def n_answered(self) -> int:
        return sum(count for (_, answer), count in self.pairs.items() if answer is not None)

    @property
    def n_right(self) -> int:
        return sum(count for (truth, answer), count in self.pairs.items() if truth == answer)

    def words(self) -> list[str]:
        """The figures as sentences."""
        said = []
        if self.n_photos:
            coverage = f"{self.n_right} of {self.n_answered} answers are right"
            share = f" ({percent(self.n_right / self.n_answered, 1)})" if self.n_answered else ""
            silent = self.n_photos - self.n_answered
            photos = "photo" if silent == 1 else "photos"
            said.append(f"{coverage}{share}" + (f"; no answer for {silent} {photos}" if silent else ""))
        if self.unknown:
            names = ", ".join(map(repr, list(self.unknown)[:_MOST])) + (", …" if len(self.unknown) > _MOST else "")
            said.append(f"photos not counted: {self.unknown.total()} (the tree has no class {names})")
        return said

    def table(self) -> Table:
        """Each class with its accuracy, the hardest first, and what it is taken for."""
        rows = []
        for name in self.class_names:
            given = Counter({answer: n for (truth, answer), n in self.pairs.items() if truth == name})
            if total := given.total():
                right = given.pop(name, 0)
                wrong = [f"{answer or 'no answer'} ({n})" for answer, n in given.most_common(_MOST)]
                rows.append((right / total, (name, percent(right / total, 1), str(total), ", ".join(wrong) or "–")))
        rows.sort(key=lambda row: row[0])
        header = ("class", "right", "photos", "taken for")
        return Table("what each class is taken for", header, tuple(row for _, row in rows))
