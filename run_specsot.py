"""`python run_specsot.py ...`, the same as `specsot eval ...`: the name by which a system before this one was run."""

import sys

from specsot_app.cli import main

sys.exit(main(["eval", *sys.argv[1:]]))
