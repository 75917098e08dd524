"""A run that has maps is opened with them: no training photo goes through the network a second time."""

from pathlib import Path

import pytest
import torch

from prototree.backbones.backbone import FeatureExtractor
from prototree.editing.session import open_session
from prototree.pipeline.fit import fit
from prototree.run import Run
from tiny_training import TINY_DISTILL, write_squares


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        photos = write_squares(folder / "squares", train=4, test=4)
        return fit(
            photos, folder / "run", settings=TINY_DISTILL | {"backbone": "resnet18", "head_epochs": 2, "epochs": 2}
        )


def test_training_photos_are_not_looked_at_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, forward = [], FeatureExtractor.forward

    def watched(self: FeatureExtractor, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return forward(self, images)

    monkeypatch.setattr(FeatureExtractor, "forward", watched)
    session = open_session(run, work=tmp_path / "work")
    assert session.workbench.training.is_rounded
    assert sum(seen) <= len(session.workbench.feedback), "only photos for feedback, at most"
    opened = sum(seen)
    assert session.n_held_back == len(session.held_back or ())
    assert sum(seen) <= opened + session.n_held_back, "and those kept back when they are needed"


def test_they_are_what_the_network_makes_of_the_photos_but_for_the_last_digits(run: Run, tmp_path: Path) -> None:
    session = open_session(run, work=tmp_path / "work")
    workbench = session.workbench
    exact = torch.cat([workbench._exact_map(row) for row in range(4)])
    torch.testing.assert_close(workbench.training.maps(range(4)), exact, atol=2e-3, rtol=0)


def test_a_patch_that_is_put_in_place_is_at_distance_0_in_the_edited_run(run: Run, tmp_path: Path) -> None:
    session = open_session(run, work=tmp_path / "work")
    cell = session.workbench.candidates(session.state, 0, 3)[2].cell
    session.apply(cell.replaces(0))
    tree = session.state.tree
    row = session.workbench._row[cell.image, cell.view]
    assert float(session.state.training.distance[row, 0]) == 0.0
    own = tree.route(session.workbench._exact_map(row))
    assert float(own.distance.detach()[0, 0]) <= 1e-6
    assert tree.sources[0] is not None
    assert tree.sources[0].shown is not None
