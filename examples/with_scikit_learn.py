"""Trains a tree as an estimator of scikit-learn: python examples/with_scikit_learn.py PHOTOS [NAME=VALUE …]

PHOTOS has one folder per class.
"""

import sys
from pathlib import Path
from typing import Any

from sklearn.metrics import classification_report
from sklearn.model_selection import train_test_split

from prototree import ProtoTreeClassifier

SETTINGS: dict[str, Any] = dict(word.split("=", 1) for word in sys.argv[2:])

paths = sorted(path for path in Path(sys.argv[1]).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
labels = [path.parent.name for path in paths]
train, test, train_labels, test_labels = train_test_split(paths, labels, stratify=labels, random_state=0)

model = ProtoTreeClassifier(strategy="greedy", **SETTINGS).fit(train, train_labels)
print(classification_report(test_labels, model.predict(test), zero_division=0))
print("questions asked per photo:", model.decision_path(test).sum(axis=1).mean() - 1)  # a path ends in a leaf
