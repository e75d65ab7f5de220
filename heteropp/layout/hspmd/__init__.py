"""Sharding annotations of unlike layouts, and the communication between any two (Hetu v2)."""
