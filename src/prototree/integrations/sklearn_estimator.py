"""A prototype tree as an estimator of scikit-learn, for pipelines, cross-validation and searches."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray

from prototree.config import DEFAULT_PRESET, preset
from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.core.strategies import Strategy
from prototree.errors import ConfigError, MissingExtraError
from prototree.files import write_json
from prototree.integrations.photo_rows import Photos, Rows, as_data, as_photos, batches
from prototree.pipeline.fit import train_run
from prototree.run import CONFIG, METRICS
from prototree.settings import Common
from prototree.training.recipes import RECIPES

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise MissingExtraError("scikit-learn", "sklearn") from error

_STAGES = ("train", "prune", "project")  # there are no test photos: scikit-learn keeps its own
_FILES = "_tree_files"


class ProtoTreeClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A prototype tree that learns from photos in memory or on disk.

    `X` is a list of paths, a column of them, an array of 8-bit images (n, height, width, 3), or rows of numbers that
    are flattened images of `image_shape` (without it: squares, else strips). Settings are those of `prototree train`;
    `seed` decides all random numbers.

    `strategy` says which answer `predict` and `predict_proba` give: the vote of all leaves ("soft") or the one leaf at
    the end of the path ("greedy", "max_path"). `decision_path` and `apply` follow the greedy path. With `out` the run
    stays in that folder, for `prototree report` and the rest.

    Examples:
        >>> model = ProtoTreeClassifier(seed=1).fit(paths, labels)  # 24 photos of 3 classes
        >>> model.predict_proba(paths).shape
        (24, 3)
    """

    def __init__(
        self,
        preset: str = DEFAULT_PRESET,
        *,
        strategy: Strategy = "soft",
        image_shape: tuple[int, ...] | None = None,
        out: str | Path | None = None,
        **settings: Any,
    ) -> None:
        self.preset = preset
        self.strategy = strategy
        self.image_shape = image_shape
        self.out = out
        self.__dict__.update(settings)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters and the settings that were given."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_") and name[-1] != "_"}

    def set_params(self, **params: Any) -> "ProtoTreeClassifier":
        """Changes parameters or settings, including those that were not given before."""
        settings = {"recipe", *Common.names(), *(name for recipe in RECIPES.values() for name in recipe.names())}
        known = {*self.get_params(), *settings}
        if unknown := sorted(set(params) - known):
            raise ValueError(f"Invalid parameter {unknown[0]!r} for estimator {self}; expected one of {sorted(known)}")
        self.__dict__.update(params)
        return self

    def fit(self, X: Any, y: Any) -> "ProtoTreeClassifier":  # noqa: N803
        """Learns a tree: train, prune, project."""
        settings = {key: value for key, value in self.get_params().items() if key not in _OWN}
        config = preset(self.preset).changed(settings)
        photos, y = self._learnable(X, y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"expected at least two classes to tell apart, got one class: {self.classes_[0]!r}")
        if self.out is not None and (Path(self.out) / CONFIG).exists() and getattr(self, "out_", None) != str(self.out):
            raise ConfigError(f"{self.out} already holds a run; choose another folder for out")
        with _folder(self.out) as (pictures, out):
            data = as_data(photos, labels.tolist(), [str(name) for name in self.classes_], pictures)
            run = train_run(config, data, out, stages=_STAGES, overwrite=True)
            # The photos came one by one: no folder or list can be opened in their place.
            write_json(out / METRICS, {key: value for key, value in run.metrics.items() if key != "source"})
            self.tree_: ProtoTree = run.tree()
        if self.out is not None:
            self.out_ = str(self.out)
        return self

    def predict(self, X: Any) -> ndarray:  # noqa: N803
        """The most probable class of each photo."""
        probabilities = self.predict_proba(X)
        answers: ndarray = self.classes_[probabilities.argmax(axis=1)]
        return answers

    def predict_proba(self, X: Any) -> Float[ndarray, "n K"]:  # noqa: N803
        """The probability of each class, in the order of `classes_`."""
        return self._decide(X)[0]

    def apply(self, X: Any) -> Int[ndarray, " n"]:  # noqa: N803
        """The leaf that each photo ends in, numbered as in `decision_path`: after all nodes."""
        return self._decide(X)[1] + self.tree_.topology.n_nodes

    def decision_path(self, X: Any) -> Any:  # noqa: N803
        """A sparse matrix: 1 where the greedy path of a photo meets a node (first columns) or a leaf (last columns)."""
        from scipy.sparse import csr_matrix

        leaf = self._decide(X)[1]
        topology = self.tree_.topology
        met = [[*topology.paths[one][topology.paths[one] >= 0], topology.n_nodes + one] for one in leaf]
        starts = np.cumsum([0, *map(len, met)])
        columns = np.concatenate(met)
        return csr_matrix(
            (np.ones(len(columns), dtype=np.int64), columns, starts),
            shape=(len(leaf), topology.n_nodes + topology.n_leaves),
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """The tree travels as the bytes of its two files, which hold no code."""
        state = dict(super().__getstate__())
        if "tree_" in state:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint.save(state.pop("tree_"), folder)
                state[_FILES] = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = state.get(_FILES)
        super().__setstate__({key: value for key, value in state.items() if key != _FILES})
        if files:
            with tempfile.TemporaryDirectory() as folder:
                for name in (checkpoint.TREE, checkpoint.WEIGHTS):
                    (Path(folder) / name).write_bytes(files[name])
                self.tree_ = checkpoint.load(folder)

    def _learnable(self, x: Any, y: Any) -> tuple[Photos, ndarray]:
        """What to learn from, checked; remembers how rows become pictures."""
        photos = as_photos(x)
        self.rows_: Rows | None = None
        if photos is None:
            x, y = validate_data(self, x, y, ensure_min_features=1)
            self.rows_ = Rows.like(x, self.image_shape)
            photos = self.rows_.pictures(x)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        check_consistent_length(photos, y)
        return photos, y

    def _seen(self, x: Any) -> Photos:
        photos = as_photos(x)
        if photos is not None:
            return photos
        if self.rows_ is None:
            raise ValueError("expected photos as in fit (paths or 8-bit images), got something else")
        return self.rows_.pictures(validate_data(self, x, reset=False))

    def _decide(self, x: Any) -> tuple[Float[ndarray, "n K"], Int[ndarray, " n"]]:
        """Class probabilities and greedy leaves."""
        check_is_fitted(self)
        found = []
        with torch.no_grad():
            for images in batches(self._seen(x), self.tree_.preprocessing):
                decisions = self.tree_.predict(images)
                found.append((decisions.class_probs(self.strategy), decisions.greedy.leaf))
        probabilities = torch.cat([one for one, _ in found]).double()
        probabilities /= probabilities.sum(dim=1, keepdim=True)
        return probabilities.numpy(), torch.cat([leaf for _, leaf in found]).numpy()


_OWN = ("preset", "strategy", "image_shape", "out")


@contextmanager
def _folder(out: str | Path | None) -> Iterator[tuple[Path, Path]]:
    """Folders for the pictures to train on and for the run; both are removed unless they are to be kept."""
    if out is not None:
        pictures = Path(out) / "photos"
        pictures.mkdir(parents=True, exist_ok=True)
        yield pictures, Path(out)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "photos").mkdir()
        yield Path(folder) / "photos", Path(folder) / "run"
