"""Three tasks of one small language, and an expert for each: adapters of one base, of which one gives short answers."""
