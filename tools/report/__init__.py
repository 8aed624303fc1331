"""The report of a run, of several runs or of a sweep: one HTML file that explains itself to a reader.

Reads the journal through `tools`. facts/ gathers, verdict/ judges, page/ draws. Begin with `__main__.py`.
"""
