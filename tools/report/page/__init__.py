"""Draws facts and verdicts as one self-contained HTML page with inline SVG. Begin with `run_page.py`."""
