"""`python -P -m fsmount.mount.kernel CONFIG [DESCRIPTOR]`: a supervisor as a process of its own.

CONFIG is a Config as JSON; what happens is written to DESCRIPTOR, in one line.
"""

import sys

from fsmount.mount.kernel.start import main
from fsmount.privileges import give_up_all_but_mounting

if __name__ == "__main__":
    give_up_all_but_mounting()
    sys.exit(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
