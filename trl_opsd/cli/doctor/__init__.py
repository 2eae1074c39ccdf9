"""The command `trl-opsd doctor`: verifies the numerics of a pair of models before a training is paid for."""
