"""Three tasks of one small language, and an expert for each: adapters of one base; one gives short answers."""
