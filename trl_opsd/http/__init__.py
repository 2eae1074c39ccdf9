"""Requests to servers."""
