"""The rows of the tables in this folder."""

from __future__ import annotations

from typing import NamedTuple

NO_IMPORT = "hf_helix cannot be imported"
NO_STEP = "the first step is an error"
NO_REFUSAL = "what cannot be honoured would be ignored without a word"


class Used(NamedTuple):
    """A name of another package.

    Attributes:
        name: as `module:name` or `module:class.name`.
        purpose: what hf_helix does with it.
        otherwise: what happens if it is not there any more.
        takes: what it is called with: the parameters that are given by place, then `name=` for those given by name;
            empty where this is not checked.
        within: for an attribute that instances have, and their class does not, the function that sets or reads it.
    """

    name: str
    purpose: str
    otherwise: str
    takes: str = ""
    within: str = ""

    @property
    def method(self) -> str:
        """The name without what it belongs to."""
        return self.name.replace(":", ".").rpartition(".")[2]

    @property
    def package(self) -> str:
        """The package that has it."""
        return self.name.partition(":")[0].partition(".")[0]


def used(owner: str, names: str, purpose: str, otherwise: str, takes: str = "", within: str = "") -> tuple[Used, ...]:
    """One row for each of several names of a module, or of a class in it.

    Args:
        owner: the module, or `module:Class`.
        names: of it, with blanks between them.
        purpose: what they are used for.
        otherwise: what happens without them.
        takes: see `Used`.
        within: see `Used`.
    """
    join = "." if ":" in owner else ":"
    return tuple(Used(f"{owner}{join}{name}", purpose, otherwise, takes, within) for name in names.split())
