"""From photos to a finished run: the stages, `fit`, and the paper's tables.

Imports explanations and what lies below.
"""
