"""Communication as operators: collectives, their transports, pipeline transfers, the emulated link."""
