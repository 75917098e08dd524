"""A prototype tree as an estimator of scikit-learn, for pipelines, cross-validation and searches."""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy import ndarray
from PIL import Image

from prototree.config import DEFAULT_PRESET, RECIPE_SETTINGS, Common, load_preset
from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.core.topology import Strategy
from prototree.data import ImageData, Sample
from prototree.data.images import read_image
from prototree.data.scan import scan_files
from prototree.data.transforms import eval_transform
from prototree.errors import ConfigError, MissingExtraError
from prototree.io import write_json
from prototree.pipeline.fit import fit
from prototree.run import CONFIG, METRICS

try:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d, validate_data
except ImportError as error:
    raise MissingExtraError("scikit-learn", "sklearn") from error

Images = Sequence[Path] | UInt8[ndarray, "n height width 3"]
BATCH = 32
_STAGES = ("train", "prune", "project")  # there are no test images: scikit-learn keeps its own
_FILES = "_tree_files"
_OWN_PARAMETERS = ("preset", "strategy", "image_shape", "out")


class ProtoTreeClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Prototype tree as a scikit-learn estimator, for pipelines, cross-validation and searches.

    `X` is a list of paths, a column of them, an array of 8-bit images (n, height, width, 3), or rows of flattened
    images. `decision_path` and `apply` follow the greedy path.

    Args:
        preset: Name of a preset, or path of a TOML file.
        strategy: What `predict` and `predict_proba` give: greedy or max_path, the leaf of one path; soft, all leaves.
        image_shape: Height and width, perhaps with 3 channels, of flattened images; by default squares, else strips.
        out: Folder that keeps the run, for `prototree report` and the rest; by default none is kept.
        **settings: Settings of `prototree train` by name; `seed` decides all random numbers.

    Attributes:
        classes_: Class labels, in the order of the probabilities.
        tree_: The trained `ProtoTree`.
        out_: Folder of the run, if `out` is given.

    Examples:
        >>> model = ProtoTreeClassifier(seed=1).fit(paths, labels)  # 24 photos of 3 classes
        >>> model.predict_proba(paths).shape
        (24, 3)
    """

    def __init__(
        self,
        preset: str = DEFAULT_PRESET,
        *,
        strategy: Strategy = "greedy",
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
        """Get the parameters and the settings that were given."""
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_") and name[-1] != "_"}

    def set_params(self, **params: Any) -> "ProtoTreeClassifier":
        """Change parameters or settings, including those that were not given before."""
        settings = {
            "recipe",
            *Common.names(),
            *(name for recipe in RECIPE_SETTINGS.values() for name in recipe.names()),
        }
        known = {*self.get_params(), *settings}
        if unknown := sorted(set(params) - known):
            raise ValueError(f"Invalid parameter {unknown[0]!r} for estimator {self}; expected one of {sorted(known)}")
        self.__dict__.update(params)
        return self

    def fit(self, X: Any, y: Any) -> "ProtoTreeClassifier":  # noqa: N803
        """Train, prune and project a tree.

        Args:
            X: Training images.
            y: Their class labels.

        Returns:
            The fitted estimator.
        """
        settings = {key: value for key, value in self.get_params().items() if key not in _OWN_PARAMETERS}
        config = load_preset(self.preset).replace(settings)
        images, y = self._training_data(X, y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"expected at least two classes to tell apart, got one class: {self.classes_[0]!r}")
        if self.out is not None and (Path(self.out) / CONFIG).exists() and getattr(self, "out_", None) != str(self.out):
            raise ConfigError(f"{self.out} already holds a run; choose another folder for out")
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "run" if self.out is None else Path(self.out)
            pictures = folder.parent / "images" if self.out is None else folder / "photos"
            data = _as_data(images, labels.tolist(), [str(name) for name in self.classes_], pictures)
            run = fit(data, folder, preset=config, stages=_STAGES, overwrite=True)
            # The images came one by one: no folder or list can be opened in their place.
            write_json(folder / METRICS, {key: value for key, value in run.metrics.items() if key != "source"})
            self.tree_: ProtoTree = run.tree()
        if self.out is not None:
            self.out_ = str(self.out)
        return self

    def predict(self, X: Any) -> ndarray:  # noqa: N803
        """Predict the class of each image.

        Args:
            X: Images, in the form that `fit` was given.

        Returns:
            Class labels.
        """
        class_probs = self.predict_proba(X)  # refuses an estimator that is not fitted
        predictions: ndarray = self.classes_[class_probs.argmax(axis=1)]
        return predictions

    def predict_proba(self, X: Any) -> Float[ndarray, "n K"]:  # noqa: N803
        """Predict the probability of each class.

        Args:
            X: Images, in the form that `fit` was given.

        Returns:
            Images × classes, in the order of `classes_`.
        """
        return self._decide(X)[0]

    def apply(self, X: Any) -> Int[ndarray, " n"]:  # noqa: N803
        """Return the leaf that each image ends in, numbered as in `decision_path`: after all nodes."""
        return self._decide(X)[1] + self.tree_.topology.n_nodes

    def decision_path(self, X: Any) -> Any:  # noqa: N803
        """Return a sparse matrix: 1 where an image's greedy path meets a node (first columns) or a leaf (last)."""
        from scipy.sparse import csr_matrix

        leaves, topology = self._decide(X)[1], self.tree_.topology
        rows = [[*topology.paths[leaf][topology.paths[leaf] >= 0], topology.n_nodes + leaf] for leaf in leaves]
        columns, starts = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
        shape = (len(leaves), topology.n_nodes + topology.n_leaves)
        return csr_matrix((np.ones(len(columns), dtype=np.int64), columns, starts), shape=shape)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the tree as the bytes of its two files, which hold no code."""
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

    def _training_data(self, x: Any, y: Any) -> tuple[Images, ndarray]:
        """Check images and labels; remember how rows become images."""
        images = as_images(x)
        self.rows_: Rows | None = None
        if images is None:
            x, y = validate_data(self, x, y, ensure_min_features=1)
            self.rows_ = Rows.like(x, self.image_shape)
            images = self.rows_.to_images(x)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        check_consistent_length(images, y)
        return images, y

    def _decide(self, x: Any) -> tuple[Float[ndarray, "n K"], Int[ndarray, " n"]]:
        """Compute class probabilities and greedy leaves."""
        check_is_fitted(self)
        images = as_images(x)
        if images is None:
            if self.rows_ is None:
                raise ValueError("expected images as in fit (paths or 8-bit images), got something else")
            images = self.rows_.to_images(validate_data(self, x, reset=False))
        preprocessing, probs, leaves = self.tree_.preprocessing, [], []
        for start in range(0, len(images), BATCH):
            opened = [
                Image.fromarray(image)
                if isinstance(image, ndarray)
                else read_image(image, at_least=preprocessing.resize)
                for image in images[start : start + BATCH]
            ]
            output = self.tree_.predict(torch.stack([eval_transform(image, preprocessing) for image in opened]))
            probs.append(output.class_probs(self.strategy))
            leaves.append(output.greedy.leaf)
        class_probs = torch.cat(probs).double()
        class_probs /= class_probs.sum(dim=1, keepdim=True)
        return class_probs.numpy(), torch.cat(leaves).numpy()


def as_images(x: Any) -> Images | None:
    """Take paths or 8-bit images out of X; None where it is neither."""
    if isinstance(x, ndarray) and x.ndim == 4:
        if x.dtype != np.uint8 or x.shape[3] != 3:
            raise ValueError(
                f"expected 8-bit images of shape (n, height, width, 3), got {x.dtype} of shape {x.shape}; "
                "convert them, or hand over flattened rows of numbers"
            )
        return x
    values = np.asarray(x, dtype=object) if isinstance(x, list | tuple) else np.asarray(x)
    if values.ndim == 2 and values.shape[1] == 1:  # a column of a table
        values = values[:, 0]
    is_text = values.dtype.kind in "OUT" and values.ndim == 1 and len(values) > 0
    return [Path(path) for path in values] if is_text and all(isinstance(v, str | Path) for v in values) else None


@dataclass(frozen=True)
class Rows:
    """How rows of numbers become images: their shape, and the numbers that are black and white."""

    shape: tuple[int, ...]
    black: float = 0.0
    white: float = 255.0

    @classmethod
    def like(cls, rows: ndarray, shape: tuple[int, ...] | None) -> "Rows":
        """Infer the shape from the training rows; 8-bit numbers stay, others are scaled from smallest to largest.

        Without a shape: a colour square where the number of pixels allows it, else a grey square, else a grey strip.
        """
        n_pixels = rows.shape[1]
        sides = {channels: math.isqrt(n_pixels // channels) for channels in (3, 1)}
        squares = [(side, side, channels) for channels, side in sides.items() if side * side * channels == n_pixels]
        shape = tuple(shape) if shape else (*squares, (1, n_pixels, 1))[0]
        if math.prod(shape) != n_pixels or len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3)):
            raise ValueError(
                f"expected image_shape (height, width) or (height, width, 3) of {n_pixels} numbers, got {shape}"
            )
        return cls(shape) if rows.dtype == np.uint8 else cls(shape, float(rows.min()), float(rows.max()))

    def to_images(self, rows: ndarray) -> UInt8[ndarray, "n height width 3"]:
        levels = (rows.astype(np.float64) - self.black) * (255.0 / (self.white - self.black or 1.0))
        pixels = levels.clip(0, 255).round().astype(np.uint8).reshape(len(rows), *self.shape[:2], -1)
        return np.broadcast_to(pixels, (*pixels.shape[:3], 3)).copy() if pixels.shape[3] == 1 else pixels


def _as_data(images: Images, labels: Sequence[int], class_names: Sequence[str], folder: Path) -> ImageData:
    """Training data of images alone; those in memory are written to the folder without loss.

    Its root is the folder that all images lie in, so that a prototype's image is found again.
    """
    if isinstance(images, ndarray):
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{number:06d}.png" for number in range(len(images))]
        for path, pixels in zip(paths, images, strict=True):
            Image.fromarray(pixels).save(path, compress_level=1)
    else:
        paths = [Path(os.path.abspath(path)) for path in images]
        folder = Path(os.path.commonpath([path.parent for path in paths]))
    samples = tuple(Sample(path, int(label)) for path, label in zip(paths, labels, strict=True))
    return scan_files(ImageData(folder, "folder", tuple(class_names), samples, ()), strict=True)
