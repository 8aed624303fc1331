"""The HTML page of a sweep's folder, drawn by the parts of `tools.report`. Begin with `sweep_page.py`."""
