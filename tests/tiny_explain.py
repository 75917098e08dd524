"""What tests of explanations need: a small trained run, and trees whose prototypes are patches of its images."""

from collections.abc import Callable, Sequence

import pytest
import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.projection import project
from prototree.core.topology import Topology
from prototree.data import ImageData, Sample, open_data
from prototree.data.crops import FULL_IMAGE, View
from prototree.data.loader import ViewDataset
from prototree.features.cache import eval_batches
from prototree.pipeline.fit import fit
from prototree.run import Run
from prototree.training.sources import attach_sources
from prototree_birds import write_birds
from tiny_training import TINY, write_squares


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, ImageData]:
    """A run of the paper's recipe on images of coloured squares."""
    folder = tmp_path_factory.mktemp("squares")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(folder / "cache"))
        data = open_data(write_squares(folder / "photos", train=12))
        return fit(data, folder / "run", settings=TINY), data


@pytest.fixture(scope="session")
def birds(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """Generated birds of three species, whose parts are known."""
    folder = tmp_path_factory.mktemp("birds") / "b"
    return open_data(write_birds(folder, n_species=3, train_per_species=6, test_per_species=4, size=64))


def projected(
    backbone: Backbone,
    data: ImageData,
    views: Callable[[Sample], Sequence[View]] = lambda _: (FULL_IMAGE,),
    size: tuple[int, int] = (1, 1),
    node_function: NodeFunction = PAPER,
    height: int = 3,
) -> ProtoTree:
    """A random full tree whose prototypes are patches of some views of the training images."""
    torch.manual_seed(0)
    features = FeatureExtractor(backbone, 8)
    tree = ProtoTree(Topology.full(height), features, data.class_names, size, node_function=node_function).eval()
    tree.leaf_logits.data = 5 * torch.rand(2**height, len(data.class_names))
    dataset = ViewDataset(data.train, views, tree.preprocessing)
    projection = project(tree, eval_batches(features, dataset).encoded(features))
    attach_sources(projection, dataset.entries, data.root)
    return projection.tree.eval()
