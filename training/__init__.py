"""Training: makes bundles from pictures. Imports dear_serve, never export or service."""
