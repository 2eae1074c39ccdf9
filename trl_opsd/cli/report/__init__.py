"""The command `trl-opsd plan`: which parts of a training need how much memory, from the configs of its models alone."""
