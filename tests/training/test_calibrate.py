"""What photos that a tree has not seen teach it: how sharp questions must be for its percentages to be true."""

import copy
import json
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prototree import fit
from prototree.backbones.backbone import Backbone
from prototree.core import checkpoint
from prototree.core.confidence import Calibration
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction, NodeKind
from prototree.core.topology import Topology
from prototree.data.dataset import Sample
from prototree.data.loading import Entry
from prototree.data.views import FULL
from prototree.features.cache import MapCache
from prototree.features.registry import OWN_CACHE
from prototree.files import write_json
from prototree.locks import if_free
from prototree.training.calibrate import SHARPER_STEPS, Held, Sure, SureFile, fit_held, fit_sharpness
from tiny_training import NETWORK, TINY_DISTILL, write_squares

TRUE = {"pairwise": 8.0, "presence": 3.6}


def held_by(tree: ProtoTree, sharpness: float, count: int = 4000) -> Held:
    """Photos whose labels follow Eq. 4 with this sharpness: then its probabilities are true."""
    generator = torch.Generator().manual_seed(0)
    distance = 1.5 * torch.rand(count, tree.n_prototypes, generator=generator)
    held = Held(distance, torch.zeros(count, dtype=torch.long))
    probs = tree.decide(held.routed(tree, replace(tree.question, sharpness=sharpness))).soft
    return replace(held, labels=torch.multinomial(probs, 1, generator=generator)[:, 0])


@pytest.fixture(params=["pairwise", "presence"])
def tree(request: pytest.FixtureRequest, tiny_tree: ProtoTree) -> ProtoTree:
    kind: NodeKind = request.param
    question = NodeFunction(kind, 0.5 * TRUE[kind])
    found = ProtoTree(Topology.full(3), tiny_tree.features, 5, question=question)
    found.leaf_logits.data.copy_(12 * torch.eye(8)[:, :5])
    return found.eval()


def test_the_sharpness_that_makes_probabilities_true_is_found(tree: ProtoTree) -> None:
    true = TRUE[tree.question.kind]
    held = held_by(tree, true)
    fitted = fit_sharpness(tree, held)
    assert 0.8 * true <= fitted <= true, "the least that the photos cannot tell from the best"
    sharper = copy.copy(tree)
    sharper.question = replace(tree.question, sharpness=fitted)
    error = {}
    for one in (tree, sharper):
        probs = one.decide(held.routed(one)).soft
        confidence, said = probs.max(dim=1)
        error[one] = float((confidence.mean() - (said == held.labels).float().mean()).abs())
    assert error[sharper] < 0.04 < error[tree], "it was less sure than right"


def test_few_photos_change_little_and_none_make_questions_softer(tree: ProtoTree) -> None:
    true, own = TRUE[tree.question.kind], tree.question.sharpness
    few, many = (fit_sharpness(tree, held_by(tree, true, count)) for count in (40, 4000))
    assert own <= few <= many
    assert fit_sharpness(tree, held_by(tree, own)) == own
    assert fit_sharpness(tree, held_by(tree, max(own / 2, 1.0))) == own
    assert fit_sharpness(tree, held_by(tree, 64.0)) <= own * (1 + SHARPER_STEPS / 10)


def test_confidence_is_fitted_at_the_sharpness_of_the_tree(tree: ProtoTree) -> None:
    held = held_by(tree, TRUE[tree.question.kind])
    decisions = tree.decide(held.routed(tree))
    confidence = fit_held(tree, held)
    is_right = (decisions.labels("greedy") == held.labels).float()
    assert confidence.n_photos == 4000
    assert float(confidence.of(decisions.margin).mean()) == pytest.approx(float(is_right.mean()), abs=0.01)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("held") / "squares", train=14, test=1)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The same network for all seeds."""
    torch.manual_seed(0)
    weights = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(Backbone(NETWORK, None, image_size=32).net.state_dict(), weights)
    return TINY_DISTILL | {"weights": str(weights), "pretrain_epochs": 0, "head_epochs": 2, "epochs": 2, "hold_out": 2}


def train(photos: Path, run: Path, settings: dict[str, object]) -> ProtoTree:
    return fit(photos, run, settings=settings, stages=["train"]).tree("trained")


def test_all_seeds_learn_from_the_same_second_tree(photos: Path, pretrained: dict[str, object], tmp_path: Path) -> None:
    first, then = (train(photos, tmp_path / "a" / f"{seed}", pretrained | {"seed": seed}) for seed in (0, 1))
    assert first.calibration.n_photos == 21
    assert (then.calibration, then.question) == (first.calibration, first.question)
    assert not torch.equal(first.prototypes, then.prototypes)
    assert (tmp_path / "a" / "0" / "held").exists()
    assert not (tmp_path / "a" / "1" / "held").exists(), "it is there already"
    alone = train(photos, tmp_path / "b" / "1", pretrained | {"seed": 1})
    assert checkpoint.fingerprint(alone) == checkpoint.fingerprint(then), "whether or not it was there already"
    other = train(photos, tmp_path / "a" / "2", pretrained | {"seed": 0, "sharpness": 7.0})
    assert (tmp_path / "a" / "2" / "held").exists(), "other settings, another second tree"
    assert other.question.sharpness >= 7


def test_what_is_kept_is_used_where_nothing_may_be_written(
    photos: Path, pretrained: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = train(photos, tmp_path / "0", pretrained)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "prototree-maps")
    then = train(photos, tmp_path / "1", pretrained | {"seed": 1})
    assert (then.calibration, then.question) == (first.calibration, first.question)
    assert {path.name for path in (tmp_path / "1").iterdir()}.isdisjoint({"held", OWN_CACHE}), "nothing is made again"


def test_networks_that_learn_have_a_second_tree_for_each_seed(
    photos: Path, pretrained: dict[str, object], tmp_path: Path
) -> None:
    own = pretrained | {"weights": "none"}
    found = [train(photos, tmp_path / f"{seed}", own | {"seed": seed}).calibration for seed in (0, 1)]
    assert found[0] != found[1]
    assert len(list((tmp_path / "prototree-maps").glob("sure-*.json"))) == 2


def test_who_comes_second_trains_a_tree_of_its_own_first(
    photos: Path, pretrained: dict[str, object], tmp_path: Path
) -> None:
    train(photos, tmp_path / "a" / "0", pretrained)
    (made,) = (tmp_path / "a" / "prototree-maps").glob("sure-*.json")
    here = tmp_path / "b" / "prototree-maps" / made.name
    is_held = threading.Event()

    def other_program() -> None:
        with if_free(here.with_suffix(".lock")) as is_ours:
            assert is_ours
            is_held.set()
            while not (tmp_path / "b" / "0" / "last" / "state.json").exists():
                time.sleep(0.01)
            here.write_bytes(made.read_bytes())

    thread = threading.Thread(target=other_program)
    thread.start()
    is_held.wait()
    train(photos, tmp_path / "b" / "0", pretrained)
    thread.join()
    assert not (tmp_path / "b" / "0" / "held").exists()
    assert not list(here.parent.glob("*.lock"))


def test_what_was_kept_is_of_the_same_photos_labels_and_settings(tmp_path: Path) -> None:
    def file(label: int = 0, **settings: object) -> SureFile:
        entry = Entry(0, Sample(Path("a.png"), label), FULL)
        return SureFile.of(tmp_path / "new", [MapCache((), (entry,), frozenset())], settings)

    sure = Sure(7.2, Calibration(0.1, 0.2, 30, 0.4, 1.5))
    assert file(depth=1).kept is None
    assert file(depth=1).keep(sure) == sure
    assert file(depth=1).kept == sure
    assert file(depth=2).kept is None
    assert file(label=1, depth=1).kept is None
    for rubbish in ("{}", "[]", "nonsense", '{"sharpness": 7, "calibration": {"slope": 1, "price": 2}}'):
        file(depth=1).path.write_text(rubbish)
        assert file(depth=1).kept is None, rubbish
    for damage in ({"slope": 9.4}, {"slope": float("nan")}):  # a digit that flipped, and a number that is none
        file(depth=1).keep(sure)
        text = json.loads(file(depth=1).path.read_text())
        file(depth=1).path.write_text(json.dumps(text | {"calibration": text["calibration"] | damage}))
        assert file(depth=1).kept is None, damage
    write_json(file(depth=1).path, {"sharpness": 7.2, "calibration": asdict(sure.calibration) | {"least": 7.0}})
    assert file(depth=1).kept is None  # its checksum is right, its value impossible
