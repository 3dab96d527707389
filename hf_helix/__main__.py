"""`python -m hf_helix` is `hf-helix`."""

from hf_helix.cli import program

if __name__ == "__main__":
    program()
