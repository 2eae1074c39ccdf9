"""The options of a training: one table of what each may be, and when it counts; the rules between them; their names."""
