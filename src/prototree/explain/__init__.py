"""Why a tree decides as it does, as plain data: one prototype, one decision, the whole tree. Draws nothing.

Imports a run and what lies below. `records` needs no torch, so that `report` can draw without it.
"""
