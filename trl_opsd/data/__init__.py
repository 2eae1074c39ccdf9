"""Turns dataset rows into the token ids of student and teacher; knows no models."""
