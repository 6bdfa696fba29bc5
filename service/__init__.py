"""The HTTP service: opens a bundle (and a gallery), answers over BentoML. No array maths, no torch."""
