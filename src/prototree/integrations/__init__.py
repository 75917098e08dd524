"""Trees in the tools of others: ONNX files, scikit-learn, the model hub, and trees of the published code.

Each file needs an optional package or a foreign format, and nothing below knows of it. Imports all up to `report`.
"""
