"""How every value of a trace lies on tensor-parallel ranks."""
