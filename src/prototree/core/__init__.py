"""The paper's maths: the tree's shape, nearest patches, routing, leaves, the model itself, pruning, and trees on disk.

Imports the network and the ground floor.
"""
