"""Documents of unlike lengths in one step, each in the shortest sequence that holds it.

Every length of sequence has a plan of its own, for the same ranks (Hetu v2, section 7.3).
"""
