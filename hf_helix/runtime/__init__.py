"""Runs plans: mesh, streams, executor (runs a plan), runner (runs a schedule). Never imports transformers."""
