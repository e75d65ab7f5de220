"""Switches from one plan to another in the middle of training (Hetu v2, section 6)."""
