"""Feature maps of a frozen network, computed once and kept on disk."""
