"""Predictions for one image or many by one tree or several: `predict`, the inputs it reads and the files it writes."""
