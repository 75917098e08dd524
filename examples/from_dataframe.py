"""Trains on a table of photos and adds the answers to it: python examples/from_dataframe.py TABLE.csv OUT

The table has the columns path and label, and perhaps split.
"""

import sys

import pandas

import prototree

SETTINGS = dict(word.split("=", 1) for word in sys.argv[3:])

table = pandas.read_csv(sys.argv[1], dtype={"label": str})  # names, also where they look like numbers
run = prototree.fit(table, sys.argv[2], settings=SETTINGS)

predictions = prototree.predict(run, table["path"].tolist())
table["prediction"] = [one.predicted_class or "" for one in predictions]
table["confidence"] = [one.confidence or 0.0 for one in predictions]
wrong = table[table["prediction"] != table["label"]]
print(table.groupby("label")["confidence"].mean().round(2).to_string())
print(f"{len(wrong)} of {len(table)} photos are answered wrongly")
print(wrong[["path", "label", "prediction"]].to_string(index=False))
