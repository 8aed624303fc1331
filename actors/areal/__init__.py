"""AReaL's request types, and stand-ins for the modules of AReaL that workflows and rewards import.

Imports the settings only. Begin with `stand_ins.py`; `actors/workflows/areal_workflow.py` runs a workflow.
"""
