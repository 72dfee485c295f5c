"""Becomes the command in its words, after asking the system to kill it when its parent is gone (Linux).

Run as a file: `python -I with_parent.py COMMAND ...`.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # else it has gone already
        os.execvp(sys.argv[1], sys.argv[1:])
