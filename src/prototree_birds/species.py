"""Made-up bird species: families of near look-alikes that differ in one or two parts.

A species is one `Look` (shape, colour, pattern, accent) per part. Each family starts from a hand-made bird;
every further member copies an earlier member of its family and changes one or two parts, so that telling
species apart needs a look at the parts and not at the overall colour.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from prototree.errors import ConfigError

PART_NAMES = ("beak", "crest", "eye ring", "head", "body", "belly", "wing", "tail", "legs")
MIN_SPECIES, MAX_SPECIES = 2, 100

Colour = tuple[int, int, int]

PALETTE: dict[str, Colour] = {
    "red": (200, 54, 48), "orange": (233, 124, 42), "yellow": (244, 202, 62), "green": (104, 150, 70),
    "teal": (42, 142, 142), "blue": (58, 108, 186), "violet": (126, 86, 160), "rose": (226, 134, 152),
    "rust": (168, 84, 48), "brown": (122, 90, 64), "cream": (242, 226, 190), "white": (248, 246, 240),
    "grey": (146, 152, 160), "black": (54, 52, 60),
}  # fmt: skip

# Distances of colours: told apart in two images, and seen beside each other in one.
_CLEARLY_DIFFERENT = 105
_CONTRASTING = 130


@dataclass(frozen=True)
class Look:
    """How one part looks; `shape` "none" means that the bird has no such part."""

    shape: str
    colour: str
    pattern: str = "plain"
    accent: str = ""


@dataclass(frozen=True)
class Species:
    """A kind of bird: a name and one look per entry of `PART_NAMES`."""

    name: str
    looks: tuple[Look, ...]

    def look(self, part: str) -> Look:
        """The look of the part of that name."""
        return self.looks[PART_NAMES.index(part)]


@dataclass(frozen=True)
class _Choices:
    """What a part may change into; patterns need an accent colour, except "plain"."""

    shapes: tuple[str, ...]
    colours: tuple[str, ...]
    patterns: tuple[str, ...] = ("plain",)
    accents: tuple[str, ...] = ()


_FEATHERS = tuple(colour for colour in PALETTE if colour not in ("cream", "white"))
_CHOICES: dict[str, _Choices] = {
    "beak": _Choices(("cone", "needle", "hook", "sickle", "dagger"), ("orange", "yellow", "red", "black", "grey")),
    "crest": _Choices(("none", "tuft", "spikes", "fan", "plume"),
                      ("red", "orange", "yellow", "blue", "violet", "white", "black")),
    "eye ring": _Choices(("none", "ring", "stripe"), ("white", "yellow", "red", "black", "blue")),
    "head": _Choices(("round",), (*_FEATHERS, "cream", "white"), ("plain", "cap", "cheek"),
                     ("black", "white", "red", "blue", "rust")),
    "body": _Choices(("round",), _FEATHERS),
    "belly": _Choices(("round",), ("red", "orange", "yellow", "green", "rose", "rust", "cream", "white", "grey", "blue",
                                   "violet"),
                      ("plain", "spots", "streaks", "band"), ("black", "brown", "white", "red", "blue")),
    # Rounded or pointed wings belong to the family: over a tail of their colour they look alike.
    "wing": _Choices((), _FEATHERS, ("plain", "bars", "patch", "tips"), ("white", "yellow", "black", "red", "blue")),
    "tail": _Choices(("square", "forked", "long", "fan"), _FEATHERS, ("plain", "banded", "tips"),
                     ("white", "yellow", "black", "red")),
    "legs": _Choices(("bare",), ("orange", "yellow", "red", "black", "grey", "rose", "blue")),
}  # fmt: skip

# Legs are too thin, and the back is too much hidden, to be the only difference.
_PARTS_TO_CHANGE = tuple(part for part in PART_NAMES if part not in ("body", "legs"))


def _base(*looks: str) -> tuple[Look, ...]:
    return tuple(Look(*look.split()) for look in looks)


# Hand-made birds, one per family, in the order of PART_NAMES; each has parts that go together.
_BASES = (
    _base("needle black", "none black", "stripe black", "round white cap blue", "round green", "round yellow",
          "rounded blue bars white", "square blue", "bare grey"),
    _base("cone orange", "tuft red", "none white", "round red", "round brown", "round rose",
          "rounded rust", "long red", "bare brown"),
    _base("sickle black", "fan orange tips black", "none white", "round orange", "round rust", "round cream",
          "rounded black bars white", "square black banded white", "bare grey"),
    _base("needle black", "none black", "ring white", "round brown", "round brown", "round orange",
          "rounded brown", "square brown", "bare rose"),
    _base("dagger black", "spikes blue", "none white", "round teal cheek white", "round teal", "round rust",
          "rounded blue", "square teal", "bare red"),
    _base("cone yellow", "none black", "ring yellow", "round grey", "round grey", "round cream spots brown",
          "rounded brown bars white", "fan grey", "bare orange"),
    _base("sickle black", "plume violet", "none white", "round violet", "round green", "round yellow",
          "pointed green", "forked violet", "bare black"),
    _base("cone black", "tuft rust", "stripe black", "round rust", "round grey", "round rose",
          "pointed grey patch yellow", "square grey tips yellow", "bare black"),
    _base("needle black", "none black", "none white", "round blue cheek rust", "round blue",
          "round white band blue", "pointed blue", "forked blue", "bare grey"),
    _base("hook grey", "spikes yellow", "ring blue", "round green", "round green", "round red",
          "pointed teal patch yellow", "long teal tips yellow", "bare grey"),
)  # fmt: skip


def colour_distance(first: str, second: str) -> float:
    """Distance of two palette colours in RGB."""
    return float(np.linalg.norm(np.subtract(PALETTE[first], PALETTE[second])))


def differing_parts(first: Species, second: Species) -> tuple[str, ...]:
    """Names of the parts in which two species look different, in the order of `PART_NAMES`."""
    # Colours of a part that is not there are no difference.
    pairs = zip(PART_NAMES, first.looks, second.looks, strict=True)
    return tuple(part for part, a, b in pairs if a != b and not a.shape == b.shape == "none")


def make_species(n: int, seed: int) -> tuple[Species, ...]:
    """`n` species in families of about four; each has a relative that differs in one or two parts."""
    if not MIN_SPECIES <= n <= MAX_SPECIES:
        raise ConfigError(f"n_species must lie in {MIN_SPECIES} to {MAX_SPECIES}, got {n}; choose another number")
    rng = np.random.default_rng([seed, n])
    n_families = min(len(_BASES), max(1, n // 4))
    species: list[Species] = []
    for family, base_number in enumerate(rng.permutation(len(_BASES))[:n_families].tolist()):
        base, start = _BASES[base_number], len(species)
        noun_part = str(rng.choice(_NOUN_PARTS))
        species.append(Species(_name(base, base, noun_part, species), base))
        while len(species) - start < n // n_families + (family < n % n_families):
            parent = species[start + int(rng.integers(len(species) - start))].looks
            child = _vary(parent, rng)
            if _ring_shows(child) and all(_tellable(child, bird.looks) for bird in species):
                species.append(Species(_name(child, parent, noun_part, species), child))
    return tuple(species)


def _ring_shows(looks: tuple[Look, ...]) -> bool:
    ring, head = looks[PART_NAMES.index("eye ring")], looks[PART_NAMES.index("head")]
    return ring.shape == "none" or colour_distance(ring.colour, head.colour) >= _CLEARLY_DIFFERENT


def _tellable(first: tuple[Look, ...], second: tuple[Look, ...]) -> bool:
    pairs = zip(PART_NAMES, first, second, strict=True)
    return any(_clearly_different(a, b) for part, a, b in pairs if part != "legs")


def _clearly_different(first: Look, second: Look) -> bool:
    if first.shape == second.shape == "none":
        return False
    if (first.shape, first.pattern) != (second.shape, second.pattern):
        return True
    return colour_distance(first.colour, second.colour) >= _CLEARLY_DIFFERENT


def _vary(parent: tuple[Look, ...], rng: np.random.Generator) -> tuple[Look, ...]:
    """A copy with one part changed, or two for two birds in five."""
    parts = [str(rng.choice(_PARTS_TO_CHANGE))]
    if rng.random() < 0.4:
        others = [part for part in PART_NAMES if part not in parts]
        parts.append(str(rng.choice(others)))
    looks = list(parent)
    for part in parts:
        index = PART_NAMES.index(part)
        looks[index] = _vary_look(parent[index], _CHOICES[part], rng)
    return tuple(looks)


def _vary_look(old: Look, choices: _Choices, rng: np.random.Generator) -> Look:
    options = {"shape": choices.shapes, "colour": choices.colours, "pattern": choices.patterns}
    kinds = [kind for kind, values in options.items() if len(values) > 1]
    while True:
        shape, colour, pattern, accent = old.shape, old.colour, old.pattern, old.accent
        what = rng.choice(kinds)
        if what == "shape":
            shape = str(rng.choice(choices.shapes))
        if what == "colour" or old.shape == "none":
            colour = str(rng.choice(choices.colours))
        if what == "pattern":
            pattern = str(rng.choice(choices.patterns))
            accent = str(rng.choice(choices.accents)) if pattern != "plain" else ""
        new = Look(shape, colour, pattern, accent)
        if _clearly_different(old, new) and (not accent or colour_distance(colour, accent) >= _CONTRASTING):
            return new


_NOUN_PARTS = ("belly", "wing", "tail")
_COLOURED = {
    "beak": "billed", "crest": "crested", "eye ring": "ringed", "head": "headed", "body": "backed",
    "belly": "bellied", "wing": "winged", "tail": "tailed", "legs": "legged",
}  # fmt: skip
_SHAPED = {
    ("beak", "cone"): "Stout-billed", ("beak", "needle"): "Thin-billed", ("beak", "hook"): "Hook-billed",
    ("beak", "sickle"): "Sickle-billed", ("beak", "dagger"): "Dagger-billed", ("crest", "tuft"): "Tufted",
    ("crest", "spikes"): "Spike-crested", ("crest", "fan"): "Fan-crested", ("crest", "plume"): "Plumed",
    ("wing", "pointed"): "Sharp-winged", ("wing", "rounded"): "Round-winged",
    ("tail", "square"): "Square-tailed", ("tail", "forked"): "Fork-tailed", ("tail", "long"): "Long-tailed",
    ("tail", "fan"): "Fan-tailed",
}  # fmt: skip
_PATTERNED = {
    "cap": "capped", "cheek": "cheeked", "spots": "spotted", "streaks": "streaked", "band": "breasted",
    "bars": "barred", "patch": "shouldered", "tips": "tipped", "banded": "banded",
}  # fmt: skip
_NAMING_ORDER = ("crest", "head", "tail", "wing", "eye ring", "beak", "belly", "body", "legs")


def _name(looks: tuple[Look, ...], parent: tuple[Look, ...], noun_part: str, others: list[Species]) -> str:
    """The first free name that is true of the bird; what sets it apart from its parent comes first."""
    noun = looks[PART_NAMES.index(noun_part)].colour.capitalize() + noun_part
    words: list[tuple[bool, str]] = []
    for part in _NAMING_ORDER:
        look, old = (bird[PART_NAMES.index(part)] for bird in (looks, parent))
        words.extend(_adjectives(part, look, old, with_colour=part != noun_part))
    adjectives = [word for _, word in sorted(words, key=lambda entry: not entry[0])]  # stable: the order is kept
    choices = (chosen for count in (1, 2, 3) for chosen in combinations(adjectives, count))
    taken = {bird.name for bird in others}
    # A bird has more true names than there are species.
    return next(name for name in (" ".join((*chosen, noun)) for chosen in choices) if name not in taken)


def _adjectives(part: str, look: Look, old: Look, with_colour: bool) -> Iterator[tuple[bool, str]]:
    """Words for a part, each with whether it says what has changed."""
    if look.shape == "none":
        return
    appeared = old.shape == "none"
    if look.pattern != "plain":
        yield (
            (look.pattern, look.accent) != (old.pattern, old.accent),
            f"{look.accent.capitalize()}-{_PATTERNED[look.pattern]}",
        )
    if with_colour:
        word = "browed" if look.shape == "stripe" else _COLOURED[part]
        reshaped = look.shape != old.shape and part == "eye ring"
        yield look.colour != old.colour or appeared or reshaped, f"{look.colour.capitalize()}-{word}"
    if (part, look.shape) in _SHAPED:
        yield look.shape != old.shape, _SHAPED[part, look.shape]
