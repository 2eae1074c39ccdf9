"""Numbers in pictures: a student that reads them in crops only learns from itself to read them in whole pictures."""
