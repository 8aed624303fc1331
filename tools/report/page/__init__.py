"""Draws facts and verdicts as one HTML page with inline SVG, CSS and script. It loads nothing from elsewhere.

Begin with `run_page.py`.
"""
