"""Digits in pictures: a student that reads them only in crops learns from itself to read them in whole pictures."""
