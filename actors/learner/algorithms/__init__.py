"""Parts of an algorithm, pure functions of tensors: `parts.py` has their inputs; docs/algorithms.md lists them."""
