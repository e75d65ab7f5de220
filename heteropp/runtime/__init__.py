"""A rank that trains: train.py is its life, trainer.py its share of a run, executor.py a step."""
