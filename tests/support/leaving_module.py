"""User module that exits the program when it is imported."""

import sys

sys.exit(3)
