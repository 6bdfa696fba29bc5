"""dear-mini and its model card."""
