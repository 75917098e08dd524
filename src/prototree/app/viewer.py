"""A packed tree in the browser: to be looked at and tried. It has no training photos, so nothing can be edited."""

import secrets
from functools import cached_property
from typing import Any

from prototree.app import schemas
from prototree.app.gallery import PICTURE_SIDE
from prototree.app.results import Results, result_of
from prototree.backbones.inference import FrozenFeatures, frozen_features
from prototree.data.images import read_photo
from prototree.explain.decisions import explain_image
from prototree.explain.records import TreeExplanation
from prototree.explain.tree import explain_tree, pictures_of, spreads_of
from prototree.report.images import data_url
from prototree.report.tree_html import tree_data
from prototree.run import Run


class Viewer:
    """What the app can be asked about a tree that came in a file."""

    edits = False
    revision = 0  # it never changes

    def __init__(self, run: Run) -> None:
        self._run, self._tree, self.results = run, run.tree(), Results()
        self._pictures, self._spreads = pictures_of(run, self._tree), spreads_of(run, self._tree)
        self.title, self.classes = run.folder.name, self._tree.class_names

    def run(self) -> schemas.RunShape:
        return schemas.RunShape(
            title=self.title,
            classes=list(self.classes),
            prototypes=self._tree.topology.n_nodes,
            training_photos=0,
            feedback_photos=0,
            feedback="none",
            held_back=0,
            question=self._tree.question.kind,
            can_finetune=False,
        )

    def tree(self) -> tuple[TreeExplanation, dict[str, Any]]:
        """The tree, for the page of the report."""
        return self._explained

    @cached_property
    def _network(self) -> FrozenFeatures:
        return frozen_features(self._tree.features)

    @cached_property
    def _explained(self) -> tuple[TreeExplanation, dict[str, Any]]:
        explanation = explain_tree(self._run)
        return explanation, tree_data(explanation, data_url)

    def samples(self) -> list[schemas.PhotoShape]:
        """Photos to try: none came with the tree."""
        return []

    def decide(self, content: bytes, name: str) -> schemas.DecisionShape:
        """What the tree says of an image that somebody sent."""
        image = read_photo(content, at_least=PICTURE_SIDE).image
        explained = explain_image(
            self._tree,
            image,
            self._pictures,
            name=name,
            notes=self._run.notes,
            spreads=self._spreads,
            network=self._network,
        )
        result = result_of(explained, secrets.token_urlsafe(9), self.revision)
        self.results.add(result)
        return result.decision

    def close(self) -> None:
        """Nothing goes on in the background."""
