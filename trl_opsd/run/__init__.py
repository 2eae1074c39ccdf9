"""What keeps a run alive and accounts for it: checkpoints, guards, clocks; nothing here knows a trainer."""
