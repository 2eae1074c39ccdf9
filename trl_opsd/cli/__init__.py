"""The command `trl-opsd`: what a user runs before, around and after a training. The trainer knows nothing of it."""
