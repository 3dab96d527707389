"""What cells of a notebook would do. Started by test_endings.py."""

import sys

from accelerate import notebook_launcher


def train(mistake: str) -> None:
    """Imports where the launcher asks for it: PEFT imports bitsandbytes, which may touch a device."""
    from support.mistakes_script import main

    main(mistake)


if __name__ == "__main__":
    for cell in ("sound", "size", "callback"):
        try:
            notebook_launcher(train, args=(cell,), num_processes=2, use_port=sys.argv[1])
        except Exception as error:
            print(f"the cell {cell} raised {type(error).__name__}: {error}\nend of cell", flush=True)
