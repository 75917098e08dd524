"""Predict: one image or many, one tree or several; inputs and output files."""
