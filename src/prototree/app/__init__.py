"""The browser app: explore a tree, try an image, review mistakes, and edit the tree by hand."""
