"""Explanations as plain data: one prototype, one decision, the whole tree. Draws nothing; `records` needs no torch."""
