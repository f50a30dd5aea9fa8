"""`python run_specsot.py ...` is `specsot eval ...`: the name of a script of a system before this one."""

import sys

from specsot_app.cli import main

sys.exit(main(["eval", *sys.argv[1:]]))
