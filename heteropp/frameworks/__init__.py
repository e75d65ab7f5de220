"""A plan as other frameworks' files: one module for each, and what none of them can express."""
