"""The training script behind `trl-opsd train`: its options, its data, one run of it, and how it is launched."""
