"""The method: head roles, role masks, learnable tokens, fusion, and the model that puts them together.

`roles` and `mask` need no torch; `tokens`, `fusion` and `model` do.
"""
