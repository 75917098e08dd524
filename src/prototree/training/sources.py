"""Sources of projected prototypes: which patch of which image each one is, and the box that is displayed for it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from prototree.backbones.geometry import Box, Preprocessing
from prototree.backbones.inference import frozen_features, thread_map
from prototree.config import RecipeSettings
from prototree.core.localization import peak_box, peak_places
from prototree.core.model import ProtoTree, PrototypeSource, extract_patches
from prototree.core.projection import Nearest, Projection
from prototree.data.crops import image_size, projection_views, source_views, to_image
from prototree.data.dataset import ImageData, image_name
from prototree.data.loader import Entry, ViewDataset, Views


def prototype_views(recipe: RecipeSettings, data: ImageData) -> Views:
    """The views that prototypes come from: for the paper the box of CUB or the image, otherwise image and subject."""
    return source_views if recipe.frozen_backbone else partial(projection_views, kind=data.kind)


def attach_sources(projection: Projection, entries: Sequence[Entry], root: Path) -> None:
    """Set the sources of a projected tree, encode each patch again without rounding, and find the box to display."""
    tree, nearest = projection.tree.eval(), projection.nearest
    size, boxes = (tree.prototypes.shape[2], tree.prototypes.shape[3]), dict[int, Box]()
    network = frozen_features(tree.features, threads=1)

    @torch.no_grad()
    def encode_again(index: int) -> tuple[Tensor, Tensor, list[Box]]:
        entry = entries[index]
        image = ViewDataset([entry.sample], lambda _: (entry.view,), tree.preprocessing)[0].image
        patches = extract_patches(network(image[None].to(tree.prototypes.device)), size)[0].to(tree.prototypes.dtype)
        rows = torch.nonzero(nearest.index == index)[:, 0]
        prototypes = patches[nearest.patch[rows]]
        dists = torch.cdist(prototypes, patches, compute_mode="donot_use_mm_for_euclid_dist")
        dists = dists.view(-1, *tree.grid.shape) / tree.radius[rows, None, None]
        peaks = torch.stack(peak_places(dists, nearest.patch[rows], tree.grid.rows_per_crop), dim=1).tolist()
        display = [_in_image(peak_box(tree.grid, *peak), entries[index], tree.preprocessing) for peak in peaks]
        return rows, prototypes, display

    run = map if tree.prototypes.is_cuda else thread_map
    for rows, prototypes, display in run(encode_again, torch.unique(nearest.index).tolist()):
        tree.prototypes.data[rows] = prototypes.view(len(rows), *tree.prototypes.shape[1:])
        boxes.update(zip(rows.tolist(), display, strict=True))
    tree.sources = tuple(
        replace(_source(tree, nearest, row, entries, root), display_box=boxes[row].edges)
        for row in range(tree.n_prototypes)
    )


def _source(tree: ProtoTree, nearest: Nearest, row: int, entries: Sequence[Entry], root: Path) -> PrototypeSource:
    entry = entries[int(nearest.index[row])]
    patch = tree.grid.row_column(int(nearest.patch[row]))
    region = entry.view.region
    return PrototypeSource(
        image=image_name(root, entry.sample.path),
        label=entry.sample.label,
        crop=entry.view.name,
        patch=patch,
        patch_box=_in_image(tree.grid.box(*patch), entry, tree.preprocessing).edges,
        distance=float(nearest.distance[row]),
        crop_region=region.edges if region is not None else None,
        flip=entry.view.flip,
    )


def _in_image(box: Box, entry: Entry, preprocessing: Preprocessing) -> Box:
    return to_image(box, entry.view, image_size(entry.sample), preprocessing)
