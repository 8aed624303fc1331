"""The `tinker` package against `areal-bus serve`, over HTTP and with real processes (`make test-tinker`).

The programs (`program_*.py`) run in the environment of the SDK, .venv-tinker; they print one JSON object.
"""
