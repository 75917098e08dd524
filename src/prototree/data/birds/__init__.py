"""The generated birds: species that differ in known parts, drawn in any number, with the parts' places.

Imports nothing of the package but errors.
"""
