"""Images to feature maps: any timm network, weights from anywhere, folding for speed, and how a photo becomes its input.

Imports nothing but the ground floor.
"""
