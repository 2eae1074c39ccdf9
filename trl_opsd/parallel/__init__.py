"""Several processes: failures, random states, precision."""
