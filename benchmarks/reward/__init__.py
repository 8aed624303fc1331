"""Bench `reward`: the math reward beside math-verify."""
