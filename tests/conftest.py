"""What all tests rely on."""

from __future__ import annotations

import signal

# A shell starts what it runs in the background with interrupts ignored, and every process started
# from there inherits that; the commands under test are to be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)
