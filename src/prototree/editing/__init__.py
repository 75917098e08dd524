"""A tree edited by hand: edits, the bench that tries them, the session that keeps them, and training further with them.

Imports the pipeline and what lies below.
"""
