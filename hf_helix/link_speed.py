"""The speed of an emulated link, as text and as numbers.

In:   a text such as "300mbit", "10gbit,50us" or "even".
Out:  bits a second and seconds.
Must hold: a text that is no speed is an error with one that is. Imports the standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

EVEN = "even"
EXAMPLES = "'300mbit', '10gbit', '300mbit,1ms' or 'even'"

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


@dataclass(frozen=True)
class LinkSpeed:
    """What an emulated link carries, each way.

    Attributes:
        rate: bits a second; None where it is found by measuring, so that communication takes as long as computation.
        latency: seconds until the first byte arrives.
    """

    rate: float | None
    latency: float = 0.0

    @property
    def text(self) -> str:
        """The text that `parse_link` reads as this speed."""
        first = EVEN if self.rate is None else f"{self.rate / 1e6:.12g}mbit"
        return first + (f",{self.latency * 1e3:.12g}ms" if self.latency else "")

    def seconds(self, count: float) -> float:
        """How long so many bytes are on their way."""
        return self.latency + (8 * count / self.rate if self.rate else 0.0)

    def __str__(self) -> str:
        late = f", {_amount(self.latency, (('ms', 1e-3), ('us', 1e-6)))}" if self.latency else ""
        return f"{EVEN if self.rate is None else format_rate(self.rate)}{late}"


def parse_link(text: str) -> LinkSpeed:
    """The speed that `HelixConfig(link=...)` names: a rate or "even", and after a comma perhaps a latency.

    Raises:
        TypeError: it is no text.
        ValueError: it names none.
    """
    if not isinstance(text, str):
        raise TypeError(f"link must be a speed as a string, such as {EXAMPLES}, or None; got {text!r}")
    first, comma, second = (part.strip().lower() for part in text.partition(","))
    rate = None if first == EVEN else _quantity(first, _RATES)
    latency = _quantity(second, _TIMES) if comma else 0.0
    if (rate is None and first != EVEN) or rate == 0 or latency is None:
        raise ValueError(
            f"link={text!r} is no speed of a link; give a rate in kbit, mbit or gbit a second, or 'even', and after a "
            f"comma perhaps a latency in us, ms or s, such as {EXAMPLES}"
        )
    return LinkSpeed(rate, latency)


def format_rate(rate: float) -> str:
    """Bits a second for people, such as "412 Mbit/s"."""
    return _amount(rate, (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)))


def _quantity(text: str, units: dict[str, float]) -> float | None:
    match = re.fullmatch(f"{_NUMBER} ?({'|'.join(units)})", text)
    return float(f"{float(match[1]) * units[match[2]]:.12g}") if match else None


def _amount(value: float, units: tuple[tuple[str, float], ...]) -> str:
    name, unit = next((each for each in units if value >= each[1]), units[-1])
    return f"{value / unit:.3g} {name}" if value / unit < 1000 else f"{value / unit:,.0f} {name}"
