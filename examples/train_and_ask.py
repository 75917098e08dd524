"""Trains on a folder of photos and asks the tree about one of them: python examples/train_and_ask.py PHOTOS OUT."""

import sys

import prototree
from prototree.data.augment import to_input
from prototree.data.images import read_image

SETTINGS = {key: value for key, _, value in (word.partition("=") for word in sys.argv[3:])}

run = prototree.fit(sys.argv[1], sys.argv[2], settings=SETTINGS)
tree = run.tree()
photo = prototree.open_data(sys.argv[1]).test[0].path
decisions = tree.predict(to_input(read_image(photo), tree.preprocessing)[None])
path = decisions.path("max_path")
for node, similarity, right in zip(path.nodes[0], path.similarity[0], path.goes_right[0], strict=True):
    if node >= 0 and (source := tree.sources[node]):
        print(
            f"{'like' if right else 'unlike'} the patch {source.patch} of {source.image} (similarity {similarity:.2f})"
        )
print(f"→ {tree.class_names[int(decisions.labels('max_path')[0])]}")
