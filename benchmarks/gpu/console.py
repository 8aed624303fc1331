"""`areal-bus` of this checkout: python -m benchmarks.gpu.console COMMAND ..."""

import sys

from areal_bus.launch import main_of_console

if __name__ == "__main__":
    sys.exit(main_of_console())
