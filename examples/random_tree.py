"""An untrained tree on random images: what a decision looks like."""

import torch

from prototree import Backbone, FeatureExtractor, ProtoTree, Topology

torch.manual_seed(0)
tree = ProtoTree(
    Topology.full(height=3), FeatureExtractor(Backbone("resnet18", None), prototype_dim=64), ["cat", "dog", "owl"]
)
decisions = tree.eval().predict(torch.rand(2, 3, 224, 224))
for image, leaf in enumerate(decisions.greedy.leaf.tolist()):
    print(f"image {image}: leaf {leaf}")
    steps = zip(decisions.greedy.nodes[image], decisions.greedy.p_right[image], strict=True)
    for node, similarity in steps:
        print(f"  node {node}: similarity {similarity:.3f} → {'right' if similarity > 0.5 else 'left'}")
