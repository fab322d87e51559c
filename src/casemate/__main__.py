"""``python -m casemate``: starts the interpreter again, isolated, as the installed command does.

This interpreter has read the caller's PYTHON* variables and .pth files already, so nothing but the next
one may launch a sandbox.
"""

import os
import sys

if __name__ == "__main__":
    entry = os.path.join(os.path.dirname(os.path.abspath(__file__)), "cli", "entry.py")
    os.execv(sys.executable, [sys.executable, "-I", "-S", entry, *sys.argv[1:]])
