"""The paper's maths: tree shape, nearest patches, routing, leaves, the model, pruning, projection, trees on disk."""
