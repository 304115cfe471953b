"""``python -m raymm`` is the ``raymm`` command."""

import sys

from raymm.cli import main

sys.exit(main())
