"""The report of a run: what is recorded while it trains, and the page that is made of it."""
