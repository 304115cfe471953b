"""Hide the packages that the variable HIDDEN_PACKAGES names, as if they were not installed.

Python imports this module at its start if its folder is in PYTHONPATH.
"""

import os
import sys
from importlib.machinery import PathFinder

_HIDDEN = set(os.environ.get("HIDDEN_PACKAGES", "").split(","))


class _VisiblePackages:
    """Finder that behaves like Python's own and finds no hidden package."""

    find_distributions = PathFinder.find_distributions
    invalidate_caches = PathFinder.invalidate_caches

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in _HIDDEN:
            return None
        return PathFinder.find_spec(name, path, target)


sys.meta_path = [_VisiblePackages if each is PathFinder else each for each in sys.meta_path]
