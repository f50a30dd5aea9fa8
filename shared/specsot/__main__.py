"""`python -m specsot`, the same as `specsot`."""

import sys

from specsot_app.__main__ import main

sys.exit(main())
