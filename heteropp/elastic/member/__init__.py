"""A process that has one chip: it trains under one plan after another."""
