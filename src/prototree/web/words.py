"""Edits in words."""

from collections.abc import Sequence

import numpy as np

from prototree.mend.bench import spliced
from prototree.mend.edits import Ban, Edit, Note, Remove, Replace
from prototree.tree.topology import Topology


def sentences(topology: Topology, done: Sequence[Edit]) -> list[str]:
    """What was done to a tree, with the numbers that prototypes had at the time."""
    nodes, sentences = np.arange(topology.n_nodes), []
    for edit in done:
        number = int(np.nonzero(nodes == edit.node)[0][0]) if not isinstance(edit, Ban) else -1
        match edit:
            case Replace():
                sentences.append(f"Prototype {number} is now a patch of {edit.image}")
            case Ban():
                what = "a region of " if edit.region is not None else ""
                sentences.append(f"Banned {what}{edit.image} as a source")
            case Remove():
                side = "absent" if edit.keep == "left" else "present"
                sentences.append(f"Removed prototype {number}, keeping what was below “{side}”")
                topology, kept, _ = spliced(topology, number, edit.keep)
                nodes = nodes[kept]
            case Note():
                sentences.append(
                    f"Prototype {number} is called “{edit.text}”"
                    if edit.text
                    else f"Removed the note of prototype {number}"
                )
    return sentences
