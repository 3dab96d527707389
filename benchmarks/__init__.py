"""What is measured, and what a GPU is checked with; nothing here is part of the package."""
