"""The browser app: explore a tree, try images, review errors, and edit the tree by hand, on a local server."""
