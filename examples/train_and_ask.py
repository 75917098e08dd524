"""Trains on a folder of photos and asks the tree about one of them: python examples/train_and_ask.py PHOTOS OUT."""

import sys

import prototree

SETTINGS = {key: value for key, _, value in (word.partition("=") for word in sys.argv[3:])}

run = prototree.fit(sys.argv[1], sys.argv[2], settings=SETTINGS)
tree = run.tree()
photo = prototree.open_data(sys.argv[1]).test[0].path
answer = prototree.ask(tree, photo)
for turn in answer.path:
    nearer = turn.node if turn.rather is None else turn.rather  # a pairwise node names the nearer of its two patches
    if source := tree.sources[nearer]:
        word = "like" if turn.present or turn.rather is not None else "unlike"
        print(f"{word} the patch {source.patch} of {source.image} ({turn.p_right:.0%} right)")
print(f"→ {answer.label}")
