"""The browser app: explore a tree, try an image, review mistakes, and mend the tree by hand."""
