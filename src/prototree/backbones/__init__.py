"""Images to feature maps: any timm network, weights from anywhere, folding for speed."""
