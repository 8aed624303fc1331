"""Laboratories: simulators, sweeps and studies. No training job executes them; README.md says what each answers.

Imports every package of the product; no package of the product imports this one.
"""
