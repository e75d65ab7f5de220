"""Running a plan: train.py sets a rank up, executor.py runs its actions."""
