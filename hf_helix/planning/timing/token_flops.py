"""The work of a token in a model, apart from the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenFlops:
    """Floating-point operations of a token: in linears, and in attention for each token of the sequence."""

    linear: float
    attention_per_length: float

    def full(self, length: int) -> float:
        """Returns the operations of a token in a sequence of `length`, with attention counted as non-causal."""
        return self.linear + self.attention_per_length * length

    def causal(self, length: int) -> float:
        """Returns the operations of a token in a sequence of `length`, with attention counted as causal."""
        return self.linear + self.attention_per_length * length / 2
