"""Checks a trainer's arguments against each other before a model is loaded; `config.py` checks single options."""
