"""The report of a run: what is recorded while it trains, and the page made from it."""
