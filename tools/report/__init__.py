"""The report: one HTML file that explains itself. facts/ gathers, verdict/ judges, page/ draws. See `__main__.py`."""
