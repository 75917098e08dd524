"""How a tree learns: the loop, its batches and cached maps, objectives, leaves, teachers, projection, and the recipes.

Imports data, the tree and what lies below.
"""
