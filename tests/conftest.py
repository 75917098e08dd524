"""What several test files need: random trees, a tiny backbone, and the optional real data."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from browser_pages import browser, open_page
from killed_runs import Commands, commands
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.evaluation import plots
from prototree.pipeline import stages
from tiny_explain import birds, squares

__all__ = ["birds", "browser", "open_page", "squares"]  # fixtures

# Some virtual machines announce AMX and do not have it: there, bfloat16 ends the process with an illegal instruction.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
torch.set_num_threads(1)  # tests run side by side, one process a core

# However busy the machine is, the same examples are tried and none of them is too slow. Timeouts anywhere in the tests
# are there to end what hangs, and far beyond what anything takes.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Whole trainings, servers and browsers. Begun first, the longest of them before the others, so that in the end no
# process waits for a long file of another; left out of `make test-fast`, as are all tests in LONG_FOLDERS.
LONG_FILES = (
    "test_kills", "test_every_setting", "test_documents", "test_run", "test_distill", "test_distributed",
    "test_report_browser", "test_browser", "test_sweep", "test_finetune", "test_reproduction", "test_share",
    "test_service", "test_onnx", "test_sklearn", "test_full_disk", "test_api", "test_hostile_requests", "test_examples",
    "test_cli", "test_hub", "test_decision_browser", "test_session", "test_packaging", "test_ablation",
    "test_explain_birds", "test_calibrate", "test_teacher", "test_inference", "test_backbone", "test_weights",
    "test_occlusion_loss", "test_last_blocks", "test_registry", "test_duplicates", "test_cub_cars", "test_checkpoint",
)  # fmt: skip
LONG_FOLDERS = ("app", "faults", "integrations", "pipeline")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))
    for item in items:
        if item.path.stem in rank or item.path.parent.name in LONG_FOLDERS:
            item.add_marker("long")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for each test, so that none reads or leaves anything in the user's."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PROTOTREE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def do(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Runs commands of the program in copies of one process that has imported everything."""
    with commands(tmp_path_factory.mktemp("commands")) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def without_plots() -> Iterator[None]:
    """Runs leave no plots, as without matplotlib: in a tiny run, drawing them takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "plots", SimpleNamespace(available=lambda: False))
        yield


@pytest.fixture
def with_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is drawn or written is tested, there are plots."""
    monkeypatch.setattr(stages, "plots", plots)


@pytest.fixture(scope="session")
def cub_50(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """Real photos of fifty species, opened once."""
    folder = shared("data/CUB_50")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_data(folder)


def shared(path: str) -> Path:
    """A file or folder of real data or weights that lies beside the project on some machines."""
    if not (SHARED / path).exists():
        pytest.skip(f"needs ../shared/{path}, which is not on this machine")
    return SHARED / path


# Numbers that `grow` turns into a tree. (The tree itself is not drawn: the type checker uses `random`, which
# strategies must not.)
tree_shapes = st.lists(st.integers(0, 100), max_size=9)


def grow(choices: list[int]) -> Topology:
    """Any binary tree (full, lopsided, or a single leaf): each number picks the open end that becomes a node."""
    left: list[int] = []
    right: list[int] = []
    open_ends: list[tuple[list[int] | None, int]] = [(None, 0)]  # the side to write to, and of which parent
    for node, choice in enumerate(choices):
        side, parent = open_ends.pop(choice % len(open_ends))
        if side is not None:
            side[parent] = node
        left.append(0)
        right.append(0)
        open_ends += [(left, node), (right, node)]
    for leaf, (side, parent) in enumerate(open_ends):
        if side is not None:
            side[parent] = ~leaf
    return Topology.from_children(left, right, root=0 if left else ~0)[0]


@pytest.fixture
def as_users_run_it() -> Iterator[None]:
    """Without the shape checks that only tests have, which would speak before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def random_maps(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(scope="session")
def tiny_backbone_template() -> Backbone:
    torch.manual_seed(0)
    return Backbone("resnet18", None, image_size=64, feature_level=-2)


@pytest.fixture
def tiny_backbone(tiny_backbone_template: Backbone) -> Backbone:
    """A copy for each test: training changes weights, and their order in memory, on which rounding depends."""
    return copy.deepcopy(tiny_backbone_template)


@pytest.fixture
def tiny_tree(tiny_backbone: Backbone) -> ProtoTree:
    """A tree of height 3 over 5 classes on a 4×4 map with uneven leaves."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    tree = ProtoTree(Topology.full(3), FeatureExtractor(tiny_backbone, 8), 5, generator=generator)
    tree.leaf_logits.data = 5 * torch.rand(8, 5, generator=generator)
    return tree.eval()


def one_hot(labels: list[int], n_classes: int) -> torch.Tensor:
    return torch.from_numpy(np.eye(n_classes)[labels])
