"""What agents act in: environments, each in a thread of its own."""

from trl_opsd.environments.environments import Called, Environments

__all__ = ["Called", "Environments"]
