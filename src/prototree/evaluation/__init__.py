"""Evaluation: metrics, wrong predictions, ensembles, out-of-distribution images, prototype quality, tables, plots."""
