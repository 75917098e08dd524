"""Images to feature maps: any timm network, weights from anywhere, folding for speed, and what they are shown.

Imports nothing but the ground floor.
"""
