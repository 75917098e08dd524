"""Sources of prototypes: the patch again, and the box to display, in the pixels of the image."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from prototree.backbones.geometry import Box
from prototree.core.model import ProtoTree
from prototree.core.projection import project
from prototree.data.crops import View
from prototree.data.dataset import Sample
from prototree.data.loader import Entry, ViewDataset
from prototree.training.sources import attach_sources


def test_sources_name_the_image_and_the_box_in_its_pixels(tiny_tree: ProtoTree, tmp_path: Path) -> None:
    # The network sees 64 px as a 4×4 map: a cell is 16 px of its input, and this view squashes 128×32 into 64×64.
    (tmp_path / "birds").mkdir()
    Image.effect_noise((200, 100), 80).convert("RGB").save(tmp_path / "birds" / "a.png")
    sample, view = Sample(tmp_path / "birds" / "a.png", 0, size=(200, 100)), View("box", Box(10.0, 20.0, 138.0, 52.0))
    image = ViewDataset([sample], lambda _: (view,), tiny_tree.preprocessing)[0].image
    with torch.no_grad():
        exact = tiny_tree.features(image[None])
    rounded = exact + 1e-3 * torch.rand(exact.shape)  # as maps of a cache are
    projection = project(tiny_tree, [(rounded, torch.zeros(1).long(), torch.zeros(1).long())])
    attach_sources(projection, [Entry(0, sample, view)], tmp_path)
    assert tiny_tree.sources == (None,) * 7
    for row, source in enumerate(projection.tree.sources):
        assert source is not None
        y, x = divmod(int(projection.nearest.patch[row]), 4)
        assert (source.image, source.crop, source.patch, source.label) == ("birds/a.png", "box", (y, x), 0)
        left, top = 10 + x * 32, 20 + y * 8
        assert source.patch_box == pytest.approx((left, top, left + 32, top + 8))
        assert (source.crop_region, source.flip) == ((10.0, 20.0, 138.0, 52.0), False)
        assert source.distance == pytest.approx(projection.nearest.distance[row].item())
        assert source.display_box is not None
        assert Box(*source.display_box).left >= 10
        torch.testing.assert_close(projection.tree.prototypes[row, :, 0, 0], exact[0, :, y, x], atol=1e-5, rtol=1e-5)
