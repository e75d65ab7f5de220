"""What tools/elastic-bench measures, a family a file."""
