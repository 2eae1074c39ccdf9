"""A house with a key and a chest, as in a text adventure: where they are, only the teacher knows."""
