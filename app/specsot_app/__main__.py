"""`python -m specsot_app`, the same as `specsot`.

Knows only where the command is.
"""

import sys

from specsot_app.cli import main

sys.exit(main())
