"""Train on photos and predict one of them: python examples/train_and_predict.py PHOTOS OUT [NAME=VALUE …]"""

import sys

import prototree

SETTINGS = {key: value for key, _, value in (word.partition("=") for word in sys.argv[3:])}

run = prototree.fit(sys.argv[1], sys.argv[2], settings=SETTINGS)
tree = run.tree()
photo = prototree.open_data(sys.argv[1]).test[0].path
predicted = prototree.predict(tree, photo)
for step in predicted.path:
    print(f"{step.node}: {step.text} ({step.p_right:.0%} right)")
print(f"→ {predicted.predicted_class}")
