"""Edits in words."""

from prototree.core.nodes import NodeKind
from prototree.editing.edits import Edit, Exclude, Note, Remove, Replace


def sentence(edit: Edit, question: NodeKind = "presence") -> str:
    """What an edit does, with the number that the prototype had at the time."""
    match edit:
        case Replace():
            which = f", {edit.side} side," if question == "pairwise" else ""
            return f"Prototype {edit.node}{which} is now a patch of {edit.image}"
        case Exclude():
            what = "a region of " if edit.region is not None else ""
            return f"Excluded {what}{edit.image} as a source"
        case Remove():
            if question == "pairwise":
                return f"Removed prototype {edit.node}, keeping what was on its {edit.keep} side"
            side = "absent" if edit.keep == "left" else "present"
            return f"Removed prototype {edit.node}, keeping what was below “{side}”"
        case Note():
            return (
                f"Prototype {edit.node} is called “{edit.text}”"
                if edit.text
                else f"Removed the note of prototype {edit.node}"
            )
