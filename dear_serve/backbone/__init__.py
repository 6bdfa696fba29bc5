"""CLIP as two readable towers."""
