"""What agents act in: environments, each in a thread of its own."""

from trl_opsd.environments.environments import Called, Environments, check_factory

__all__ = ["Called", "Environments", "check_factory"]
