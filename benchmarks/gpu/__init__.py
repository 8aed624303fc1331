"""Bench `gpu`: what one card shows in ten minutes. Begin with bench.py; shapes.py has the formulas of the bounds."""
