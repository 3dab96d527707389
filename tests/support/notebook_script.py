"""What cells of a notebook would do. Started by test_endings.py."""

import sys

from accelerate import notebook_launcher
from support.mistakes_script import main

if __name__ == "__main__":
    for cell in ("sound", "size", "callback"):
        try:
            notebook_launcher(main, args=(cell,), num_processes=2, use_port=sys.argv[1])
        except Exception as error:
            print(f"the cell {cell} raised {type(error).__name__}: {error}\nend of cell", flush=True)
