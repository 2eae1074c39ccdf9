"""The command `trl-opsd doctor`: proves the numerics of a pair of models before a training is paid for."""
