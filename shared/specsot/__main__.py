"""`python -m specsot`, the same as `specsot`."""

import sys

from specsot_app.cli import main

sys.exit(main())
