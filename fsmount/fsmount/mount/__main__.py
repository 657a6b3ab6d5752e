"""`python -P -m fsmount.mount REQUEST [DESCRIPTOR]`: a server as a process of its own.

REQUEST is a MountRequest as JSON. With DESCRIPTOR the process leaves its parent and writes its
Answer there; without, it stays where it is and tells people on stderr.
"""

import os
import sys

from fsmount.mount.reaper import go_on_in_child
from fsmount.privileges import give_up_all_but_mounting

if __name__ == "__main__":
    if len(sys.argv) > 2 and os.fork():  # before anything is imported that starts threads
        os._exit(0)
    give_up_all_but_mounting()
    go_on_in_child()
    from fsmount.mount.process import main

    sys.exit(main(*sys.argv[1:]))
