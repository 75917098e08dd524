"""Edit a trained tree by hand: edits and their history, applying them on cached features, saving, fine-tuning."""
