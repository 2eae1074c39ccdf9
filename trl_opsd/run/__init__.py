"""Checkpoints, guards, metrics and clocks of a run; nothing here knows a trainer."""
