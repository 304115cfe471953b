"""``python -m raymm`` is the ``raymm`` command."""

import sys

from raymm.cli.main import main

sys.exit(main())
