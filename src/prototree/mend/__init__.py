"""A tree mended by hand: edits, the bench they are tried on, the session that keeps them, and learning on with them.

Imports the pipeline and what lies below.
"""
