"""What `ditorch-align` is made of: runs on chips and reference, the findings' report, its page."""
