"""`python run_specsot.py ...` is `specsot eval ...`: the name of a script of a system before this one.

It runs without an installation of the lab, which lies next to it in the repository.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("specsot_lab") is None:
    sys.path.append(str(Path(__file__).parent / "lab"))

from specsot_app.cli import main
from specsot_lab.commands.eval import eval

sys.exit(main(sys.argv[1:], eval))
