"""From a trace with placements to operators on a `Builder`."""
