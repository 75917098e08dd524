"""Trains on a table of photos and adds the answers to it: python examples/from_dataframe.py TABLE.csv OUT

The table has the columns path and label, and perhaps split.
"""

import sys

import pandas

import prototree

SETTINGS = dict(word.split("=", 1) for word in sys.argv[3:])

table = pandas.read_csv(sys.argv[1], dtype={"label": str})  # names, also where they look like numbers
run = prototree.fit(table, sys.argv[2], settings=SETTINGS)

answers = [one.answer for one in prototree.predict(run, table["path"].tolist())]
table["answer"] = [answer.label if answer is not None else "" for answer in answers]
table["confidence"] = [answer.confidence if answer is not None else 0.0 for answer in answers]
wrong = table[table["answer"] != table["label"]]
print(table.groupby("label")["confidence"].mean().round(2).to_string())
print(f"{len(wrong)} of {len(table)} photos are answered wrongly")
print(wrong[["path", "label", "answer"]].to_string(index=False))
