"""The baseline on frozen features: a linear classifier on average-pooled maps of the same backbone.

python benchmarks/linear_probe.py DATA [--weights FILE] [--image-size 224]
"""

import argparse
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from prototree.backbones.backbone import Backbone
from prototree.backbones.inference import folded
from prototree.data import ImageData, open_data
from prototree.data.crops import evaluation_views, training_views
from prototree.data.loader import ViewDataset, Views, make_loader

EPOCHS, BATCH, RATE, DECAY = 60, 64, 1e-2, 1e-4


@torch.inference_mode()
def pooled(backbone: Backbone, data: ImageData, split: str) -> tuple[Tensor, Tensor]:
    samples = data.train if split == "train" else data.test
    views: Views = partial(training_views, kind=data.kind) if split == "train" else evaluation_views
    features, labels = [], []
    for batch in make_loader(ViewDataset(samples, views, backbone.preprocessing), 32, workers=2):
        images = batch.images.contiguous(memory_format=torch.channels_last)
        features.append(backbone(images).mean(dim=(2, 3)))
        labels.append(batch.labels)
    return torch.cat(features), torch.cat(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--backbone", default="auto")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--image-size", type=int, default=224)
    words = parser.parse_args()
    torch.manual_seed(0)
    data = open_data(words.data)
    backbone = folded(Backbone(words.backbone, words.weights, image_size=words.image_size, split=False))
    (x, y), (test_x, test_y) = (pooled(backbone, data, split) for split in ("train", "test"))
    x, y, test_x = x.clone(), y.clone(), test_x.clone()
    mean, std = x.mean(dim=0), x.std(dim=0).clamp_min(1e-6)
    x, test_x = (x - mean) / std, (test_x - mean) / std
    linear = nn.Linear(x.shape[1], data.n_classes)
    optimiser = torch.optim.AdamW(linear.parameters(), RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            cross_entropy(linear(x[index]), y[index]).backward()
            optimiser.step()
        schedule.step()
    with torch.no_grad():
        hits = (linear(test_x).argmax(dim=1) == test_y).float().mean()
    print(f"linear probe on {len(x)} training views: {hits:.1%} of {len(test_y)} test photos")


if __name__ == "__main__":
    main()
