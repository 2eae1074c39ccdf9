"""What a run shows: metrics, progress, memory."""
