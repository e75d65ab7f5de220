"""What heteropp.simulator.simulate is made of: a plan as actors, the events, and what comes out."""
